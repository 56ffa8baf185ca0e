"""What an evaluation found, as frozen dataclasses of plain numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from ..model.config import KeptHeads
from ..model.metadata import Calibration

OodGroup = Literal["near", "far", "apart", "ungrouped"]

COVERAGES = (0.8, 0.9, 0.95)
"""Shares of the inputs answered at which the remaining risk is reported."""


@dataclass(frozen=True)
class Classification:
    """How well a labelled set is classified, and how far the stated confidence can be trusted.

    Attributes:
        samples: Size of the set.
        accuracy: Share of samples whose most probable class is the label.
        brier: Squared error summed over classes, mean over samples.
        nll: Negative log-likelihood of the mean probabilities.
        ece: Expected calibration error, 15 bins of equal width.
        aece: Calibration error over 15 bins of equal count.
        mutual_information: Mean mutual information of label and member, in nats.
        disagreement: Mean share of member pairs that predict different classes.
        aurc: Area under the risk-coverage curve, ordered by the evaluation's score.
        risk_at_coverage: Error that remains when this share of the samples is answered.
    """

    samples: int
    accuracy: float
    brier: float
    nll: float
    ece: float
    aece: float
    mutual_information: float
    disagreement: float
    aurc: float
    risk_at_coverage: Mapping[str, float]

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Every metric under a flat name, the counts left out."""
        for field in fields(self):
            if field.name not in ("samples", "risk_at_coverage"):
                yield field.name, getattr(self, field.name)
        for coverage, risk in self.risk_at_coverage.items():
            yield f"risk@{coverage}", risk


@dataclass(frozen=True)
class Detection:
    """How well a score tells OOD samples (positive class) from ID samples."""

    auroc: float
    fpr95: float
    aupr: float


@dataclass(frozen=True)
class OodSet:
    """One OOD set.

    Attributes:
        group: `near`, `far`, `apart` (in no mean), or `ungrouped` (in the mean over all sets only).
        samples: Size of the set.
        detection: Result of each score.
        mutual_information: Mean over the set, in nats.
        disagreement: Mean over the set.
        abstained: Share of the set that the calibrated threshold refuses; None without a threshold.
    """

    group: OodGroup
    samples: int
    detection: Mapping[str, Detection]
    mutual_information: float
    disagreement: float
    abstained: float | None = None


@dataclass(frozen=True)
class Selective:
    """What the calibrated threshold does on the in-distribution set.

    Attributes:
        score: The score the threshold is for.
        threshold: Largest score that is still answered.
        accepted: Share of the samples answered.
        risk: Share of wrong answers among them; None where nothing is answered.
    """

    score: str
    threshold: float
    accepted: float
    risk: float | None


@dataclass(frozen=True)
class ModelInfo:
    """What was evaluated, as far as it says so itself.

    Attributes:
        kind: `image`, `text`, or `callable` for a model that is not an `Ensemble`.
        members: Number of members.
        classes: Number of classes.
        class_names: Names in the order of the logits; empty when unknown.
        parameters: Stored parameters.
        multiply_adds: Multiply-adds of one input with `tokens` tokens.
        tokens: Sequence length the multiply-adds refer to.
        heads: Heads kept, `[member][layer]`.
        heads_per_layer: Heads per layer before pruning.
        source: Where the model came from.
        history: What was done to it.
        calibration: Temperature and threshold that were applied.
    """

    kind: Literal["image", "text", "callable"]
    members: int
    classes: int
    class_names: tuple[str, ...] = ()
    parameters: int | None = None
    multiply_adds: int | None = None
    tokens: int | None = None
    heads: KeptHeads | None = None
    heads_per_layer: int | None = None
    source: str = ""
    history: tuple[str, ...] = ()
    calibration: Calibration | None = None

    @property
    def heads_label(self) -> str | None:
        """Heads kept per layer as the paper writes them: `12`, or `8x3` for three members of eight each."""
        if self.heads is None:
            return None
        kept = [len(layer) for member in self.heads for layer in member]
        mean = round(sum(kept) / len(kept), 1)
        text = str(int(mean)) if mean == int(mean) else str(mean)
        return text if len(self.heads) == 1 else f"{text}x{len(self.heads)}"


@dataclass(frozen=True)
class Provenance:
    """Where the numbers were made. No clock and no seed: the same run gives the same file.

    Attributes:
        versions: Version of each library that computed something.
        hardware: The device the model ran on.
        dtype: Number format of the model's answers.
        processes: How many processes shared the work.
    """

    versions: Mapping[str, str]
    hardware: str
    dtype: str
    processes: int = 1
