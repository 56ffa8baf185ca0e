"""How long an extraction takes: said before it starts, what `auto` decides by, and a bar that moves with candidates.

A few passes over a few samples are timed. Work is counted in multiply-adds: a candidate of the exact method runs the
blocks from that of its head on, and bounds end most candidates early; by how much, benchmarks have shown.
"""

import sys
import time
from collections.abc import Sequence

import torch
from tqdm import tqdm

from ..heads.ranking import Head
from ..model.ensemble import Ensemble
from .cache import forward_cost, sample_cost
from .joint import Texts
from .scores import Method, Samples, Score

MINUTES = 600.0  # seconds up to which `auto` takes the exact method
_SHARE = {"acc": 0.15, "ood": 0.4, "avg": 0.4}  # of the blocks above its head that a candidate of "exact" runs
_SCREENED_SHARE = {"acc": 0.15, "ood": 0.16, "avg": 0.16}  # and one of "screened"
_TIMED = {"cuda": 2048, "cpu": 8}  # samples in a timed pass, at most
_PASSES = 3  # that are timed; the fastest counts


def seconds_of(
    model: Ensemble,
    texts: Texts | None,
    samples: Samples,
    candidates: Sequence[Head],
    steps: int,
    score: Score,
    batch_size: int,
    ranks: int,
) -> dict[Method, float]:
    """Seconds that so many steps would take by each method, about."""
    whole: dict[bool, tuple[int, int]] = {False: (forward_cost(model, samples), model.num_layers)}  # cost, layers
    if texts is not None:
        whole[True] = (forward_cost(texts.tower, texts.prompts), texts.tower.num_layers)
    above = 0.0  # multiply-adds of the blocks from that of each candidate on
    for head in candidates:
        cost, layers = whole[head.tower == "text"]
        above += cost * (layers - head.layer) / layers
    passes = sum(len(candidates) - step for step in range(steps))  # of one candidate each
    each = above / len(candidates) * passes
    work: dict[Method, float] = {
        "naive": passes * sum(cost for cost, _ in whole.values()),
        "exact": _SHARE[score] * each,
        "screened": _SCREENED_SHARE[score] * each,
    }
    speed = _multiply_adds_a_second(model, samples, batch_size) * ranks
    return {method: products / speed for method, products in work.items()}


@torch.no_grad()
def _multiply_adds_a_second(model: Ensemble, samples: Samples, batch_size: int) -> float:
    """How fast the device runs blocks."""
    group = max(samples.groups, key=len)
    rows = min(len(group), batch_size, _TIMED["cuda" if model.device.type == "cuda" else "cpu"])
    taken = []
    for _ in range(_PASSES):
        start = time.perf_counter()
        model(*group.take(slice(0, rows))).sum().item()  # waits for a GPU
        taken.append(time.perf_counter() - start)
    return rows * sample_cost(model, group) / max(min(taken), 1e-6)


def in_words(seconds: float) -> str:
    """`less than a minute`, `about 3 min`, `about 2.5 h`."""
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def say(text: str) -> None:
    """A line on the standard error, above any bar."""
    tqdm.write(text, file=sys.stderr)


class CandidateBar:
    """A progress bar over the candidates of all steps of a run; one that was given up early counts as well."""

    def __init__(self, name: str, candidates: int, budget: int, done: int, ranks: int, hidden: bool) -> None:
        self._counts, self._ranks = [candidates - step for step in range(budget)], ranks
        self._step, self._start = done, sum(self._counts[:done])  # number of the step, and candidates before it
        self.bar = tqdm(
            total=sum(self._counts), initial=self._start, desc=name, unit="head", disable=hidden, dynamic_ncols=True
        )

    def tell(self, decided: int) -> None:
        """So many candidates of this rank are decided in this step; fewer than were told before are none."""
        position = self._start + min(decided * self._ranks, self._counts[self._step])
        if position > self.bar.n:
            self.bar.update(position - self.bar.n)

    def next_step(self, score: float) -> None:
        """A head is chosen; the score is that of the model without it."""
        self.bar.set_postfix(removed=f"{self._step + 1}/{len(self._counts)}", score=f"{score:.4f}", refresh=False)
        self.tell(self._counts[self._step])
        self._start += self._counts[self._step]
        self._step += 1
