"""What a circuit is judged by: errors and discordant pairs as integers, counted on fixed samples.

E is the number of ID samples answered wrongly. D is twice the number of pairs of an ID and an OOD sample in which the
OOD sample is the more confident one, plus the pairs that tie. Integers compare exactly, and a bound on one holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._utils import torch_seeded
from ..batches import Batches, begin_epoch, borrowed, iterate, require_labels
from ..errors import DataError
from ..heads.members import Score as Score
from ..heads.ranking import DataFingerprint, Head
from ..model.ensemble import Ensemble
from ..overlap import Keys, require_unlike, sample_keys

Method = Literal["naive", "exact", "screened"]

IntArray = npt.NDArray[np.int64]
Inputs = tuple[Tensor, Tensor | None, Tensor | None]  # images or token ids, attention mask, token types

# --- samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Samples whose inputs have one shape (texts with the padding they came with), so that they can share a batch."""

    numbers: IntArray  # [g], which sample each row is
    inputs: Inputs  # images [g, channels, H, W] or token ids [g, T]; mask and token types [g, T] or None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    def take(self, rows: slice) -> Inputs:
        """The inputs of some samples."""
        return cast(Inputs, tuple(None if part is None else part[rows] for part in self.inputs))


@dataclass(eq=False)
class Samples:
    """All samples, numbered in the order they were read: ID first, then OOD."""

    groups: tuple[SampleGroup, ...]  # by shape of their inputs
    labels: Tensor  # [n], -1 for samples without a label, such as all OOD samples
    id_count: int
    origin: IntArray  # [n, 2], source (0 for ID, 1 for OOD) and batch each sample came from
    fingerprint: str  # changes with any sample, label, or their order

    def __post_init__(self) -> None:
        """Note where each sample lies: `[n]`, the index of its group, and its row there."""
        self.group_of, self.row_of = np.zeros((2, len(self.labels)), np.int64)
        for index, group in enumerate(self.groups):
            self.group_of[group.numbers], self.row_of[group.numbers] = index, np.arange(len(group))

    @property
    def ood_count(self) -> int:
        """Number of OOD samples."""
        return len(self.labels) - self.id_count


_SOURCES = ("id_batches", "ood_batches")


def read_samples(model: Ensemble, id_batches: Batches, ood_batches: Batches | None, seed: int) -> Samples:
    """Read all batches, check them, and move them to the device and dtype of the model.

    Random numbers of PyTorch and of the sources start from `seed` meanwhile and are put back afterwards: a shuffling
    loader gives the same samples again when a run is resumed, and on every rank.
    """
    pieces: dict[tuple[object, ...], list[SampleGroup]] = {}  # by shape of the inputs
    labels: list[Tensor] = []
    origin: list[tuple[int, int]] = []
    keys: list[list[Keys]] = []  # of each source
    id_count, fingerprints = 0, []
    sources = [id_batches] if ood_batches is None else [id_batches, ood_batches]
    with torch_seeded(seed, model.device), borrowed(*sources):
        for source, batches in enumerate(sources):
            begin_epoch(batches, 0, seed)
            fingerprint, before = DataFingerprint(), len(origin)
            keys.append([])
            for index, (given, answers) in enumerate(iterate(batches, _SOURCES[source], labelled=source == 0)):
                known = None if source else require_labels(answers, model.num_classes, _SOURCES[source], index)
                fingerprint.update(given, known)
                keys[source].append(sample_keys(given))
                inputs = model.unpack(model.prepare(given))
                numbers = np.arange(len(origin), len(origin) + len(inputs[0]))
                shape = tuple(None if part is None else (part.dtype, *part.shape[1:]) for part in inputs)
                pieces.setdefault(shape, []).append(SampleGroup(numbers, inputs))
                labels.append(torch.full((len(numbers),), -1) if known is None else known.cpu())
                origin += [(source, index)] * len(numbers)
            if len(origin) == before:
                raise DataError(f"{_SOURCES[source]} has no samples; check the loader")
            id_count = before or len(origin)  # the ID samples come first
            fingerprints.append(fingerprint.hexdigest())
    own, *foreign = map(np.concatenate, keys)
    require_unlike(_SOURCES[0], own, dict(zip(_SOURCES[1:], foreign, strict=False)))
    truth = torch.cat(labels)
    if truth[:id_count].min() == truth[:id_count].max():
        raise DataError(f"all samples of id_batches have the label {int(truth[0])}; a circuit needs two classes")
    groups = []
    for same in pieces.values():
        columns = zip(*(piece.inputs for piece in same), strict=True)
        inputs = cast(Inputs, tuple(None if column[0] is None else torch.cat(column) for column in columns))
        groups.append(SampleGroup(np.concatenate([piece.numbers for piece in same]), inputs))
    return Samples(tuple(groups), truth.to(model.device), id_count, np.array(origin, np.int64), "+".join(fingerprints))


def to_device(index: IntArray, device: torch.device) -> Tensor:
    """Numbers of rows as a tensor, without waiting for their way to a GPU."""
    return torch.from_numpy(index).to(device, non_blocking=True)


def parts(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `count` items."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# --- answers -----------------------------------------------------------------------------------------------

MOST_CONFIDENT = torch.iinfo(torch.int64).max
LEAST_CONFIDENT = torch.iinfo(torch.int64).min
_LARGEST_LOG_ODDS = 2.0**30


def quantum(dtype: torch.dtype) -> float:
    """Grid step of log-odds computed in `dtype`: 2^-30 for float64, 2^-12 for float32, 2^-5 for half precision."""
    return {torch.float64: 2.0**-30, torch.float32: 2.0**-12}.get(dtype, 2.0**-5)


def judge(logits: Tensor, labels: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """What counts about the answers to some samples, out of logits `[B, C]` (C at least 2) and labels `[B]`.

    Returns three tensors `[B]`: whether the answer is wrong, the confidence in grid steps (int64), and whether all
    logits are finite. `step` is the `quantum` of the dtype in which the logits were computed.
    """
    precise = logits.double()
    largest = precise.amax(-1, keepdim=True)
    answer = (precise >= largest - step / 256).int().argmax(-1)  # the first of those that tie
    odds = log_odds(precise, answer).clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    confidence = (odds / step).round().nan_to_num().long()
    return answer != labels, confidence, precise.isfinite().all(-1)


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """log(p / (1 - p)) of one class for each row: `[B, C]` and `[B]` to `[B]`."""
    chosen = classes[..., None]
    others = logits.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return logits.gather(-1, chosen)[..., 0] - others


def require_finite(finite: Tensor, samples: Samples, head: Head) -> None:
    """Raise where a sample `[n]` has logits that are not finite, naming its batch."""
    if not finite.all():
        source, batch = samples.origin[int((~finite).nonzero()[0, 0])]
        state = "" if head == NO_HEAD else f" with head {head} switched off"
        where = f"batch {batch} of {_SOURCES[source]}"
        raise DataError(f"{where} gives logits that are NaN or infinite{state}; check its inputs, or use a wider dtype")


NO_HEAD = Head(-1, -1)  # stands for the head of a result with no further head off


class Result(NamedTuple):
    """The integers of the model without one more head. The smaller is the better; ties go to the first head."""

    value: int
    head: Head
    errors: int
    discordance: int


@dataclass(frozen=True)
class Objective:
    """The integer to minimise, and the score S it stands for."""

    score: Score
    id_count: int
    ood_count: int

    @property
    def samples(self) -> int:
        """Samples a candidate is evaluated on: ID first, then OOD (none for `acc`)."""
        return self.id_count + self.ood_count

    def count(self, wrong: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """E and D `[K]` of candidates, from answers and confidences `[K, n]`; D is 0 for `acc`."""
        errors = wrong[:, : self.id_count].sum(-1)
        if self.score == "acc":
            return errors, torch.zeros_like(errors)
        inside, outside = confidence[:, : self.id_count], confidence[:, self.id_count :]
        return errors, _twice_below(inside, outside.contiguous()).sum(-1)

    def result(self, head: Head, errors: int, discordance: int) -> Result:
        """What the integers of a model amount to; `head` is the one it goes without."""
        value = errors if self.score == "acc" else discordance
        if self.score == "avg":
            value += 2 * self.ood_count * errors
        return Result(value, head, errors, discordance)

    def achieved(self, errors: int, discordance: int) -> float:
        """S: accuracy, AUROC, or their mean."""
        accuracy = (self.id_count - errors) / self.id_count
        if self.score == "acc":
            return accuracy
        pairs = 2 * self.id_count * self.ood_count
        auroc = (pairs - discordance) / pairs
        return auroc if self.score == "ood" else (accuracy + auroc) / 2

    def hardest_first(self, wrong: Tensor, confidence: Tensor) -> IntArray:
        """Sample numbers, first those that add most to the integer of a model, by its answers `[n]`.

        Among those that add nothing, ID samples with little confidence come first, and OOD samples with much.
        """
        inside, outside = confidence[: self.id_count], confidence[self.id_count :]
        doubt = torch.cat([-inside, outside]).cpu().numpy()
        added = wrong.long()[: self.id_count]
        if self.score != "acc":
            of_inside = 2 * len(outside) - _twice_below(outside, inside)
            added = of_inside + (2 * self.ood_count * added if self.score == "avg" else 0)
            added = torch.cat([added, _twice_below(inside, outside)])
        return np.lexsort((-doubt, -added.cpu().numpy()))


def _twice_below(values: Tensor, limits: Tensor) -> Tensor:
    """For each limit, twice the number of values below it, plus those equal to it."""
    ordered = values.sort(-1).values
    return torch.searchsorted(ordered, limits) + torch.searchsorted(ordered, limits, right=True)


class Answers:
    """Answers of K models, each without one of `heads` (`NO_HEAD` for none), to n samples; logits are of `dtype`.

    A sample that was not evaluated yet counts as right, as an ID sample as most confident, as an OOD sample as least
    confident. So the integers of a model never shrink as answers come in: they are lower bounds of its result.
    """

    def __init__(self, samples: Samples, objective: Objective, heads: Sequence[Head], dtype: torch.dtype) -> None:
        self.samples, self.objective, self.heads, self.step = samples, objective, list(heads), quantum(dtype)
        shape, device = (len(heads), objective.samples), samples.labels.device
        self.wrong = torch.empty(shape, dtype=torch.bool, device=device)
        self.confidence = torch.empty(shape, dtype=torch.int64, device=device)
        self.finite = torch.empty(shape, dtype=torch.bool, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self.wrong.fill_(False)
        self.confidence[:, : self.objective.id_count] = MOST_CONFIDENT
        self.confidence[:, self.objective.id_count :] = LEAST_CONFIDENT
        self.finite.fill_(True)

    def record(self, models: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of model and sample."""
        where = to_device(models, logits.device), to_device(numbers, logits.device)
        answers = judge(logits, self.samples.labels[where[1]], self.step)
        self.wrong[where], self.confidence[where], self.finite[where] = answers

    def result(self, batches: Iterable[tuple[IntArray, Tensor]]) -> Result:
        """What one model amounts to, given logits `[B, C]` for all samples, with their numbers."""
        for numbers, logits in batches:
            self.record(np.zeros_like(numbers), numbers, logits)
        return self.results(np.zeros(1, np.int64))[0]

    def results(self, models: IntArray) -> list[Result]:
        """What the answers so far amount to, model by model; an error if one of them was not finite."""
        rows = to_device(models, self.wrong.device)
        errors, discordance = self.objective.count(self.wrong[rows], self.confidence[rows])
        finite = self.finite[rows].all(-1)
        found = torch.stack([errors, discordance, finite.long()], 1).tolist()  # one transfer
        for model, (_, _, fine) in zip(models, found, strict=True):
            if not fine:
                require_finite(self.finite[model], self.samples, self.heads[model])
        return [self.objective.result(self.heads[model], *one[:2]) for model, one in zip(models, found, strict=True)]
