"""Algorithm 1: repeatedly remove the head whose removal hurts the score least."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path

import torch
from tqdm import tqdm

from .._utils import require_device, without_autocast
from ..batches import Batches, Sources, in_model_order
from ..digest import digest
from ..errors import ConfigError, DataError
from ..heads.masking import (
    Head,
    heads_in,
    max_removable,
    removable,
    working_copy,
)
from ..heads.ranking import HeadRanking, Score, require_budget
from ..model.dual_encoder import (
    DEFAULT_TEMPLATES,
    DualEncoder,
    Templates,
    checked_names,
    checked_templates,
    require_ensemble,
    require_model,
    zero_shot,
)
from ..model.ensemble import Ensemble
from ..settings import from_plain, require, to_plain
from ..store import Store
from .cache import CachedTower, Work, WorkingModel, default_max_memory, fitting_batch_size
from .exact import Exact, JointExact, Naive, Search, Texts, of_tower, read_texts
from .scores import CircuitData, Method, Objective, Ties, read_samples


@without_autocast()
def extract_circuit(
    ensemble: Ensemble | DualEncoder,
    id_batches: Batches,
    ood_batches: Sources | None = None,
    *,
    score: Score = "avg",
    budget: int,
    method: Method = "exact",
    ties: Ties = "likelihood",
    layers: Iterable[int] | None = None,
    device: torch.device | str | None = None,
    max_memory: float | None = None,
    batch_size: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> HeadRanking:
    """Rank heads by Algorithm 1 of the paper: every step switches off the head without which the score S is highest.

    S is the accuracy on the labelled `id_batches` (`"acc"`), the AUROC of the maximum softmax probability between them
    and `ood_batches` (`"ood"`, ties count half), or the mean of both (`"avg"`). `ood_batches` may be a mapping from
    names to batches: sources of equal weight, however many samples each has; `data.synthetic_ood` makes some of the ID
    samples. All samples are held in memory. The model has one member and is not changed.

    `method="naive"` runs the whole model for every head: the reference. `"exact"` makes the same choices with a small
    part of the work. In float64 the result equals the naive one; in float32 rounding may decide between heads that are
    a few integer units apart. Of heads that leave the same S, `ties="likelihood"` removes the one with the larger
    summed log-likelihood of the labels, rounded to 1e-6; then, or at once with `"order"` (the paper's way), the first.

    For a dual encoder, the heads of both towers are candidates together, and images are classified by `class_names`
    (in the order of the labels) in sentences, as in `zero_shot`.

    `layers` limits the candidates. It runs on the device of the model, or on another.
    `max_memory` bytes of activations are kept besides the embedded samples (None: half of the
    free memory of a GPU, or a quarter of that of the host or container). `batch_size` counts samples, or pairs of head
    and sample. `seed` is set while the batches are read, for loaders that shuffle. The folder `output` records every
    removed head: a run that was stopped, or has a larger budget, goes on. `progress` shows a bar with the time left.

    Returns:
        The heads in removal order, with S after each removal; `provenance` holds the integers behind S, and the work in
        blocks, in units of one pass of the whole model over all samples (`model_forwards`).

    Examples:
        >>> known, odd = [(torch.rand(7, 3, 64, 64), torch.arange(7))], [torch.rand(7, 3, 64, 64)]
        >>> ranking = he.extract_circuit(base, known, odd, score="avg", budget=2, layers=[5], progress=False)
        >>> [head.layer for head in ranking.first(2)], ranking.score
        ([5, 5], 'avg')
    """
    require_model(ensemble, "extract_circuit")
    for name, value, accepted in (("score", score, Score), ("method", method, Method), ("ties", ties, Ties)):
        require(name, value, accepted)
    if ensemble.num_members != 1:
        raise ConfigError(f"a circuit belongs to one model, got {ensemble.num_members}; give ensemble.member(index)")
    dual = ensemble if isinstance(ensemble, DualEncoder) else None
    names, sentences = ((), ()) if dual is None else (checked_names(class_names or ()), checked_templates(templates))
    candidates = heads_in(ensemble, layers)
    require_budget(budget, max_removable(ensemble, candidates))
    if score != "acc" and ood_batches is None:
        raise DataError(
            f'score="{score}" needs OOD samples; give ood_batches (data.synthetic_ood makes some), or use score="acc"'
        )

    device = require_device(device or ensemble.device)
    model = ensemble if isinstance(ensemble, Ensemble) else zero_shot(ensemble, names, sentences)
    require_ensemble(model, "extract_circuit", classifies=True)
    if getattr(model.config.stem, "prefix", ()):
        raise ConfigError("heads are searched in a model without a prefix; give the one before with_prefix")
    id_batches = in_model_order(id_batches, "id_batches", model)
    model = working_copy(model, device)
    samples = read_samples(model, id_batches, None if score == "acc" else ood_batches, seed)
    identity = {
        "model": digest([to_plain(ensemble.config), ensemble]),
        "data": samples.digest(),
        "score": score,
        "method": method,
        "ties": ties,
        "dtype": str(model.dtype),
        "candidates": {"heads": [str(head) for head in candidates], "names": names, "templates": sentences},
    }
    texts = None if dual is None else read_texts(dual, names, sentences, device)
    objective = Objective(score, samples.id_count, tuple(samples.ood_sources.values()), ties)
    size, work = batch_size or fitting_batch_size(model, samples), Work()
    memory = default_max_memory(device) if max_memory is None else int(max_memory)  # users write 2e9
    with Store(output, identity, "a circuit") as store:
        kept = takewhile(store.has, map("heads/{}".format, count()))
        steps = [from_plain(Step, store.step(name, dict), "step") for name in kept]
        done = [step.head for step in steps if step.head is not None]
        left = [head for head in candidates if head not in done]
        if len(done) < budget:
            search: Search = Naive(model, samples, objective, work, size, done, texts)
            if method == "exact":
                search = branch_and_bound(model, texts, samples, objective, work, size, memory, left, done)
            taken = greedy(search, model, left, work, begun=bool(steps))
            name = f"circuit/{method} {score}"
            with tqdm(total=budget, initial=len(done), desc=name, unit="head", disable=not progress) as bar:
                for step in islice(taken, budget + 1 - len(steps)):
                    store.step(f"heads/{len(steps)}", partial(to_plain, step))
                    steps.append(step)
                    bar.set_postfix(score=f"{objective.achieved(step.errors, step.discordance):.4f}", refresh=False)
                    bar.update(step.head is not None)
    start, *steps = steps[: budget + 1]
    whole = len(samples.labels) * len(model.config.head_counts)  # blocks of one pass
    whole += 0 if texts is None else len(texts.prompts.labels) * len(texts.tower.config.head_counts)
    return HeadRanking(
        heads=tuple(step.head for step in steps if step.head is not None),
        scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
        method=f"circuit/{method}",
        score=score,
        provenance={
            **identity,
            "seed": seed,
            "device": device.type,
            "layers": sorted({head.layer for head in candidates}),
            "budget": budget,
            "id_samples": objective.id_count,
            "ood_samples": sum(objective.ood_sizes),
            "ood_sources": samples.ood_sources,
            "start": objective.achieved(start.errors, start.discordance),
            "errors": [step.errors for step in steps],
            "discordance": [step.discordance for step in steps],
            "model_forwards": sum(step.blocks for step in (start, *steps)) / whole,
        },
    )


@dataclass(frozen=True)
class Step:
    """A removed head, the integers of the model without it, and the work; the first step removes none."""

    head: Head | None
    errors: int
    discordance: int
    blocks: int = 0


def greedy(search: Search, model: Ensemble, left: list[Head], work: Work, begun: bool) -> Iterator[Step]:
    """Remove the heads of `left`, each time that which is missed least; if not begun, the first step removes none."""
    spent = 0
    if not begun:
        start = search.result
        yield Step(None, start.errors, start.discordance)
    while True:
        choice = search.choose(removable(model, left))
        search.remove(choice.head)
        left.remove(choice.head)
        yield Step(choice.head, choice.errors, choice.discordance, work.blocks - spent)
        spent = work.blocks


def branch_and_bound(
    model: Ensemble,
    texts: Texts | None,
    samples: CircuitData,
    objective: Objective,
    work: Work,
    batch_size: int,
    max_memory: int,
    left: Sequence[Head],
    off: Sequence[Head],
) -> Search:
    """The exact search among the heads in `left`, after those in `off` were removed."""

    def cached(model: Ensemble, samples: CircuitData, of_text: bool, share: float) -> CachedTower:
        """A copy of a tower without the heads in `off`, with a share of the memory for cached activations."""
        working = WorkingModel(model, of_tower(off, of_text), work)
        return CachedTower(working, samples, of_tower(left, of_text), batch_size, int(share * max_memory))

    images = Exact(cached(model, samples, False, 1.0 if texts is None else 0.75), objective)
    return images if texts is None else JointExact(images, texts, cached(texts.tower, texts.prompts, True, 0.25))
