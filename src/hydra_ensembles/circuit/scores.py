"""Objectives of circuits: errors and discordant pairs, counted as integers on fixed samples.

E is the number of misclassified ID samples. D is twice the number of pairs of an ID and an OOD sample in which the OOD
sample has the higher confidence, plus the number of tied pairs. With several OOD sources of n_s samples each, every D_s
has weight L / n_s, where L is the least common multiple of all n_s: 1 - D / (2 · n · L · sources) is then the mean of
their AUROCs. Integers compare exactly, so bounds on them are exact too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import torch_seeded, with_float64
from ..batches import Batches, Sources, begin_epoch, iterate, named_sources, require_labels, restored
from ..digest import digest, require_other_samples, row_digests
from ..errors import DataError
from ..heads.masking import Head
from ..heads.ranking import Score
from ..model.ensemble import Ensemble
from ..model.inputs import Arguments

Method = Literal["naive", "exact"]
Ties = Literal["likelihood", "order"]

IntArray = npt.NDArray[np.int64]

# --- samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Samples whose inputs have the same shape (texts as padded in their batch), so that they can share a batch."""

    numbers: IntArray  # [g], the sample in each row
    inputs: Arguments  # images [g, channels, H, W] or token ids [g, T]; mask and token type ids [g, T] or None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    @classmethod
    def join(cls, groups: Sequence["SampleGroup"]) -> "SampleGroup":
        """Concatenate groups whose inputs have the same shape."""
        columns = zip(*(group.inputs for group in groups), strict=True)
        inputs = cast(Arguments, tuple(None if column[0] is None else torch.cat(column) for column in columns))
        return cls(np.concatenate([group.numbers for group in groups]), inputs)

    def take(self, rows: slice) -> Arguments:
        """Return the inputs of some samples."""
        return cast(Arguments, tuple(None if tensor is None else tensor[rows] for tensor in self.inputs))


@dataclass(eq=False)
class CircuitData:
    """All samples, numbered in reading order: ID first, then OOD."""

    groups: tuple[SampleGroup, ...]  # one per shape of inputs
    labels: Tensor  # [n], -1 for samples without a label, such as all OOD samples
    sources: Mapping[str, int]  # name -> number of samples; the ID source is first

    def __post_init__(self) -> None:
        """Compute `group_of` and `row_of`, `[n]` each: the group of each sample, and its row there."""
        self.group_of, self.row_of = np.zeros((2, len(self.labels)), np.int64)
        for index, group in enumerate(self.groups):
            self.group_of[group.numbers], self.row_of[group.numbers] = index, np.arange(len(group))

    @property
    def id_count(self) -> int:
        """Number of ID samples."""
        return next(iter(self.sources.values()))

    @property
    def ood_sources(self) -> dict[str, int]:
        """Number of samples of each OOD source, by name."""
        return dict(list(self.sources.items())[1:])

    def digest(self) -> str:
        """A digest that changes with any sample, label, or their order."""
        inputs = [[torch.from_numpy(group.numbers), *group.inputs] for group in self.groups]
        return digest([dict(self.sources), self.labels, inputs])


def read_samples(model: Ensemble, id_batches: Batches, ood_batches: Sources | None, seed: int) -> CircuitData:
    """Read all batches, check them, and move them to the device and dtype of the model.

    Generators of PyTorch and of the sources are seeded with `seed` and restored afterwards: a shuffling loader gives
    the same samples when a run is resumed.
    """
    groups: dict[tuple[object, ...], list[SampleGroup]] = {}  # by the shape of the inputs
    labels: list[Tensor] = []
    rows: dict[str, list[bytes]] = {}  # digests of the samples of each source
    sources = {"id_batches": id_batches} | ({} if ood_batches is None else named_sources(ood_batches, "ood_batches"))
    with torch_seeded(seed, model.device), restored(*sources.values()):
        for name, batches in sources.items():
            begin_epoch(batches, 0, seed)
            labelled, rows[name] = name == "id_batches", []
            for index, batch, targets in iterate(batches, name, labelled):
                inputs = model.unpack(batch)
                numbers = np.arange(len(inputs[0])) + sum(map(len, labels))
                shape = tuple(None if tensor is None else (tensor.dtype, *tensor.shape[1:]) for tensor in inputs)
                groups.setdefault(shape, []).append(SampleGroup(numbers, inputs))
                if labelled:
                    labels.append(require_labels(targets, model.num_classes, name, index).cpu())
                else:
                    labels.append(torch.full((len(numbers),), -1))
                rows[name] += row_digests(batch)
    inside = rows.pop("id_batches")
    require_other_samples("id_batches", inside, rows)
    truth = torch.cat(labels)
    known = truth[: len(inside)]
    if known.min() == known.max():
        raise DataError(f"all samples of id_batches have the label {int(truth[0])}; a circuit needs two classes")
    return CircuitData(
        groups=tuple(map(SampleGroup.join, groups.values())),
        labels=truth.to(model.device),
        sources={"id_batches": len(inside)} | {name: len(found) for name, found in rows.items()},
    )


def to_device(index: IntArray, device: torch.device) -> Tensor:
    """Copy indices to a device, without blocking."""
    return torch.from_numpy(index).to(device, non_blocking=True)


def parts(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `count` items."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# --- answers -----------------------------------------------------------------------------------------------

MOST_CONFIDENT = torch.iinfo(torch.int64).max
LEAST_CONFIDENT = torch.iinfo(torch.int64).min
_LARGEST_LOG_ODDS = 2.0**30
_LIKELIHOOD_STEP = 1e-6  # rounding of a summed log-likelihood
_LARGEST_LOSS = 2.0**62  # in units of `_LIKELIHOOD_STEP`


def grid_step(dtype: torch.dtype) -> float:
    """Grid step of log-odds computed in `dtype`: 2^-30 for float64, 2^-12 for float32, 2^-5 for half precision."""
    return {torch.float64: 2.0**-30, torch.float32: 2.0**-12}.get(dtype, 2.0**-5)


def judge(logits: Tensor, labels: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate logits `[B, C]` (C at least 2) against labels `[B]`.

    Returns three tensors `[B]`: whether the answer is wrong, the confidence in grid steps (int64), and whether all
    logits are finite. `step` is the `grid_step` of the dtype in which the logits were computed.
    """
    precise = logits.double()
    largest = precise.amax(-1, keepdim=True)
    answer = (precise >= largest - step / 256).int().argmax(-1)  # ties go to the first class
    confidence = log_odds_of(precise, answer).clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    return answer != labels, (confidence / step).round().nan_to_num().long(), precise.isfinite().all(-1)


def log_odds_of(logits: Tensor, classes: Tensor) -> Tensor:
    """log(p / (1 - p)) of one class per row: logits `[B, C]` and classes `[B]` to `[B]`."""
    chosen = classes[..., None]
    others = logits.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return logits.gather(-1, chosen)[..., 0] - others


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of the labels `[B]`, in float64 and never negative; 0 for samples without a label."""
    precise = logits.double()
    loss = -F.logsigmoid(log_odds_of(precise, labels.clamp(min=0)))
    return torch.where(labels < 0, 0.0, loss.nan_to_num(posinf=_LARGEST_LOG_ODDS).clamp(0, _LARGEST_LOG_ODDS))


NO_HEAD = Head(-1, -1)  # the `head` of a result with no further head removed


def not_finite(finite: Tensor, samples: CircuitData, head: Head) -> DataError:
    """An error that names a sample whose logits are not finite (`finite` is `[n]`)."""
    number = int((~finite).nonzero()[0, 0])
    names = [name for name, count in samples.sources.items() for _ in range(count)]
    name, number = names[number], number - names.index(names[number])
    state = "" if head == NO_HEAD else f" with head {head} switched off"
    return DataError(f"sample {number} of {name} gives logits that are NaN or infinite{state}; check it, or the dtype")


class Result(NamedTuple):
    """The integers of the model without one more head. Smaller is better, in the order of the fields."""

    value: int
    loss: int  # summed over the labels, in steps of 1e-6; 0 if ties go to the first head
    head: Head
    errors: int
    discordance: int


@dataclass(eq=False)
class Objective:
    """The integer to minimise, and the score S it represents."""

    score: Score
    id_count: int
    ood_sizes: tuple[int, ...] = ()  # samples of each OOD source; none for `acc`
    ties: Ties = "order"

    def __post_init__(self) -> None:
        """Compute the weight of a pair of each source, and the effective number of OOD samples over all sources."""
        common = math.lcm(*self.ood_sizes)
        self.weights = tuple(common // size for size in self.ood_sizes)
        self.balanced = common * len(self.ood_sizes)

    @property
    def samples(self) -> int:
        """Samples a candidate is evaluated on: ID first, then OOD (none for `acc`)."""
        return self.id_count + sum(self.ood_sizes)

    def count(self, wrong: Tensor, confidence: Tensor) -> Tensor:
        """Compute the integers `[K, 1 + sources]`, E and each D_s, from wrong answers and confidences `[K, n]`."""
        inside, *outside = confidence.split([self.id_count, *self.ood_sizes], dim=1)
        pairs = [_twice_below(inside, source.contiguous()).sum(-1) for source in outside]
        return torch.stack([wrong[:, : self.id_count].sum(-1), *pairs], dim=1)

    def result(self, head: Head, counts: Sequence[int], loss: int = 0) -> Result:
        """Build the result from the counts of a model without `head`."""
        errors, *pairs = counts
        discordance = sum(weight * count for weight, count in zip(self.weights, pairs, strict=True))
        value = errors if self.score == "acc" else discordance
        if self.score == "avg":
            value += 2 * self.balanced * errors
        return Result(value, loss, head, errors, discordance)

    def achieved(self, errors: int, discordance: int) -> float:
        """Compute S: the accuracy, the AUROC (mean over OOD sources), or the mean of both."""
        accuracy = (self.id_count - errors) / self.id_count
        if self.score == "acc":
            return accuracy
        pairs = 2 * self.id_count * self.balanced
        auroc = (pairs - discordance) / pairs
        return auroc if self.score == "ood" else (accuracy + auroc) / 2

    def hardest_first(self, wrong: Tensor, confidence: Tensor) -> IntArray:
        """Sort sample numbers by how much each adds to the integer of a model with answers `[n]`, largest first.

        Ties go to ID samples with lower and OOD samples with higher confidence.
        """
        inside, *outside = confidence.split([self.id_count, *self.ood_sizes])
        doubt = torch.cat([-inside, *outside]).cpu().numpy()
        added = wrong[: self.id_count].double()
        if self.score != "acc":  # in units of pairs with the first source
            first = self.ood_sizes[0]
            added_outside = []
            added *= 2 * first * len(outside) if self.score == "avg" else 0
            for source in outside:
                added += first / len(source) * (2 * len(source) - _twice_below(source, inside))
                added_outside.append(first / len(source) * _twice_below(inside, source))
            added = torch.cat([added, *added_outside])
        return np.lexsort((-doubt, -added.cpu().numpy()))


def _twice_below(values: Tensor, limits: Tensor) -> Tensor:
    """For each limit, twice the number of values below it, plus those equal to it."""
    ordered = values.sort(-1).values
    return torch.searchsorted(ordered, limits) + torch.searchsorted(ordered, limits, right=True)


class Tally:
    """Answers of K models, each without one of `heads` (`NO_HEAD` for none), to n samples; logits have `dtype`.

    A sample that is not evaluated yet counts as correct, with loss 0 and the highest confidence if ID, the lowest if
    OOD. So the integers of a model, including the loss that breaks ties, never decrease as answers arrive: they are
    lower bounds of its result.
    """

    def __init__(self, samples: CircuitData, objective: Objective, heads: Sequence[Head], dtype: torch.dtype) -> None:
        self.samples, self.objective, self.heads = samples, objective, list(heads)
        self.step = grid_step(dtype)
        shape = (len(heads), objective.samples)
        device = with_float64(samples.labels.device)
        self._labels = samples.labels.to(device)
        self.wrong = torch.empty(shape, dtype=torch.bool, device=device)
        self.confidence = torch.empty(shape, dtype=torch.int64, device=device)
        self.finite = torch.empty(shape, dtype=torch.bool, device=device)
        self.loss: Tensor | None = None
        if objective.ties == "likelihood":
            self.loss = torch.empty(shape, dtype=torch.float64, device=device)
        self.clear()

    def clear(self) -> None:
        """Reset all answers."""
        self.wrong.fill_(False)
        self.confidence[:, : self.objective.id_count] = MOST_CONFIDENT
        self.confidence[:, self.objective.id_count :] = LEAST_CONFIDENT
        self.finite.fill_(True)
        if self.loss is not None:
            self.loss.zero_()

    def record(self, models: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Store the logits `[P, C]` of pairs of model and sample."""
        device = self.wrong.device
        logits = logits.to(device)
        cells = to_device(models, device), to_device(numbers, device)
        labels = self._labels[cells[1]]
        self.wrong[cells], self.confidence[cells], self.finite[cells] = judge(logits, labels, self.step)
        if self.loss is not None:
            self.loss[cells] = losses(logits, labels)

    def result(self, batches: Iterable[tuple[IntArray, Tensor]]) -> Result:
        """Compute the result of a single model from its logits for all samples, with their numbers."""
        for numbers, logits in batches:
            self.record(np.zeros_like(numbers), numbers, logits)
        return self.results(np.zeros(1, np.int64))[0]

    def results(self, models: IntArray) -> list[Result]:
        """Compute the result of each model from the answers so far; raise if an answer is not finite."""
        rows = to_device(models, self.wrong.device)
        finite = self.finite[rows].all(-1)
        loss = torch.zeros_like(rows)
        if self.loss is not None:
            loss = (self.loss[rows].sum(-1) / _LIKELIHOOD_STEP).round().clamp(max=_LARGEST_LOSS).long()
        integers = self.objective.count(self.wrong[rows], self.confidence[rows])  # [K, 1 + sources]
        table = torch.column_stack([finite, loss, integers]).tolist()  # a single transfer from the device
        results = []
        for model, (is_finite, summed, *counts) in zip(models, table, strict=True):
            if not is_finite:
                raise not_finite(self.finite[model], self.samples, self.heads[model])
            results.append(self.objective.result(self.heads[model], counts, summed))
        return results
