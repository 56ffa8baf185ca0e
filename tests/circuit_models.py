"""Models and data for the tests of circuit extraction."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.circuit.cache import CachedTower, Work, WorkingModel
from hydra_ensembles.circuit.exact import Exact, Naive
from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.circuit.scores import Objective, Score, read_samples
from hydra_ensembles.heads.masking import Head, heads_in, working_copy
from hydra_ensembles.heads.ranking import HeadRanking
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import CLASSES, random_batches, random_ensemble

Inputs = Tensor | dict[str, Tensor]
Batches = list[tuple[Inputs, Tensor]]
SCORES: tuple[Score, ...] = ("acc", "ood", "avg")


@dataclass(frozen=True)
class Problem:
    model: Ensemble
    id_batches: Batches
    ood_batches: Batches

    def extract(self, dtype: torch.dtype = torch.float64, **options: Any) -> HeadRanking:
        """Extract a circuit, in float64 if nothing is said, without a progress bar."""
        model = deepcopy(self.model).to(dtype)
        return extract_circuit(model, self.id_batches, self.ood_batches, **{"progress": False} | options)


def random_problem(
    shape: str = "image-cls",
    id_sizes: tuple[int, ...] = (5, 4, 2),
    ood_sizes: tuple[int, ...] = (6, 3),
    seed: int = 0,
    ties: bool = False,
) -> Problem:
    """A random model and random data; with `ties`, some samples repeat, within and across ID and OOD."""
    model = random_ensemble(shape, seed=seed)
    id_batches = random_batches(model, id_sizes, seed, ragged=True)
    ood_batches = random_batches(model, ood_sizes, seed + 1000, ragged=True)
    if ties:
        inputs, labels = id_batches[0]
        id_batches.append((inputs, (labels + 1) % CLASSES))
        ood_batches.append((inputs, labels))
        ood_batches.append(ood_batches[0])
    return Problem(model, id_batches, ood_batches)


def searches(
    problem: Problem, score: Score, dtype: torch.dtype = torch.float64, layers: list[int] | None = None
) -> tuple[Naive, Exact, list[Head]]:
    """Both methods on one problem, and the candidate heads."""
    model = working_copy(problem.model.to(dtype))
    samples = read_samples(model, problem.id_batches, None if score == "acc" else problem.ood_batches, 0)
    objective = Objective(score, samples.id_count, tuple(samples.ood_sources.values()))
    heads = heads_in(model, layers)
    tower = CachedTower(WorkingModel(model, [], Work()), samples, heads, 64, 10**9)
    return Naive(model, samples, objective, Work(), 64, []), Exact(tower, objective), heads


def evidence(ranking: HeadRanking) -> dict[str, object]:
    """What two equivalent methods must agree on."""
    made = {name: ranking.provenance[name] for name in ("errors", "discordance", "start")}
    return {"heads": [str(head) for head in ranking.heads], "scores": ranking.scores, **made}
