"""Metadata saved with a model besides its weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._utils import warn
from ..arguments import Checked, Count, PositiveShare
from ..errors import ConfigError
from ..metrics.conformal import Reference
from ..metrics.distance import BY_CLASS, FittedName, Statistics, is_relative, nearest_class, ready, unfamiliarity
from ..overlap import FittedSet, union_of
from ..prediction import Calibrates, Prediction, ScoreName, Unfamiliarity, check_temperature, require_members_for
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..schema import ADDED_LATER, short
from .config import EnsembleConfig, ProjectionConfig
from .member_states import differing_names, join_equal, member_config, member_state

ACCEPTS_ALL = torch.finfo(torch.float32).max  # threshold if samples are too few for another; finite, for JSON
Copied = TypeVar("Copied", Tensor, tuple[float, ...])  # one entry for all members, or one for each
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration(Checked):
    """A temperature (one, or one per member) and a threshold on an uncertainty score.

    Inputs whose score is above `threshold` are declined; `accepted_share` is the share of in-distribution inputs that
    the threshold was chosen to accept. For what the temperature `calibrates`, see `Prediction.from_logits`.
    `reference` has the scores of the held-out data, for p-values, and `marks` the digests of 1,024 of its samples,
    drawn evenly (in older files, 64), from which `evaluate` estimates their share of a set. If only logits were given
    (`fit_calibration`), `logit_marks` has the digests of as many of them, for `evaluate_logits`.
    """

    temperature: tuple[float, ...] = (1.0,)
    threshold: float | None = None
    score: ScoreName = "msp"
    accepted_share: PositiveShare = 0.95
    calibrates: Calibrates = field(default="logits", metadata=ADDED_LATER)
    reference: Reference | None = field(default=None, metadata=ADDED_LATER)
    marks: tuple[str, ...] = field(default=(), repr=False, metadata=ADDED_LATER)
    logit_marks: tuple[str, ...] = field(default=(), repr=False, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)

    @property
    def fitted_set(self) -> FittedSet:
        """What is stored about the samples it was fitted on."""
        return FittedSet(self.marks, self._samples(self.marks))

    @property
    def fitted_logits(self) -> FittedSet:
        """What is stored about the logits it was fitted on, if only logits were given."""
        return FittedSet(self.logit_marks, self._samples(self.logit_marks))

    def _samples(self, marks: tuple[str, ...]) -> int:
        return len(marks) if self.reference is None else self.reference.samples

    @property
    def brief(self) -> "Calibration":
        """A copy without reference and marks, for display."""
        return replace(self, reference=None, marks=(), logit_marks=())

    def prediction(
        self,
        member_logits: Tensor,
        class_names: Sequence[str] | None = None,
        check_finite: bool = True,
        unfamiliarity: Unfamiliarity | None = None,
    ) -> Prediction:
        """Turn member logits `[M, B, C]` into a prediction, with this calibration applied."""
        temperature = self.temperature if len(self.temperature) > 1 else self.temperature[0]
        logits, of_probs = Prediction.divided(member_logits, temperature, self.calibrates, check_finite)
        names = None if class_names is None else tuple(class_names)
        return Prediction(logits, self.threshold, self.score, names, of_probs, self.reference, unfamiliarity)


@dataclass(frozen=True)
class FamiliaritySettings(Checked):
    """Settings of fitted familiarity scores, without their tensors.

    Attributes:
        scores: The scores; threshold and p-values are for the first.
        width: Length of the features.
        samples: Number of samples that fitted the statistics.
        stored: For `knn`: features stored.
        neighbours: For `knn`: which neighbour counts.
        principal: For `vim`: directions of the principal subspace.
        threshold: Inputs whose score is above it are unfamiliar; None before calibration.
        accepted_share: The share of familiar inputs that the threshold accepts.
        reference: Scores of other samples, which did not fit the statistics.
        marks: Digests of some of the samples that fitted them, drawn evenly: these must not set a threshold, and
            `evaluate` warns if it is given them.
        embedding: For `vilu` and `neglabel`: width of the common embedding of images and texts.
        hidden: For `vilu`: widths of all layers of its network except the last.
        words: For `neglabel`: groups of words, and words in a group.
        projected: For `vilu`: whether its attention over classes has its own projections.
        halved: Whether one half of the data of `calibrate` fitted them: given the same data again, it fits them again.
    """

    scores: tuple[FittedName, ...]
    width: int
    samples: int
    stored: int = 0
    neighbours: int = 0
    principal: int = 0
    threshold: float | None = None
    accepted_share: PositiveShare = 0.95
    reference: Reference | None = None
    marks: tuple[str, ...] = field(default=(), repr=False)
    embedding: Count = field(default=0, metadata=ADDED_LATER)
    hidden: tuple[Count, ...] = field(default=(), metadata=ADDED_LATER)
    words: tuple[Count, Count] = field(default=(0, 0), metadata=ADDED_LATER)
    projected: bool = field(default=False, metadata=ADDED_LATER)
    halved: bool = field(default=False, repr=False, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ConfigError(f"familiarity has the scores {list(self.scores)}; give one or more, each once")
        if not 0 <= self.principal < self.width or not 0 <= self.neighbours <= self.stored:
            directions = f"{self.principal} principal directions (of at most {self.width - 1})"
            raise ConfigError(f"got {directions} and {self.neighbours} neighbours (of {self.stored} stored)")

    @property
    def fitted_set(self) -> FittedSet:
        """What is stored about the samples that fitted the statistics."""
        return FittedSet(self.marks, self.samples)

    def shapes(self, members: int, classes: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of all scores, by name (`score.name`)."""
        of_scores = ((score, self._shapes_of(score, classes)) for score in self.scores)
        return {f"{score}.{name}": (members, *shape) for score, shapes in of_scores for name, shape in shapes.items()}

    def _shapes_of(self, score: FittedName, classes: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of one score, without the axis of members."""
        width, embedding = self.width, self.embedding
        if score == "knn":
            return {"bank": (self.stored, width)}
        if score == "vim":
            return {"origin": (width,), "residual": (width, width - self.principal), "weight": ()}
        if score in ("vilu", "neglabel"):
            shapes: dict[str, tuple[int, ...]] = {"projection": (embedding, width), "shift": (embedding,)}
            if score == "neglabel":
                return shapes | {"words": (*self.words, embedding), "offset": ()}
            shapes["texts"] = (classes, embedding)
            if self.projected:
                shapes |= {"image_map": (embedding, embedding), "text_map": (embedding, embedding), "scale": ()}
            for layer, (inputs, outputs) in enumerate(pairwise((3 * embedding, *self.hidden, 1))):
                shapes |= {f"weight{layer}": (outputs, inputs), f"bias{layer}": (outputs,)}
            return shapes
        by_class = {"mean": (width,), "whiten": (width, width), "classes": (classes, width)}
        return by_class | ({"background": (width, width)} if is_relative(score) else {})


@dataclass(frozen=True, eq=False)
class _WithTensors:
    """Settings and the tensors they describe; immutable."""

    settings: Any
    state: Mapping[str, Tensor] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or self.settings != other.settings:
            return False
        return self.state.keys() == other.state.keys() and not differing_names([self.state, other.state])

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, without the prefix."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.state.items() if name.startswith(prefix)}


@dataclass(frozen=True, eq=False)
class Familiarity(_WithTensors):
    """Fitted statistics, in float32 on the CPU, with the names given by the settings."""

    settings: FamiliaritySettings
    _placed: dict[torch.device, dict[str, Statistics]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be used in autograd
            plain = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in self.state.items()}
        object.__setattr__(self, "state", plain)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: not the statistics placed on devices."""
        return {**vars(self), "_placed": {}}

    def scores(self, features: Tensor, logits: Tensor) -> Tensor:
        """Every score of every member, `[S, M, B]`, from features `[M, B, d]` and logits `[M, B, C]`."""
        names, neighbours, statistics = self.settings.scores, self.settings.neighbours, self._on(features.device)
        kind = features.device.type  # distances need full precision, whatever the layers use
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with exact:
            scores = [unfamiliarity(name, statistics[name], features, logits, neighbours) for name in names]
        return torch.stack(scores)

    def nearest_class(self, features: Tensor) -> Tensor | None:
        """`[B]`, the class with the nearest mean to features `[M, B, d]`; None if no fitted score has class means."""
        name = next((score for score in self.settings.scores if score in BY_CLASS), None)
        return None if name is None else nearest_class(name, self._on(features.device)[name], features)

    def about(self, scores: Tensor) -> Unfamiliarity:
        """Scores `[S, M, B]` of new samples, together with the threshold and the held-out scores."""
        return Unfamiliarity(self.settings.scores, scores, self.settings.threshold, self.settings.reference)

    def _on(self, device: torch.device) -> dict[str, Statistics]:
        """The statistics of each score on a device, cached."""
        if device not in self._placed:
            parts = {score: self.part(f"{score}.") for score in self.settings.scores}
            with torch.inference_mode(False):  # gradients may be needed later
                placed = {score: {name: one.to(device) for name, one in part.items()} for score, part in parts.items()}
                self._placed[device] = {score: ready(tensors) for score, tensors in placed.items()}
        return self._placed[device]


@dataclass(frozen=True)
class Metadata(Checked):
    """Everything about an ensemble that is not needed to compute its logits.

    Attributes:
        source: Library and class the model was converted from.
        labels: Class names in the order of the logits; empty when unknown.
        preprocessing: How raw inputs become tensors; None when unknown.
        calibration: Temperature and abstention threshold; None before calibration.
        history: What was done to the model, one readable line per step, oldest first.
        metrics: Measured numbers worth showing on the model card.
        text_side: For a zero-shot ensemble, the text towers that `retarget` needs; None if there are none.
        familiarity: Fitted statistics for how familiar an input is; None if nothing was fitted.
        preprocessing_from: Where the preprocessing was taken from, or why there is none; empty when unknown.
        train_marks: Digests of some samples that trained it with this library: `calibrate` warns if it is given them.
        train_samples: How many samples trained it with this library.
    """

    source: str = ""
    labels: tuple[str, ...] = ()
    preprocessing: ImagePreprocessing | TextPreprocessing | None = None
    calibration: Calibration | None = None
    history: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    text_side: "TextSide | None" = field(default=None, metadata=ADDED_LATER)
    familiarity: Familiarity | None = field(default=None, metadata=ADDED_LATER)
    preprocessing_from: str = field(default="", metadata=ADDED_LATER)
    train_marks: tuple[str, ...] = field(default=(), repr=False, metadata=ADDED_LATER)
    train_samples: int = field(default=0, metadata=ADDED_LATER)

    @property
    def trained_set(self) -> FittedSet:
        """What is stored about the samples that trained it."""
        return FittedSet(self.train_marks, self.train_samples)

    @property
    def plain(self) -> "Metadata":
        """A copy without the parts that hold tensors: text side and familiarity."""
        return replace(self, text_side=None, familiarity=None)

    @property
    def measured(self) -> bool:
        """Whether it contains anything measured with the current weights, which is invalid for others."""
        return self.calibration is not None or self.familiarity is not None or bool(self.metrics)

    @property
    def unmeasured(self) -> "Metadata":
        """A copy without anything measured with earlier weights."""
        return replace(self, calibration=None, familiarity=None, metrics={})

    def check(self, config: EnsembleConfig) -> None:
        """Refuse labels, temperatures, scores, statistics and preprocessing that do not match the model."""
        classes = config.readout.num_classes
        labels = len(self.labels)
        if classes and labels not in (0, classes):
            raise ConfigError(f"{labels} labels for {classes} classes; give one label per class, or none")
        count = 1 if self.calibration is None else len(self.calibration.temperature)
        if count not in (1, config.members):
            raise ConfigError(f"{count} temperatures for {config.members} members; give one, or one each")
        if self.calibration is not None:
            require_members_for(self.calibration.score, config.members)
        familiarity = self.familiarity
        shapes = {} if familiarity is None else {name: tuple(one.shape) for name, one in familiarity.state.items()}
        if familiarity is not None and shapes != familiarity.settings.shapes(config.members, classes):
            raise ConfigError("the familiarity was fitted to another model: fit it to this one with fit_familiarity")
        preprocessing = self.preprocessing
        if preprocessing is not None and preprocessing.kind != config.kind:
            raise ConfigError(f"preprocessing is {type(preprocessing).__name__} for a model of {config.kind}s")

    def after(self, line: str, **changes: Any) -> "Metadata":
        """Metadata after a change to the model: one more line of history, and nothing measured."""
        return replace(self.unmeasured, history=(*self.history, line), **changes)


def member_metadata(metadata: Metadata, index: int, members: int) -> Metadata:
    """Metadata of one member alone; calibration and metrics of several members are dropped."""
    if members > 1:
        metadata = metadata.unmeasured
    return metadata if metadata.text_side is None else replace(metadata, text_side=metadata.text_side.member(index))


def common_metadata(members: Sequence[Metadata]) -> Metadata:
    """Metadata of an ensemble made from members: what they agree on, without calibration, with joined text sides."""
    labels = _common([member.labels for member in members], "labels")  # classes are averaged by position
    preprocessing = _common([member.preprocessing for member in members], "preprocessing")  # all get the same tensors
    origin = next((member for member in members if member.preprocessing), members[0]).preprocessing_from
    bare = next((index for index, member in enumerate(members) if not member.labels), None)
    if labels and bare is not None:
        labels = ()
        advice = "give it those of the others with .with_metadata(labels=...), if it numbers classes in the same way"
        warn(f"member {bare} has no class names, so all have none; {advice}")
    history = tuple(dict.fromkeys(line for member in members for line in member.history))
    side = join_text_sides([member.text_side for member in members])
    marks, samples = union_of([member.trained_set for member in members])
    common = replace(members[0].unmeasured, labels=labels, preprocessing=preprocessing, history=history, text_side=side)
    return replace(common, preprocessing_from=origin, train_marks=marks, train_samples=samples)


def _common(values: Sequence[T], name: str) -> T:
    """The value of a field of those members that have one; refused if two differ."""
    known = {index: value for index, value in enumerate(values) if value}
    first, common = next(iter(known.items()), (0, values[0]))
    for index, value in known.items():
        if value != common:
            ours, theirs = (vars(one) if is_dataclass(one) else {name: one} for one in (common, value))
            both = [f"{key} {short(ours[key])} and {short(theirs[key])}" for key in ours if ours[key] != theirs[key]]
            advice = f"if they mean the same, give both one by .with_metadata({name}=...)"
            raise ConfigError(f"members {first} and {index} have different {', '.join(both)}; {advice}")
    return common


def invalid_names(names: Sequence[object]) -> tuple[int | None, list[str]]:
    """Problems of class names: the index of the first that is blank or no string, and all duplicates."""
    blank = next((index for index, name in enumerate(names) if not isinstance(name, str) or not name.strip()), None)
    counts = Counter(name for name in names if isinstance(name, str))
    return blank, sorted(name for name, count in counts.items() if count > 1)


# --- the text side of a zero-shot ensemble ---------------------------------------------------------------

TOWER, PROJECTION = "tower.", "projection."


@dataclass(frozen=True)
class TextSettings:
    """Settings of a text side, without its weights; `logit_scale` and `logit_bias` as in a dual encoder."""

    tower: EnsembleConfig
    projection: ProjectionConfig | None
    logit_scale: tuple[float, ...]
    logit_bias: tuple[float, ...] | None
    templates: tuple[str, ...]
    preprocessing: TextPreprocessing

    def __post_init__(self) -> None:
        if any(count not in (1, self.members) for count in self._copies()):
            raise ConfigError(f"each part of a text side must be there once or once per member, got {self._copies()}")

    @property
    def members(self) -> int:
        """Number of members that differ in any part; 1 if one text side serves all."""
        return max(self._copies())

    def _copies(self) -> tuple[int, ...]:
        """Number of copies of tower, projection, scale and bias."""
        projection = 1 if self.projection is None else self.projection.copies
        biases = 1 if self.logit_bias is None else len(self.logit_bias)
        return self.tower.members, projection, len(self.logit_scale), biases


@dataclass(frozen=True, eq=False)
class TextSide(_WithTensors):
    """A text tower (weights `TOWER…`, as in an ensemble) with its projection (`PROJECTION…`), scale and tokenizer."""

    settings: TextSettings

    def member(self, index: int) -> "TextSide":
        """The text side of one member."""
        old = self.settings
        if old.members == 1:
            return self
        copy = min(index, old.tower.members - 1)
        tower = member_state(old.tower, self.part(TOWER), copy)
        projection = {name: _of_member(tensor, index) for name, tensor in self.part(PROJECTION).items()}
        settings = replace(
            old,
            tower=member_config(old.tower, copy),
            projection=None if old.projection is None else replace(old.projection, copies=1),
            logit_scale=_of_member(old.logit_scale, index),
            logit_bias=None if old.logit_bias is None else _of_member(old.logit_bias, index),
        )
        return TextSide(settings, text_state(tower, projection))


def join_text_sides(sides: Sequence[TextSide | None]) -> TextSide | None:
    """Join the text sides of single members, storing equal parts once; None if one lacks it, or they do not match."""
    present = [side for side in sides if side is not None]
    if not present or len(present) < len(sides):
        return None
    all_settings = [side.settings for side in present]
    first = all_settings[0]
    biases = [settings.logit_bias for settings in all_settings if settings.logit_bias is not None]
    for settings in all_settings:
        like_first = replace(settings, tower=first.tower, logit_scale=first.logit_scale, logit_bias=first.logit_bias)
        if like_first != first or first.tower.differences(settings.tower) or len(biases) not in (0, len(all_settings)):
            return None
    config, tower = join_equal([settings.tower for settings in all_settings], [side.part(TOWER) for side in present])
    projections = [side.part(PROJECTION) for side in present]
    projection = projections[0]
    stored = first.projection
    if stored is not None and differing_names(projections):
        projection = {name: torch.cat([state[name] for state in projections]) for name in projection}
        stored = replace(stored, copies=len(present))
    scale = _once_if_equal([settings.logit_scale for settings in all_settings])
    bias = _once_if_equal(biases) if biases else None
    joined = replace(first, tower=config, projection=stored, logit_scale=scale, logit_bias=bias)
    return TextSide(joined, text_state(tower, projection))


def text_state(tower: Mapping[str, Tensor], projection: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of both parts, with their names in a text side."""
    parts = ((TOWER, tower), (PROJECTION, projection))
    return {prefix + name: tensor for prefix, part in parts for name, tensor in part.items()}


def _of_member(copies: Copied, index: int) -> Copied:
    """The value of one member if there is one per member, else the only value."""
    start = min(index, len(copies) - 1)
    return copies[start : start + 1]


def _once_if_equal(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Concatenate the numbers of single members, or keep one if all are equal."""
    return values[0] if len(set(values)) == 1 else tuple(number for numbers in values for number in numbers)
