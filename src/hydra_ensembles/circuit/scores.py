"""What a circuit is judged by: errors and discordant pairs as integers, counted on fixed samples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._utils import torch_seeded
from ..batches import Batches, begin_epoch, borrowed, iterate, move, require_labels
from ..errors import ConfigError, DataError
from ..heads.masking import TOWER, existing_heads
from ..heads.members import Score as Score
from ..heads.ranking import DataFingerprint, Head, require_budget
from ..model.config import EnsembleConfig, PatchStemConfig, require_whole
from ..model.ensemble import Ensemble

Method = Literal["naive", "exact", "screened"]


@dataclass(frozen=True)
class CircuitSettings:
    """Everything that decides which heads are chosen, given a model and data.

    Attributes:
        score: What to keep high while heads are removed.
        method: How the best head of a step is found.
        budget: Heads to remove.
        layers: Layers whose heads are candidates, ascending; None for all layers of both towers.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation.
        screen_size: Heads that `"screened"` measures at a step, at most; None for a third of the candidates.
        audit_steps: Steps at which the choice is checked against the method's reference.
        towers: Towers whose heads are candidates.
        prompts: What tells the classes of a dual encoder apart from others; None for an ensemble.
    """

    score: Score
    method: Method
    budget: int
    layers: tuple[int, ...] | None
    removed: tuple[Head, ...]
    dtype: torch.dtype
    screen_size: int | None
    audit_steps: int
    towers: tuple[str, ...] = (TOWER,)
    prompts: str | None = None

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name, value, accepted in (("score", self.score, Score), ("method", self.method, Method)):
            if value not in get_args(accepted):
                raise ConfigError(f"{name} must be one of {list(get_args(accepted))}, got {value!r}")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point type such as torch.float32, got {self.dtype}")
        if self.screen_size is not None:
            require_whole("screen_size", self.screen_size, 1)
        if self.method == "screened" and "text" in {*self.towers, *(head.tower for head in self.removed)}:
            raise ConfigError(
                'method="screened" is for one tower; heads of the text tower are cheap to measure: use method="exact", '
                'or towers=("image",)'
            )
        require_whole("audit_steps", self.audit_steps, 0)

    def candidates(self, configs: Mapping[str, EnsembleConfig]) -> list[Head]:
        """Heads that may be removed, first layer first; an error where the budget asks for more."""
        off = set(self.removed)
        existing = (head for name in self.towers for head in existing_heads(configs[name], self.layers, tower=name))
        candidates = [head for head in existing if head not in off]
        require_budget(self.budget, len(candidates))
        return candidates

    def screened(self, candidates: int) -> int:
        """How many of that many candidates `"screened"` measures at a step, at most."""
        return -(-candidates // 3) if self.screen_size is None else self.screen_size

    def audited(self) -> frozenset[int]:
        """Numbers of the greedy steps that are audited, spread evenly from the first on."""
        count = min(self.audit_steps, self.budget)
        return frozenset(index * self.budget // count for index in range(count))

    def identity(self) -> dict[str, object]:
        """The settings a journal must agree on to be continued.

        A larger budget continues a finished run, because the removal order of a smaller one is its
        beginning; unless steps are audited, because which ones depends on it.
        """
        settings: dict[str, object] = {
            "score": self.score,
            "method": self.method,
            "layers": None if self.layers is None else list(self.layers),
            "removed": [str(head) for head in self.removed],
            "dtype": str(self.dtype),
            "audit_steps": self.audit_steps,
        }
        if self.prompts is not None:
            settings |= {"towers": list(self.towers), "prompts": self.prompts}
        if self.method == "screened":
            settings["screen_size"] = self.screen_size
        if self.audit_steps:
            settings["budget"] = self.budget
        return settings


IntArray = npt.NDArray[np.int64]
_Inputs = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Samples whose inputs have one shape, so that they can share a batch whatever batches they came in.

    Texts keep the padding they came with: another one would be the same model on other inputs.

    Attributes:
        numbers: `[g]`, which sample each row is.
        inputs: Images `[g, channels, H, W]` or token ids `[g, T]`.
        attention_mask: `[g, T]` or None.
        token_type_ids: `[g, T]` or None.
    """

    numbers: IntArray
    inputs: Tensor
    attention_mask: Tensor | None
    token_type_ids: Tensor | None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples, numbered in the order they were read: ID first, then OOD.

    Attributes:
        groups: The samples by shape of their inputs.
        labels: `[n]`, -1 for OOD samples.
        id_count: Number of ID samples.
        ood_count: Number of OOD samples.
        group_of: `[n]`, index of the group of each sample.
        row_of: `[n]`, its row there.
        origin: `[n, 2]`, source (0 for ID, 1 for OOD) and batch each sample came from.
        fingerprint: Changes with any sample, label, or their order.
    """

    groups: tuple[SampleGroup, ...]
    labels: Tensor
    id_count: int
    ood_count: int
    group_of: IntArray
    row_of: IntArray
    origin: IntArray
    fingerprint: str

    def batch_of(self, sample: int) -> str:
        """Where a sample came from, for error messages."""
        source, batch = self.origin[sample]
        return f"batch {batch} of {_NAMES[source]}"


_NAMES = ("id_batches", "ood_batches")


def read_samples(model: Ensemble, id_batches: Batches, ood_batches: Batches | None, seed: int) -> Samples:
    """Read all batches, check them, and move them to the device and dtype of the model.

    PyTorch's random numbers and those of the sources start from `seed` meanwhile and are put back afterwards (see
    `reading_order`), so a shuffling loader gives the same samples again when an interrupted run is resumed, and on
    every rank.
    """
    pieces: dict[tuple[object, ...], list[tuple[IntArray, _Inputs]]] = {}
    labels: list[Tensor] = []
    origin: list[tuple[int, int]] = []
    fingerprints = []
    counts = []
    with torch_seeded(seed, model.device), ExitStack() as sources:
        for source, batches in enumerate((id_batches, ood_batches)):
            if batches is not None:
                sources.enter_context(borrowed(batches))
                begin_epoch(batches, 0, seed)
            fingerprint = DataFingerprint()
            start = len(origin)
            pairs = () if batches is None else iterate(batches, _NAMES[source], labelled=source == 0)
            for index, (inputs, given) in enumerate(pairs):
                known = require_labels(given, model.num_classes, _NAMES[source], index) if source == 0 else None
                fingerprint.update(inputs, known)
                parts = model.unpack(inputs, None, None)
                size = len(parts[0])
                numbers = np.arange(len(origin), len(origin) + size)
                pieces.setdefault(_shape(parts), []).append((numbers, _moved(parts, model)))
                labels.append(torch.full((size,), -1) if known is None else known.cpu())
                origin += [(source, index)] * size
            fingerprints.append(fingerprint.hexdigest())
            counts.append(len(origin) - start)
            if batches is not None and not counts[-1]:
                raise DataError(f"{_NAMES[source]} has no samples; check the loader")
    answers = torch.cat(labels)
    _require_two_classes(answers[: counts[0]])
    group_of, row_of = np.zeros(len(origin), np.int64), np.zeros(len(origin), np.int64)
    groups = tuple(_join(list_) for list_ in pieces.values())
    for index, group in enumerate(groups):
        group_of[group.numbers], row_of[group.numbers] = index, np.arange(len(group))
    return Samples(
        groups=groups,
        labels=answers.to(model.device),
        id_count=counts[0],
        ood_count=counts[1],
        group_of=group_of,
        row_of=row_of,
        origin=np.array(origin, np.int64),
        fingerprint="+".join(fingerprints if ood_batches is not None else fingerprints[:1]),
    )


def parts(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `count` items."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def tokens_of(model: Ensemble, group: SampleGroup) -> int:
    """Tokens of the samples of a group, prefix tokens included."""
    stem = model.config.stem
    if not isinstance(stem, PatchStemConfig):
        return group.inputs.shape[1]
    height, width = group.inputs.shape[2:]
    return stem.prefix_tokens + (height // stem.patch_size[0]) * (width // stem.patch_size[1])


def _shape(parts: _Inputs) -> tuple[object, ...]:
    return tuple(None if part is None else (part.dtype, *part.shape[1:]) for part in parts)


def _moved(parts: _Inputs, model: Ensemble) -> _Inputs:
    inputs, mask, segments = (None if part is None else move(part, model.device, model.dtype) for part in parts)
    assert isinstance(inputs, Tensor)
    return inputs, mask, segments  # type: ignore[return-value]


def _join(pieces: list[tuple[IntArray, _Inputs]]) -> SampleGroup:
    def column(index: int) -> Tensor | None:
        tensors = [inputs[index] for _, inputs in pieces]
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    inputs = column(0)
    assert inputs is not None
    numbers = np.concatenate([numbers for numbers, _ in pieces])
    return SampleGroup(numbers, inputs, column(1), column(2))


def _require_two_classes(labels: Tensor) -> None:
    if labels.min() == labels.max():
        raise DataError(
            f"all {len(labels)} samples of id_batches have the label {int(labels[0])}; a circuit needs samples of "
            "at least two classes"
        )


def require_finite(finite: Tensor, samples: Samples, head: Head | None) -> None:
    """Raise where a sample `[n]` has logits that are not finite, naming its batch."""
    if not finite.all():
        first = int((~finite).nonzero()[0, 0])
        state = "" if head is None else f" with head {head} switched off"
        raise DataError(
            f"{samples.batch_of(first)} gives logits that are NaN or infinite{state}; check its inputs, the weights "
            "of the model, or evaluate in a wider dtype"
        )


MOST_CONFIDENT = torch.iinfo(torch.int64).max
LEAST_CONFIDENT = torch.iinfo(torch.int64).min
_LARGEST_LOG_ODDS = 2.0**30


def quantum(dtype: torch.dtype) -> float:
    """Grid step of log-odds computed in `dtype`: 2^-30 for float64, 2^-12 for float32, 2^-5 for half precision."""
    return {torch.float64: 2.0**-30, torch.float32: 2.0**-12}.get(dtype, 2.0**-5)


def judge(logits: Tensor, labels: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """What counts about the answers to some samples.

    Args:
        logits: `[B, C]`, C at least 2.
        labels: `[B]`; -1 for OOD samples.
        step: The grid step, from `quantum` of the dtype in which the logits were computed.

    Returns:
        Three tensors `[B]`: whether the answer is wrong, the confidence in grid steps (int64), and whether all
        logits are finite.
    """
    precise = logits.double()
    largest = precise.amax(-1, keepdim=True)
    answer = (precise >= largest - step / 256).int().argmax(-1)  # the first of those that tie
    odds = log_odds(precise, answer).clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    confidence = (odds / step).round().nan_to_num().long()
    return answer != labels, confidence, precise.isfinite().all(-1)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the logit of the label lies above the largest other one, `[B]`, in float64; 0 for OOD samples."""
    precise, known = logits.double(), labels.clamp(min=0)[:, None]
    others = precise.scatter(-1, known, -torch.inf).amax(-1)
    return torch.where(labels < 0, 0.0, precise.gather(-1, known)[:, 0] - others)


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """log(p / (1 - p)) of one class for each row: `[B, C]` and `[B]` to `[B]`."""
    chosen = classes[..., None]
    others = logits.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return logits.gather(-1, chosen)[..., 0] - others


def discordances(id_confidence: Tensor, ood_confidence: Tensor) -> Tensor:
    """D of many candidates at once: `[K, n_id]` and `[K, n_ood]` to `[K]`.

    The same count as `hydra_ensembles.metrics.discordance` gives for one candidate.
    """
    ordered = id_confidence.sort(-1).values
    values = ood_confidence.contiguous()
    less = torch.searchsorted(ordered, values)  # ID samples less confident than each OOD sample
    less_or_equal = torch.searchsorted(ordered, values, right=True)
    return (less + less_or_equal).sum(-1)


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
        """E and D of candidates, from answers `[K, n_id]` and confidences `[K, n]`; D is 0 for `acc`."""
        errors = wrong.sum(-1)
        if self.score == "acc":
            return errors, torch.zeros_like(errors)
        return errors, discordances(confidence[:, : self.id_count], confidence[:, self.id_count :])

    def value(self, errors: int, discordance: int) -> int:
        """The integer to minimise."""
        if self.score == "acc":
            return errors
        return discordance + (2 * self.ood_count * errors if self.score == "avg" else 0)

    def achieved(self, errors: int, discordance: int) -> float:
        """S: accuracy, AUROC, or their mean."""
        accuracy = (self.id_count - errors) / self.id_count
        if self.score == "acc":
            return accuracy
        pairs = 2 * self.id_count * self.ood_count
        auroc = (pairs - discordance) / pairs
        return auroc if self.score == "ood" else (accuracy + auroc) / 2

    def hardest_first(self, wrong: Tensor, confidence: Tensor) -> npt.NDArray[np.int64]:
        """Sample numbers in the order in which a bound grows fastest, judged by one model's answers.

        Samples come first that add most to the integer of that model; among those that add nothing, ID
        samples with little confidence and OOD samples with much.

        Args:
            wrong: `[n_id]`.
            confidence: `[n]`.
        """
        id_confidence, ood_confidence = confidence[: self.id_count], confidence[self.id_count :]
        doubt = torch.cat([-id_confidence, ood_confidence]).cpu().numpy()
        if self.score == "acc":
            added = wrong.long()
        else:
            id_added, ood_added = _discordance_of_each(id_confidence, ood_confidence)
            if self.score == "avg":
                id_added = id_added + 2 * self.ood_count * wrong.long()
            added = torch.cat([id_added, ood_added])
        return np.lexsort((-doubt, -added.cpu().numpy()))


def _discordance_of_each(id_confidence: Tensor, ood_confidence: Tensor) -> tuple[Tensor, Tensor]:
    """How much each ID and each OOD sample adds to D."""
    id_ordered, ood_ordered = id_confidence.sort().values, ood_confidence.sort().values
    of_ood = torch.searchsorted(id_ordered, ood_confidence)
    of_ood = of_ood + torch.searchsorted(id_ordered, ood_confidence, right=True)
    of_id = 2 * len(ood_ordered) - torch.searchsorted(ood_ordered, id_confidence)
    of_id = of_id - torch.searchsorted(ood_ordered, id_confidence, right=True)
    return of_id, of_ood


@dataclass(frozen=True, order=True)
class Choice:
    """A candidate with its result. The smaller one is the better one; ties go to the first (layer, head)."""

    value: int
    head: Head
    errors: int
    discordance: int


NO_HEAD = Head(-1, -1)  # stands for the head of a result with no further head off


class AnswerTable:
    """Answers of K candidates to n samples.

    A sample that was not evaluated yet counts as right, as an ID sample as most confident, as an OOD sample
    as least confident. So the integers of a candidate never shrink as answers come in: they are lower bounds
    of its result, and its result once all samples are in.
    """

    def __init__(self, candidates: Sequence[Head], samples: Samples, objective: Objective, dtype: torch.dtype) -> None:
        self.candidates, self.samples, self.objective = candidates, samples, objective
        self.step = quantum(dtype)
        device, shape = samples.labels.device, (len(candidates), objective.samples)
        self.wrong = torch.empty(len(candidates), objective.id_count, dtype=torch.bool, device=device)
        self.confidence = torch.empty(shape, dtype=torch.int64, device=device)
        self.finite = torch.ones(shape, dtype=torch.bool, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self.wrong.fill_(False)
        self.confidence[:, : self.objective.id_count] = MOST_CONFIDENT
        self.confidence[:, self.objective.id_count :] = LEAST_CONFIDENT

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""
        rows, columns = (
            torch.from_numpy(index).to(logits.device, non_blocking=True) for index in (candidates, numbers)
        )
        wrong, confidence, finite = judge(logits, self.samples.labels[columns], self.step)
        self.confidence[rows, columns] = confidence
        self.finite[rows, columns] = finite
        is_id = numbers < self.objective.id_count
        if not is_id.all():
            chosen = torch.from_numpy(is_id.nonzero()[0]).to(logits.device, non_blocking=True)
            rows, columns, wrong = rows[chosen], columns[chosen], wrong[chosen]
        self.wrong[rows, columns] = wrong

    def counts(self, candidates: IntArray) -> list[tuple[int, int]]:
        """E and D over the answers so far of some candidates; an error if one of them was not finite."""
        rows = torch.from_numpy(candidates).to(self.wrong.device)
        errors, discordance = self.objective.count(self.wrong[rows], self.confidence[rows])
        finite = self.finite[rows].all()
        *pairs, fine = torch.stack([*(errors * _SHIFT + discordance), finite.long()]).tolist()  # one transfer
        if not fine:
            self._name_the_culprit(candidates)
        return [divmod(pair, _SHIFT) for pair in pairs]

    def _name_the_culprit(self, candidates: IntArray) -> None:
        for candidate in candidates:
            require_finite(self.finite[candidate], self.samples, self.candidates[candidate])


_SHIFT = 1 << 40
