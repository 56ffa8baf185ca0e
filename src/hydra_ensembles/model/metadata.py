"""Metadata saved with a model besides its weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..digest import digest
from ..errors import ConfigError
from ..metrics.conformal import Bins, Reference
from ..metrics.distance import FittedName, Statistics, ready, unfamiliarity
from ..metrics.probabilities import at_least_float32
from ..metrics.probabilities import check_finite as require_finite
from ..prediction import LabelsPrediction, Prediction, ScoreName, Unfamiliarity, require_members_for
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..promise import Promise
from ..settings import Checked, Positive, PositiveShare, short, to_plain
from .config import EnsembleConfig
from .member_states import differing_names

T = TypeVar("T")


@dataclass(frozen=True)
class Calibration(Checked):
    """A temperature of the probabilities, and when an answer is sure enough to be accepted.

    Attributes:
        temperature: Divides the logarithm of the members' mean probabilities.
        threshold: The least accepted `certainty` of an answer; one number, or one for each label.
        score: What certainty is made of: for `msp` it is the confidence, else minus this score.
        promises: What is promised of the errors among accepted answers; the first is in force, or of each label its
            first.
        share: The share of inputs like the held-out ones that is accepted, if that is what is promised.
        reference: Held-out scores, for p-values.
        watched: How held-out scores are spread, for a `Monitor`.
        weights: Digest of the model's weights.
        rows: Digests of some held-out samples, which `evaluate` recognises.
    """

    temperature: Positive = 1.0
    threshold: float | tuple[float, ...] | None = None
    score: ScoreName = "msp"
    promises: tuple[Promise, ...] = ()
    share: PositiveShare | None = None
    reference: Reference | None = None
    watched: Mapping[str, Bins] = field(default_factory=dict, repr=False)
    weights: str = field(default="", repr=False)  # of `weights_of`
    rows: tuple[str, ...] = field(default=(), repr=False)

    @property
    def in_force(self) -> tuple[Promise, ...]:
        """The promise in force, or those of the labels that have one; none after `share=`."""
        return tuple({one.label: one for one in reversed(self.promises)}.values())[::-1]

    @property
    def promise(self) -> Promise | dict[str, Promise] | None:
        """The promise in force, or one for each label that has one."""
        if self.in_force and self.in_force[0].label is None:
            return self.in_force[0]
        return {str(one.label): one for one in self.in_force} or None

    @cached_property
    def identity(self) -> str:
        """A digest by which predictions tell which calibration made them."""
        rule = [self.temperature, self.score, self.threshold, self.share, [one.risk for one in self.promises]]
        return digest([self.weights, rule, to_plain(self.watched)])[:16]

    def at(self, risk: float | Mapping[str, float], labels: Sequence[str]) -> "Calibration":
        """The same with other certified points in force, of all answers or of those with some of the labels."""
        promises, threshold = self.promises, self.threshold
        for label, asked in (risk if isinstance(risk, Mapping) else {None: risk}).items():
            found = next((one for one in promises if (one.label, one.risk) == (label, asked)), None)
            if found is None:
                known = ", ".join(str(one.risk) for one in promises if one.label == label) or "none"
                raise ConfigError(f"risk={asked} was not certified, but {known}; calibrate with risk=[...] for several")
            promises = (found, *(one for one in promises if one is not found))
            if isinstance(threshold, tuple):
                limits = zip(labels, threshold, strict=True)
                threshold = tuple(found.threshold if name == label else limit for name, limit in limits)
            else:
                threshold = found.threshold
        return replace(self, threshold=threshold, promises=promises)

    def prediction(
        self,
        member_logits: Tensor,
        class_names: Sequence[str] | None = None,
        check_finite: bool = True,
        unfamiliarity: Unfamiliarity | None = None,
    ) -> Prediction:
        """Turn member logits `[M, B, C]` into a prediction, with this calibration applied."""
        rule = (self.threshold, self.score, class_names, check_finite, unfamiliarity)
        known = self.identity if self.weights else ""
        found = Prediction.from_logits(member_logits, *rule)
        return replace(found, temperature=self.temperature, reference=self.reference, calibration=known)

    def of_labels(
        self, member_logits: Tensor, names: Sequence[str] | None = None, check_finite: bool = True
    ) -> LabelsPrediction:
        """Turn member logits `[M, B, C]` of labels into a prediction, with this calibration applied."""
        logits = at_least_float32(member_logits)
        if check_finite:
            require_finite(logits, "member logits [M, B, C]")
        threshold = self.threshold if isinstance(self.threshold, tuple) else None
        known = None if names is None else tuple(names)
        return LabelsPrediction(logits, threshold, self.score, known, self.temperature)


@dataclass(frozen=True)
class FamiliaritySettings(Checked):
    """Settings of fitted familiarity scores, without their tensors; `threshold` and p-values are for the first score.

    `samples` fitted the statistics, and `rows` are digests of some of them; `reference` has the scores of others.
    `own` says that `calibrate` fitted them on rows of its own, as it will again.
    """

    scores: tuple[FittedName, ...]
    samples: int
    threshold: float | None = None
    reference: Reference | None = None
    rows: tuple[str, ...] = field(default=(), repr=False)
    own: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ConfigError(f"familiarity has the scores {list(self.scores)}; give one or more, each once")


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Fitted statistics, in float32 on the CPU, with the names given by the settings; immutable."""

    settings: FamiliaritySettings
    state: Mapping[str, Tensor] = field(repr=False)
    _placed: dict[torch.device, dict[str, Statistics]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be used in autograd
            plain = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in self.state.items()}
        object.__setattr__(self, "state", plain)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: not the statistics placed on devices."""
        return {**vars(self), "_placed": {}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Familiarity) or self.settings != other.settings:
            return False
        return self.state.keys() == other.state.keys() and not differing_names([self.state, other.state])

    def scores(self, features: Tensor, logits: Tensor) -> Tensor:
        """Every score of every member, `[S, M, B]`, from features `[M, B, d]` and logits `[M, B, C]`."""
        names, statistics = self.settings.scores, self._on(features.device)
        kind = features.device.type  # distances need full precision, whatever the layers use
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with exact:
            scores = [unfamiliarity(name, statistics[name], features, logits) for name in names]
        return torch.stack(scores)

    def about(self, scores: Tensor) -> Unfamiliarity:
        """Scores `[S, M, B]` of new samples, together with the threshold and the held-out scores."""
        return Unfamiliarity(self.settings.scores, scores, self.settings.threshold, self.settings.reference)

    def _on(self, device: torch.device) -> dict[str, Statistics]:
        """The statistics of each score on a device, cached."""
        if device not in self._placed:
            placed: dict[str, dict[str, Tensor]] = {score: {} for score in self.settings.scores}
            with torch.inference_mode(False):  # gradients may be needed later
                for name, tensor in self.state.items():
                    score, _, part = name.rpartition(".")
                    placed[score][part] = tensor.to(device)
                self._placed[device] = {score: ready(tensors) for score, tensors in placed.items()}
        return self._placed[device]


@dataclass(frozen=True)
class Metadata(Checked):
    """Everything about an ensemble that is not needed to compute its logits; what is unknown is empty or None.

    `labels` are in the order of the logits, `history` has a line for each change, oldest first, `metrics` are numbers
    for the model card. `preprocessing_from` says where the preprocessing was taken from, or why there is none. `chosen`
    are digests of samples by which this model was chosen among others: they promise nothing about it.
    """

    source: str = ""
    labels: tuple[str, ...] = ()
    preprocessing: ImagePreprocessing | TextPreprocessing | None = None
    calibration: Calibration | None = None
    history: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    familiarity: Familiarity | None = None
    preprocessing_from: str = ""
    chosen: tuple[str, ...] = field(default=(), repr=False)

    @property
    def unmeasured(self) -> "Metadata":
        """A copy without anything measured with earlier weights."""
        return replace(self, calibration=None, familiarity=None, metrics={})

    def check(self, config: EnsembleConfig) -> None:
        """Refuse labels, thresholds, scores, statistics and preprocessing that do not match the model."""
        classes = config.readout.num_classes
        labels = len(self.labels)
        if classes and labels not in (0, classes):
            raise ConfigError(f"{labels} labels for {classes} classes; give one label per class, or none")
        if self.calibration is not None:
            require_members_for(self.calibration.score, config.members)
        for name, tensor in (self.familiarity.state if self.familiarity is not None else {}).items():
            of_classes = name.endswith((".classes", ".texts"))  # [M, C, …]
            if len(tensor) != config.members or (of_classes and tensor.shape[1] != classes):
                raise ConfigError("the familiarity was fitted to another model: fit it to this one (fit_familiarity)")
        preprocessing = self.preprocessing
        if preprocessing is not None and preprocessing.kind != config.kind:
            raise ConfigError(f"preprocessing is {type(preprocessing).__name__} for a model of {config.kind}s")

    def after(self, line: str, **changes: Any) -> "Metadata":
        """Metadata after a change to the model: one more line of history, and nothing measured."""
        return replace(self.unmeasured, history=(*self.history, line), **changes)


def member_metadata(metadata: Metadata, members: int) -> Metadata:
    """Metadata of one member alone; calibration and metrics of several members are dropped."""
    return metadata.unmeasured if members > 1 else metadata


def common_metadata(members: Sequence[Metadata]) -> Metadata:
    """Metadata of an ensemble made from members: what they agree on, without calibration."""
    labels = _common([member.labels for member in members], "labels")  # classes are averaged by position
    labels = labels if all(member.labels for member in members) else ()
    preprocessing = _common([member.preprocessing for member in members], "preprocessing")  # all get the same tensors
    origin = next((member for member in members if member.preprocessing), members[0]).preprocessing_from
    history = tuple(dict.fromkeys(line for member in members for line in member.history))
    common = replace(members[0].unmeasured, labels=labels, preprocessing=preprocessing, history=history)
    return replace(common, preprocessing_from=origin)


def _common(values: Sequence[T], name: str) -> T:
    """The value of a field of those members that have one; refused if two differ."""
    known = [(index, value) for index, value in enumerate(values) if value]
    for index, value in known:
        if value != known[0][1]:
            problem = (
                f"members {known[0][0]} and {index} have different {name}: {short(known[0][1])} and {short(value)}"
            )
            raise ConfigError(f"{problem}; if they mean the same, give both one by .with_metadata({name}=...)")
    return known[0][1] if known else values[0]


def invalid_names(names: Sequence[object]) -> tuple[list[int], list[object]]:
    """Problems of class names: the places of those that are blank or no string, and those that occur twice."""
    blank = [index for index, name in enumerate(names) if not isinstance(name, str) or not name.strip()]
    return blank, [name for name, count in Counter(names).items() if count > 1]
