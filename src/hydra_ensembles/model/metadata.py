"""Metadata saved with a model besides its weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metrics.conformal import Reference
from ..metrics.distance import FittedName, Statistics, ready, unfamiliarity
from ..prediction import Prediction, ScoreName, Unfamiliarity, check_temperature, own_logits, require_members_for
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..settings import Checked, PositiveShare, short
from .config import EnsembleConfig
from .layers import GroupedLinear, linear
from .member_states import differing_names, join_equal

if TYPE_CHECKING:
    from .ensemble import Ensemble

ACCEPTS_ALL = torch.finfo(torch.float32).max  # threshold if samples are too few for another; finite, for JSON
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration(Checked):
    """A temperature of the probabilities (one, or one per member) and a threshold on an uncertainty score.

    Inputs whose score is above `threshold` are declined; `accepted_share` is the share of in-distribution inputs that
    the threshold was chosen to accept. `reference` has the scores of the held-out data, for p-values, `rows` the
    digests of some of its samples, which `evaluate` recognises, and `weights` the digest of the model's weights.
    """

    temperature: tuple[float, ...] = (1.0,)
    threshold: float | None = None
    score: ScoreName = "msp"
    accepted_share: PositiveShare = 0.95
    reference: Reference | None = None
    weights: str = field(default="", repr=False)  # of `weights_of`
    rows: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)

    @property
    def brief(self) -> "Calibration":
        """A copy without reference and digests, for display."""
        return replace(self, reference=None, weights="", rows=())

    def prediction(
        self,
        member_logits: Tensor,
        class_names: Sequence[str] | None = None,
        check_finite: bool = True,
        unfamiliarity: Unfamiliarity | None = None,
    ) -> Prediction:
        """Turn member logits `[M, B, C]` into a prediction, with this calibration applied."""
        names = None if class_names is None else tuple(class_names)
        rule = (self.threshold, self.score, names, self.temperature, self.reference, unfamiliarity)
        return Prediction(own_logits(member_logits, check_finite), *rule)


@dataclass(frozen=True)
class FamiliaritySettings(Checked):
    """Settings of fitted familiarity scores, without their tensors; `threshold` and p-values are for the first score.

    `samples` fitted the statistics, and `rows` are digests of some of them; `reference` has the scores of others.
    `neighbours` is for `knn`. `halved` says that one half of the data of `calibrate` fitted them: given the same data
    again, it fits them again.
    """

    scores: tuple[FittedName, ...]
    width: int
    samples: int
    neighbours: int = 0
    threshold: float | None = None
    accepted_share: PositiveShare = 0.95
    reference: Reference | None = None
    rows: tuple[str, ...] = field(default=(), repr=False)
    halved: bool = field(default=False, repr=False)

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

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, without the prefix."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.state.items() if name.startswith(prefix)}

    def scores(self, features: Tensor, logits: Tensor) -> Tensor:
        """Every score of every member, `[S, M, B]`, from features `[M, B, d]` and logits `[M, B, C]`."""
        names, neighbours, statistics = self.settings.scores, self.settings.neighbours, self._on(features.device)
        kind = features.device.type  # distances need full precision, whatever the layers use
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with exact:
            scores = [unfamiliarity(name, statistics[name], features, logits, neighbours) for name in names]
        return torch.stack(scores)

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
    """Everything about an ensemble that is not needed to compute its logits; what is unknown is empty or None.

    `labels` are in the order of the logits, `history` has a line for each change, oldest first, `metrics` are numbers
    for the model card, and `text_side` is what `retarget` needs. `preprocessing_from` says where the preprocessing
    was taken from, or why there is none.
    """

    source: str = ""
    labels: tuple[str, ...] = ()
    preprocessing: ImagePreprocessing | TextPreprocessing | None = None
    calibration: Calibration | None = None
    history: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    text_side: "TextSide | None" = None
    familiarity: Familiarity | None = None
    preprocessing_from: str = ""

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


def member_metadata(metadata: Metadata, index: int, members: int) -> Metadata:
    """Metadata of one member alone; calibration and metrics of several members are dropped."""
    if members > 1:
        metadata = metadata.unmeasured
    return metadata if metadata.text_side is None else replace(metadata, text_side=metadata.text_side.member(index))


def common_metadata(members: Sequence[Metadata]) -> Metadata:
    """Metadata of an ensemble made from members: what they agree on, without calibration, with joined text sides."""
    labels = _common([member.labels for member in members], "labels")  # classes are averaged by position
    labels = labels if all(member.labels for member in members) else ()
    preprocessing = _common([member.preprocessing for member in members], "preprocessing")  # all get the same tensors
    origin = next((member for member in members if member.preprocessing), members[0]).preprocessing_from
    history = tuple(dict.fromkeys(line for member in members for line in member.history))
    side = join_text_sides([member.text_side for member in members])
    common = replace(members[0].unmeasured, labels=labels, preprocessing=preprocessing, history=history, text_side=side)
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


def invalid_names(names: Sequence[object]) -> tuple[int | None, list[str]]:
    """Problems of class names: the index of the first that is blank or no string, and all duplicates."""
    blank = next((index for index, name in enumerate(names) if not isinstance(name, str) or not name.strip()), None)
    counts = Counter(name for name in names if isinstance(name, str))
    return blank, sorted(name for name, count in counts.items() if count > 1)


# --- the text side of a zero-shot ensemble ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextSide:
    """What turns class names into class embeddings: a text tower with its tokenizer, on the CPU, and a projection.

    Tower, projection (None if the features are the embedding), scale (its logarithm) and bias are those of a dual
    encoder, there once or once per member; `templates` are sentences with `{label}`.
    """

    tower: "Ensemble"
    projection: GroupedLinear | None
    logit_scale: tuple[float, ...]
    logit_bias: tuple[float, ...] | None
    templates: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextSide) or self._plain != other._plain:
            return False
        ours, theirs = self._weights, other._weights
        return ours.keys() == theirs.keys() and not differing_names([ours, theirs])

    @property
    def _plain(self) -> tuple[object, ...]:
        return self.tower.config, self.tower.metadata, self.logit_scale, self.logit_bias, self.templates

    @property
    def _weights(self) -> dict[str, Tensor]:
        projection = {} if self.projection is None else self.projection.state_dict(prefix="projection.")
        return {**self.tower.state_dict(), **projection}

    @property
    def members(self) -> int:
        """Number of members that differ in any part; 1 if one text side serves all."""
        maps = 1 if self.projection is None else len(self.projection.weight)
        return max(self.tower.num_members, maps, len(self.logit_scale), len(self.logit_bias or "1"))

    def member(self, index: int) -> "TextSide":
        """The text side of one member."""
        if self.members == 1:
            return self
        tower = self.tower.member(min(index, self.tower.num_members - 1))
        bias = None if self.logit_bias is None else _of_member(self.logit_bias, index)
        projection = None if self.projection is None else self.projection.member(index)
        return TextSide(tower, projection, _of_member(self.logit_scale, index), bias, self.templates)

    def on(self, device: torch.device) -> "TextSide":
        """The text side with its weights on a device."""
        if device == self.tower.device:
            return self
        projection = None if self.projection is None else deepcopy(self.projection).to(device)
        return replace(self, tower=deepcopy(self.tower).to(device), projection=projection)


def join_text_sides(sides: Sequence[TextSide | None]) -> TextSide | None:
    """Join the text sides of single members, storing equal parts once; None if one lacks it, or they do not match."""
    present = [side for side in sides if side is not None]
    if not present or len(present) < len(sides):
        return None
    first, towers = present[0], [side.tower for side in present]

    def reads(side: TextSide) -> object:
        """What must be the same in all of them."""
        parts = side.templates, side.tower.metadata.preprocessing, side.projection is None, side.logit_bias is None
        return parts, first.tower.config.differences(side.tower.config)

    if any(reads(side) != reads(first) for side in present):
        return None
    config, state = join_equal([tower.config for tower in towers], [tower.whole_state() for tower in towers])
    maps = [side.projection for side in present if side.projection is not None]
    if maps and not differing_names([projection.state_dict() for projection in maps]):
        maps = maps[:1]
    biases: list[Tensor] = [projection.bias for projection in maps if projection.bias is not None]
    joined = linear(torch.cat([one.weight for one in maps]), torch.cat(biases) if biases else None) if maps else None
    scale = _once_if_equal([side.logit_scale for side in present])
    bias = _once_if_equal([side.logit_bias or () for side in present]) or None
    return TextSide(first.tower.from_state(config, state, first.tower.metadata), joined, scale, bias, first.templates)


def _of_member(copies: tuple[float, ...], index: int) -> tuple[float, ...]:
    """The value of one member if there is one per member, else the only value."""
    start = min(index, len(copies) - 1)
    return copies[start : start + 1]


def _once_if_equal(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Concatenate the numbers of single members, or keep one if all are equal."""
    return values[0] if len(set(values)) == 1 else tuple(number for numbers in values for number in numbers)
