"""Predictions of an ensemble for a batch: probabilities, labels, uncertainty, and reasons to abstain.

Everything here is a pure function of member logits `[M, B, C]`, wherever they come from. Half precision is converted to
float32; float64 stays float64. A temperature calibrates probabilities; what separates inputs (scores, the parts of
uncertainty, disagreement) is computed from uncalibrated members.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import torch
from torch import Tensor

from .errors import ConfigError, DataError
from .metrics.conformal import Reference
from .metrics.distance import FittedName
from .metrics.probabilities import (
    EntropyParts,
    at_least_float32,
    class_logits,
    differing_pairs,
    log_mean_probs,
    split_entropy,
)
from .metrics.probabilities import check_finite as require_finite

ScoreName = Literal["msp", "entropy", "mutual_information", "max_logit", "energy", "gen"]
AnyScore = Literal[ScoreName, FittedName]
Reason = Literal["unfamiliar", "unsure", "alarm"]
REASONS: tuple[Reason | None, ...] = (None, "unsure", "unfamiliar", "alarm")  # indexed by `Prediction.doubt`
Threshold = float | tuple[float, ...]  # one for all answers, or one for each label
NEVER = float(torch.finfo(torch.float32).max)  # a threshold that nothing reaches; finite, for JSON

GEN_POWER, GEN_CLASSES = 0.1, 100  # of generalised entropy (GEN)


@dataclass(frozen=True, eq=False)
class Unfamiliarity:
    """How far B samples are from the familiar data, for M members and S scores; the first score decides."""

    score_names: tuple[FittedName, ...]
    member_scores: Tensor  # [S, M, B]
    threshold: float | None = None
    reference: Reference | None = None

    def score(self, name: FittedName) -> Tensor:
        """`[B]`, the mean over members."""
        return self.member_scores[self.score_names.index(name)].mean(dim=0)


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The answer of M members for B samples over C classes. Make one with `from_logits`.

    Everything but the logits is computed on first use. `probs`, `log_probs`, `confidence` and `entropy` are
    calibrated, the rest is not: `aleatoric + epistemic` is the entropy of `mean_probs`, in nats. Indexing picks
    samples, also by a mask: `prediction[prediction.accept]`. What needs a calibration (`accept`, `doubt`, `reason`) or
    fitted scores (`familiarity`) is None without.

    Examples:
        >>> logits = torch.tensor([[[4.0, 0.0], [4.0, 0.0]], [[4.0, 0.0], [0.0, 4.0]]])  # [members, samples, classes]
        >>> answer = he.Prediction.from_logits(logits)
        >>> answer.disagreement.tolist()  # they agree on the first sample
        [0.0, 1.0]
        >>> bool(answer.epistemic[1] > answer.epistemic[0])
        True
        >>> answer.to_dict()["label"]
        [0, 0]
    """

    member_logits: Tensor  # [M, B, C]
    threshold: Threshold | None = None  # the least accepted `certainty`
    score_name: ScoreName = "msp"  # what `certainty` is made of, and the default of `score()`
    class_names: tuple[str, ...] | None = None
    temperature: float = 1.0  # of `probs`
    reference: Reference | None = None  # held-out scores for p-values
    unfamiliarity: Unfamiliarity | None = None  # feature scores, if the ensemble has any (`fit_familiarity`)
    calibration: str = ""  # identity of the calibration that was applied
    stage: Tensor | None = None  # [B], which stage of a cascade answered, from 0
    forced: Tensor | None = None  # [B], index in `REASONS` of a reason to decline whatever the scores are, 0 for none

    @classmethod
    def from_logits(
        cls,
        member_logits: Tensor,
        threshold: Threshold | None = None,
        score: ScoreName = "msp",
        class_names: Sequence[str] | None = None,
        check_finite: bool = True,
        unfamiliarity: Unfamiliarity | None = None,
    ) -> "Prediction":
        """Derive everything from member logits.

        Args:
            member_logits: `[M, B, C]`, finite, floating point, at least one member and two classes; or `[M, B, 1]`,
                the log-odds of the second of two classes, whose first logit is then 0.
            threshold: Samples whose `certainty` is below it are not accepted; one number, or one for each label.
            score: What certainty is made of; `mutual_information` needs at least two members.
            class_names: One name per class.
            check_finite: Refuse NaN and infinity. On a GPU this waits for the logits, and nothing else here does.
            unfamiliarity: Feature scores of the same samples.
        """
        if member_logits.ndim != 3 or not member_logits.is_floating_point():
            got = f"got {member_logits.dtype} {list(member_logits.shape)}"
            advice = "add a member axis to a single model's logits with .unsqueeze(0)"
            raise DataError(f"member logits must be floating point [members, samples, classes], {got}; {advice}")
        logits = class_logits(at_least_float32(member_logits))
        if check_finite:
            require_finite(logits, "member logits [M, B, C]")
        logits = logits.clone() if logits is member_logits else logits  # whatever the caller does with its buffer
        names = None if class_names is None else tuple(class_names)
        return cls(logits, threshold, score, names, unfamiliarity=unfamiliarity)

    def __post_init__(self) -> None:
        require_members_for(self.score_name, self.members)
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise DataError(f"got {len(self.class_names)} class names for {self.classes} classes; give one per class")

    @cached_property
    def member_probs(self) -> Tensor:
        """`[M, B, C]`, the softmax of `member_logits`."""
        return self.member_logits.softmax(dim=-1)

    @cached_property
    def mean_probs(self) -> Tensor:
        """`[B, C]`, the mean over members, not calibrated."""
        return self.member_probs.mean(dim=0)

    @cached_property
    def probs(self) -> Tensor:
        """`[B, C]`, the calibrated mean over members."""
        # log-probabilities are divided: the largest is near zero, so no temperature overflows
        return self.mean_probs if self.temperature == 1.0 else self._calibrated.softmax(dim=-1)

    @cached_property
    def log_probs(self) -> Tensor:
        """Logarithm of `probs`, `[B, C]`, finite even if a probability underflows to zero."""
        return self._calibrated if self.temperature == 1.0 else self._calibrated.log_softmax(dim=-1)

    @cached_property
    def _calibrated(self) -> Tensor:
        """Logits of `probs`, `[B, C]`."""
        return log_mean_probs(self.member_logits) / self.temperature  # [M, B, C] -> [B, C]

    @cached_property
    def label(self) -> Tensor:
        """`[B]`, the most probable class."""
        # a temperature keeps the order: use the probabilities before it, where rounding has created no ties
        return self.mean_probs.max(dim=-1).indices

    @cached_property
    def confidence(self) -> Tensor:
        """`[B]`, the calibrated probability of `label`."""
        return self.probs.gather(-1, self.label[:, None])[:, 0]

    @cached_property
    def certainty(self) -> Tensor:
        """`[B]`, what the threshold is for: `confidence` if the score is `msp`, else minus the score."""
        return self.confidence if self.score_name == "msp" else -self.score()

    @cached_property
    def _entropies(self) -> EntropyParts:
        return split_entropy(self.member_probs)

    @cached_property
    def entropy(self) -> Tensor:
        """`[B]`, total uncertainty: the entropy of `probs`."""
        return torch.special.entr(self.probs).sum(dim=-1) if self.temperature != 1.0 else self._entropies.total

    @property
    def aleatoric(self) -> Tensor:
        """`[B]`, the mean entropy of the members."""
        return self._entropies.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """`[B]`, the mutual information of label and member."""
        return self._entropies.epistemic

    @cached_property
    def disagreement(self) -> Tensor:
        """`[B]`, share of member pairs with different labels; zero for one member."""
        return differing_pairs(self.member_probs)

    @cached_property
    def accept(self) -> Tensor | None:
        """`[B]` of bool: sure and familiar enough, and not declined for another reason; None without any threshold."""
        return None if self.doubt is None else self.doubt == 0

    def passed(self) -> dict[str, Tensor | None]:
        """Whether samples pass each threshold, `[B]` of bool by the reason for failing; None without the threshold."""
        passes: dict[str, Tensor | None] = {"unsure": None, "unfamiliar": None}
        if self.threshold is not None:
            passes["unsure"] = reaches(self.threshold, self.certainty, self.label)
        if (fitted := self.unfamiliarity) is not None and fitted.threshold is not None:
            passes["unfamiliar"] = fitted.score(fitted.score_names[0]) <= fitted.threshold
        return passes

    @cached_property
    def doubt(self) -> Tensor | None:
        """`[B]`, index in `REASONS` of why each sample is not accepted, 0 if it is; None without a threshold."""
        passes = {reason: passed for reason, passed in self.passed().items() if passed is not None}
        if not passes and self.forced is None:
            return None
        doubt = torch.zeros_like(self.label)
        for reason, passed in passes.items():
            doubt = torch.where(passed, doubt, REASONS.index(reason))
        return doubt if self.forced is None else torch.where(self.forced > 0, self.forced, doubt)

    @cached_property
    def reason(self) -> list[Reason | None] | None:
        """Why each sample is not accepted: `"unfamiliar"` (also if unsure, too), `"unsure"`, `"alarm"`; None if it is.

        None instead of a list if there is no threshold (see `calibrate`).
        """
        return None if self.doubt is None else [REASONS[index] for index in self.doubt.tolist()]

    @property
    def familiarity(self) -> Tensor | None:
        """`[B]`, how familiar each sample is: the p-value of the first feature score, near 0 for OOD inputs.

        None if no feature score was fitted (`fit_familiarity`), or no data were held out for it (`calibrate`).
        """
        fitted = self.unfamiliarity
        return None if fitted is None or fitted.reference is None else self.p_value(fitted.score_names[0])

    def score(self, name: AnyScore | None = None) -> Tensor:
        """How much each sample looks out of distribution, `[B]`, higher = more uncertain.

        * `msp`: one minus the largest mean probability.
        * `entropy`: entropy of the mean probabilities.
        * `mutual_information`: the part of it that comes from differences between members.
        * `max_logit`: minus the largest logit, of the logits averaged over members.
        * `energy`: minus the log-sum-exp of the logits averaged over members.
        * `gen`: generalised entropy, the sum of (p (1 - p))^0.1 over the 100 largest mean probabilities.
        * fitted feature scores, the mean over members.

        None of them is calibrated: a temperature would change the order of inputs by the first two.
        """
        name = self.score_name if name is None else name
        fitted = self.unfamiliarity
        if fitted is not None and name in fitted.score_names:
            return fitted.score(name)
        if name not in get_args(ScoreName):
            fit = "; fit_familiarity, or baselines.vilu adds it" if name in get_args(FittedName) else ""
            choice = ", ".join((*get_args(ScoreName), *(() if fitted is None else fitted.score_names)))
            raise ConfigError(f"score {name!r} is not known; choose one of {choice}{fit}")
        if name == "msp":
            return self._rest
        if name == "entropy":
            return self._entropies.total
        if name == "mutual_information":
            return self.epistemic
        if name == "gen":
            largest = self.mean_probs.topk(min(GEN_CLASSES, self.classes), dim=-1).values
            rest = torch.cat([self._rest[:, None], 1.0 - largest[:, 1:]], dim=-1)
            return (largest * rest).pow(GEN_POWER).sum(dim=-1)
        mean_logits = self.member_logits.mean(dim=0)  # [M, B, C] -> [B, C]
        return -(mean_logits.amax(dim=-1) if name == "max_logit" else mean_logits.logsumexp(dim=-1))

    @cached_property
    def _rest(self) -> Tensor:
        """`[B]`, one minus the largest mean probability."""
        # as the sum of the others: the difference would round to zero for all confident samples
        largest = self.mean_probs.max(dim=-1).indices[:, None]
        return self.mean_probs.scatter(-1, largest, 0.0).sum(dim=-1)

    def p_value(self, name: AnyScore | None = None) -> Tensor:
        """`[B]`: how rare a score this high is among inputs like the held-out data; near 0 for unusual ones.

        It is (1 + held-out scores at least as high) / (1 + held-out samples), for a score that has a threshold. Of
        inputs like the held-out data, at most a share p has a p-value of p or less.
        """
        name = self.score_name if name is None else name
        fitted = self.unfamiliarity
        reference = self.reference if name == self.score_name else None
        if fitted is not None and name == fitted.score_names[0]:
            reference = fitted.reference
        scores = self.score(name)
        if reference is None:
            raise ConfigError(f"there are no held-out scores of {name} for p-values; calibrate the ensemble")
        return reference.p_values(scores)

    @property
    def members(self) -> int:
        """Number of members M."""
        return self.member_logits.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return self.member_logits.shape[2]

    def names(self) -> list[str]:
        """Name of the predicted class of each sample."""
        if self.class_names is None:
            raise DataError("class names are unknown; give them to the model: model.with_metadata(labels=[...])")
        return [self.class_names[index] for index in self.label.tolist()]

    def to_dict(self) -> dict[str, list[Any]]:
        """The answer as plain lists by name, one entry per sample: for JSON, or as the columns of a table.

        Labels are names if these are known. What is unknown without a calibration is None; probabilities and logits
        are left out.
        """
        columns: dict[str, list[Any]] = {}
        for name in PLAIN:
            value = OUTPUTS[name].read(self)
            columns[name] = [None] * len(self) if value is None else value.tolist()
        names = {} if self.class_names is None else {"label": self.names()}
        names |= {} if self.stage is None else {"stage": self.stage.tolist()}
        return columns | names | {"reason": self.reason or columns["reason"]}

    @classmethod
    def concat(cls, predictions: Sequence["Prediction"]) -> "Prediction":
        """Join predictions of one model for consecutive batches into one."""
        if len(predictions) == 0:
            raise DataError("got no predictions to join; give at least one")
        if any(prediction.forced is not None for prediction in predictions):
            blank = [torch.zeros_like(one.label) if one.forced is None else one.forced for one in predictions]
            predictions = [dataclasses.replace(one, forced=two) for one, two in zip(predictions, blank, strict=True)]
        first, *others = predictions
        if any(other._rule != first._rule for other in others):
            raise DataError("thresholds, temperatures, scores or classes differ; join only predictions of one model")
        every = [list(prediction._per_sample()) for prediction in predictions]
        return first._of(torch.cat(parts, dim=-1) for parts in zip(*every, strict=True))

    @property
    def _rule(self) -> tuple[Any, ...]:
        """What decides about samples, apart from the samples themselves."""
        fitted = self.unfamiliarity
        by_features = None if fitted is None else (fitted.score_names, fitted.threshold, fitted.reference)
        plain = (self.threshold, self.score_name, self.class_names, self.temperature, self.reference, self.calibration)
        return (self.members, self.classes, self.stage is None, self.forced is None, *plain, by_features)

    def to(self, device: torch.device | str) -> "Prediction":
        """The same prediction on another device."""
        return self._of(tensor.to(device) for tensor in self._per_sample())

    def __len__(self) -> int:
        return self.member_logits.shape[1]

    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | Tensor) -> "Prediction":
        if index is None:
            raise DataError("None selects no samples; if it came from `accept`, calibrate the ensemble first")
        if not isinstance(index, slice):
            rows = torch.as_tensor(index, device=None if isinstance(index, Tensor) else "cpu")
            rows = rows[None] if rows.ndim == 0 else rows  # one sample keeps its axis
            index = rows if rows.numel() else rows.long()  # an empty list has no integer dtype
        return self._of(tensor[..., index] for tensor in self._per_sample())

    def __repr__(self) -> str:
        sizes = f"{len(self)} samples, {self.members} members, {self.classes} classes"
        return f"Prediction({sizes}, score={self.score_name!r}, threshold={self.threshold})"

    def _per_sample(self) -> Iterator[Tensor]:
        """What differs between samples, with these on the last axis."""
        yield self.member_logits.mT  # [M, C, B]
        if self.unfamiliarity is not None:
            yield self.unfamiliarity.member_scores  # [S, M, B]
        yield from (one for one in (self.stage, self.forced) if one is not None)

    def _of(self, parts: Iterable[Tensor]) -> "Prediction":
        """A copy with other samples, given as by `_per_sample`."""
        given = iter(parts)
        logits, fitted = next(given).mT.contiguous(), self.unfamiliarity
        fitted = None if fitted is None else dataclasses.replace(fitted, member_scores=next(given))
        stage, forced = (None if one is None else next(given) for one in (self.stage, self.forced))
        return dataclasses.replace(self, member_logits=logits, unfamiliarity=fitted, stage=stage, forced=forced)


@dataclass(frozen=True, eq=False, repr=False)
class LabelsPrediction:
    """The answers of M members for B samples and C labels, each of which applies or not, whatever the others do.

    All but the logits is computed on first use, from the `answers` to the B · C questions whether a label applies.
    Indexing picks samples. `of` has the answers about one label, with all that a `Prediction` knows.

    Examples:
        >>> logits = torch.tensor([[[4.0, 1.0, -4.0]]])  # [members, samples, labels]
        >>> answer = he.prediction.LabelsPrediction(logits, class_names=("toxic", "insult", "threat"))
        >>> answer.label.tolist(), answer.names()
        ([[1, 1, 0]], [['toxic', 'insult']])
    """

    member_logits: Tensor  # [M, B, C], log-odds
    threshold: tuple[float, ...] | None = None  # the least accepted `certainty`, of each label
    score_name: ScoreName = "msp"
    class_names: tuple[str, ...] | None = None
    temperature: float = 1.0

    @cached_property
    def answers(self) -> Prediction:
        """The answers to all questions, sample by sample, as those of a classifier with the classes no and yes."""
        logits = class_logits(self.member_logits.flatten(1)[..., None])  # [M, B·C, 2]
        return Prediction(logits, score_name=self.score_name, temperature=self.temperature)

    def of(self, label: int | str) -> Prediction:
        """The answers whether one label applies, by its name or number."""
        index = label if isinstance(label, int) else (self.class_names or ()).index(label)
        limit = None if self.threshold is None else self.threshold[index]
        logits = class_logits(self.member_logits[..., index, None])
        return Prediction(logits, limit, self.score_name, ("no", "yes"), self.temperature)

    def _each(self, values: Tensor) -> Tensor:
        return values.unflatten(0, self.member_logits.shape[1:])  # [B·C] -> [B, C]

    @cached_property
    def probs(self) -> Tensor:
        """`[B, C]`, the calibrated probability that each label applies: the mean over members of its sigmoid."""
        return self._each(self.answers.probs[:, 1])

    @cached_property
    def label(self) -> Tensor:
        """`[B, C]`, 1 where a label applies and 0 where not."""
        return self._each(self.answers.label)

    @cached_property
    def confidence(self) -> Tensor:
        """`[B, C]`, the calibrated probability of `label`."""
        return self._each(self.answers.confidence)

    @cached_property
    def accept(self) -> Tensor | None:
        """`[B, C]` of bool: whether the answer about each label is sure enough; None without thresholds."""
        if self.threshold is None:
            return None
        certainty = self._each(self.answers.certainty)
        return certainty >= certainty.new_tensor(self.threshold)

    def score(self, name: ScoreName | None = None) -> Tensor:
        """`[B, C]`, how uncertain each answer is; see `Prediction.score`."""
        return self._each(self.answers.score(name))

    def names(self) -> list[list[str]]:
        """The labels that apply to each sample."""
        if self.class_names is None:
            raise DataError("label names are unknown; give them to the model: model.with_metadata(labels=[...])")
        pairs = ((self.class_names, row) for row in self.label.tolist())
        return [[name for name, applies in zip(names, row, strict=True) if applies] for names, row in pairs]

    def __len__(self) -> int:
        return self.member_logits.shape[1]

    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> "LabelsPrediction":
        return dataclasses.replace(self, member_logits=self.member_logits[:, index])

    def __repr__(self) -> str:
        members, samples, labels = self.member_logits.shape
        return f"LabelsPrediction({samples} samples, {members} members, {labels} labels)"


class Output(NamedTuple):
    """One quantity that a prediction reports for every sample."""

    meaning: str  # one sentence
    read: Callable[[Prediction], Tensor | None]  # returns it, [B, …]; None if unknown


_codes = ", ".join(f"{code} {word or 'accepted'}" for code, word in enumerate(REASONS))
OUTPUTS: Mapping[str, Output] = {
    "member_logits": Output("Logits of each member.", lambda p: p.member_logits.transpose(0, 1)),  # -> [B, M, C]
    "probs": Output("Calibrated probabilities of the classes.", lambda p: p.probs),
    "label": Output("The most probable class.", lambda p: p.label),
    "confidence": Output("Its calibrated probability.", lambda p: p.confidence),
    "entropy": Output("Total uncertainty in nats: the entropy of `probs`.", lambda p: p.entropy),
    "aleatoric": Output("What each member is unsure about: their mean entropy, in nats.", lambda p: p.aleatoric),
    "epistemic": Output("What members differ about: mutual information, in nats.", lambda p: p.epistemic),
    "disagreement": Output("Share of member pairs with different labels.", lambda p: p.disagreement),
    "score": Output("How uncertain the answer is, before the temperature; higher = more.", lambda p: p.score()),
    "p_value": Output(
        "How rare a score this high is among held-out data.", lambda p: p.p_value() if p.reference else None
    ),
    "familiarity": Output(
        "How rare features this strange are among familiar data; near 0 for OOD inputs.", lambda p: p.familiarity
    ),
    "accept": Output("Whether the answer is accepted: sure and familiar enough.", lambda p: p.accept),
    "reason": Output(f"Why not: {_codes}.", lambda p: p.doubt),
    "stage": Output("Which stage of a cascade answered, from 0.", lambda p: p.stage),
}
"""All outputs of a prediction, by name; files, servers, tables and the command line select from them."""
PLAIN = tuple(name for name in OUTPUTS if name not in ("member_logits", "probs", "p_value", "stage"))  # of `to_dict`


def reaches(threshold: Threshold, certainty: Tensor, label: Tensor) -> Tensor:
    """`[B]` of bool: whether answers are as certain as the threshold, or that of their label, asks."""
    limit = certainty.new_tensor(threshold)
    return certainty >= (limit[label] if limit.ndim else limit)


def require_members_for(score: ScoreName, members: int) -> None:
    """Refuse a score that is the same for every input with this number of members."""
    if score == "mutual_information" and members == 1:
        raise ConfigError("score is mutual_information, which is 0 for a single member; use another, such as msp")
