"""Estimated duration of an extraction: printed before it starts, used by `auto`; and its progress bar.

A few passes over a few samples are timed. Work is counted in multiply-adds: a candidate of the exact method runs the
blocks from that of its head on, and bounds stop most candidates early; the shares below were measured in benchmarks.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from ..heads.ranking import Head
from ..model.cost import interleaved_times
from ..model.ensemble import Ensemble
from .cache import forward_cost, sample_cost
from .scores import CircuitData, Method, Objective

LONGEST = 600.0  # seconds up to which `auto` chooses the exact method
_SHARE = {"acc": 0.15, "ood": 0.4, "avg": 0.4}  # share of the blocks from its head on that a candidate of "exact" runs
_WITH_TIES = 0.5  # that share for "acc" with ties by likelihood: tied candidates run to the end
_SCREENED_SHARE = 0.16  # that share for "screened"; for "acc" it is the exact method
_TIMED = {"cuda": 2048, "cpu": 8}  # maximum number of samples in a timed pass
_PASSES = 3  # number of timed passes; the fastest counts


def seconds_of(
    towers: Sequence[tuple[Ensemble, CircuitData]], left: Sequence[Head], steps: int, objective: Objective, speed: float
) -> dict[Method, float]:
    """Estimate the seconds that `steps` steps take with each method; `speed` is multiply-adds per second of all ranks.

    `towers` are the classifier with all samples and, for a dual encoder, the text tower with the prompts; `left` are
    the candidates of the first of these steps.
    """
    costs = [forward_cost(model, samples) for model, samples in towers]
    above = 0.0  # multiply-adds of the blocks from each candidate's on, summed
    for head in left:
        tower = -1 if head.tower == "text" else 0
        above += costs[tower] * (1 - head.layer / len(towers[tower][0].config.head_counts))
    passes = sum(len(left) - step for step in range(steps))  # evaluations of one candidate
    blocks = above / len(left) * passes
    follows_ties = objective.score == "acc" and objective.ties == "likelihood"
    share = _WITH_TIES if follows_ties else _SHARE[objective.score]
    estimated = share if objective.score == "acc" else _SCREENED_SHARE
    work: dict[Method, float] = {"naive": passes * sum(costs), "exact": share * blocks, "screened": estimated * blocks}
    return {method: products / speed for method, products in work.items()}


@torch.no_grad()
def speed_of(model: Ensemble, samples: CircuitData, batch_size: int) -> float:
    """Measure multiply-adds per second of the model on its device."""
    group = max(samples.groups, key=len)
    rows = min(len(group), batch_size, _TIMED["cuda" if model.device.type == "cuda" else "cpu"])
    seconds = interleaved_times({"pass": partial(model, *group.take(slice(0, rows)))}, _PASSES, model.device)["pass"]
    return rows * sample_cost(model, group) / max(min(seconds), 1e-6)


def in_words(seconds: float) -> str:
    """`less than a minute`, `about 3 min`, `about 2.5 h`."""
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def say(text: str) -> None:
    """Print a line to standard error, above any progress bar."""
    tqdm.write(text, file=sys.stderr)


def bar_updater(bar: Any, start: int, most: int, ranks: int) -> Callable[[int], None]:
    """Return a callback for `Search.on_progress` that advances the bar from `start` by at most `most`, never back."""
    return lambda decided: bar.update(max(0, start + min(decided * ranks, most) - bar.n))
