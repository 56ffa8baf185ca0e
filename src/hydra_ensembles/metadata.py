"""What an ensemble remembers beside its weights: labels, preprocessing, calibration, where it came from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .errors import ConfigError
from .prediction import ScoreName
from .preprocessing import ImagePreprocessing, TextPreprocessing
from .schema import ADDED_LATER
from .text_side import TextSide, join_text_sides


@dataclass(frozen=True)
class Calibration:
    """A temperature (one, or one per member) and a threshold on an uncertainty score.

    Inputs whose score is above `threshold` are to be abstained from; `accepted_share` is the share of the
    in-distribution validation set the threshold was chosen to accept.
    """

    temperature: tuple[float, ...] = (1.0,)
    threshold: float | None = None
    score: ScoreName = "msp"
    accepted_share: float = 0.95

    def __post_init__(self) -> None:
        """Check the temperatures and the share."""
        if not self.temperature or any(not t > 0 for t in self.temperature):
            raise ConfigError(f"temperatures must be positive, got {self.temperature}")
        if not 0.0 < self.accepted_share <= 1.0:
            raise ConfigError(f"accepted_share must be in (0, 1], got {self.accepted_share}")


@dataclass(frozen=True)
class Metadata:
    """Everything about an ensemble that is not needed to compute its logits.

    Attributes:
        source: Library and class the model was converted from.
        labels: Class names in the order of the logits; empty when unknown.
        preprocessing: How raw inputs become tensors; None when unknown.
        calibration: Temperature and abstention threshold; None before calibration.
        history: What was done to the model, one readable line per step, oldest first.
        metrics: Measured numbers worth showing on the model card.
        text_side: Of a zero-shot ensemble, the text towers it can be re-targeted with; None where there are none.
    """

    source: str = ""
    labels: tuple[str, ...] = ()
    preprocessing: ImagePreprocessing | TextPreprocessing | None = None
    calibration: Calibration | None = None
    history: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    text_side: TextSide | None = field(default=None, metadata=ADDED_LATER)


def odd_names(names: Sequence[object]) -> tuple[int | None, list[str]]:
    """What is wrong with class names: where the first one is that is none, and those that occur more than once."""
    blank = next((index for index, name in enumerate(names) if not isinstance(name, str) or not name.strip()), None)
    counts = Counter(name for name in names if isinstance(name, str))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    return blank, repeated


def member_metadata(metadata: Metadata, index: int, members: int) -> Metadata:
    """Metadata of one of so many members on its own.

    Calibration and metrics are those of all members together, so they are dropped where there are several.
    """
    if members > 1:
        metadata = replace(metadata, calibration=None, metrics={})
    return metadata if metadata.text_side is None else replace(metadata, text_side=metadata.text_side.member(index))


def _require_same_labels(members: Sequence[Metadata]) -> None:
    """Classes are averaged by position, so members that know their classes must have the same in each."""
    named = [(index, member.labels) for index, member in enumerate(members) if member.labels]
    for index, labels in named[1:]:
        start, expected = named[0]
        if labels != expected:
            raise ConfigError(
                f"members {start} and {index} have different class names, or in another order: {_shown(expected)} and "
                f"{_shown(labels)}; members must number the classes alike. If only the names differ, give both the "
                "same with .with_metadata(labels=...)"
            )


def _shown(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "") + f" ({len(labels)})"


def common_metadata(members: Sequence[Metadata]) -> Metadata:
    """Metadata of an ensemble put together from members, each with its own: what they agree on.

    Calibrations do not carry over. Text sides are put together.

    Raises:
        ConfigError: Two members have different class names, or the same ones in another order.
    """
    first = members[0]
    _require_same_labels(members)
    same = all(member.labels == first.labels for member in members)
    history = tuple(dict.fromkeys(line for member in members for line in member.history))
    return replace(
        first,
        labels=first.labels if same else (),
        calibration=None,
        history=history,
        metrics={},
        text_side=join_text_sides([member.text_side for member in members]),
    )
