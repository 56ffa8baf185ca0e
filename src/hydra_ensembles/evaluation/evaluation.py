"""The results of an evaluation: every number, saved and loaded as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..arguments import checked
from ..errors import DataError
from ..files import DIGEST, expanded, read_object, require_regular, unsealed, write_sealed
from ..fingerprints import SetTrace
from ..metrics.bootstrap import Interval
from ..metrics.distance import FittedName
from ..metrics.inputs import Convention
from ..model.config import KeptHeads
from ..model.metadata import Calibration
from ..prediction import AnyScore
from ..schema import ADDED_LATER, from_plain, to_plain
from .logits import MemberLogits

OodGroup = Literal["near", "far", "apart", "ungrouped"]
MEANS = {"near": ("near",), "far": ("far",), "all": ("near", "far", "ungrouped")}  # groups that each mean averages
_DIVERSITY = ("mutual_information", "disagreement")
DECLINED = ("abstained", "unsure", "unfamiliar")  # declined shares of an OOD set: by any threshold, and by each
UNNAMED = "model"  # default name of an evaluation


@dataclass(frozen=True)
class Classification:
    """How well a labelled set is classified, and how well its confidence is calibrated.

    Attributes:
        brier: Squared error summed over classes, mean over samples.
        nll: Negative log-likelihood of the mean probabilities.
        ece: Expected calibration error, 15 bins of equal width.
        aece: Calibration error over 15 bins of equal count.
        mutual_information: Mutual information of label and member, in nats, mean over samples.
        disagreement: Share of member pairs that predict different classes, mean over samples.
        aurc: Area under the risk-coverage curve, ordered by the evaluation's score.
        risk_at_coverage: Error that remains when this share of the samples is answered.
        commonest: Share of the most frequent class: the accuracy of always predicting it; None in older files.
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
    commonest: float | None = field(default=None, metadata=ADDED_LATER)

    def numbers(self) -> dict[str, float]:
        """Every metric under a flat name."""
        apart = ("samples", "risk_at_coverage", "commonest")
        metrics = {key: value for key, value in vars(self).items() if key not in apart}
        return metrics | {f"risk@{coverage}": risk for coverage, risk in self.risk_at_coverage.items()}


@dataclass(frozen=True)
class Detection:
    """How well a score separates OOD samples (positive class) from ID samples."""

    auroc: float
    fpr95: float
    aupr: float


@dataclass(frozen=True)
class OodSet:
    """One OOD set.

    Attributes:
        group: `near`, `far`, `apart` (in no mean), or `ungrouped` (in the mean over all sets only).
        detection: Detection results by score.
        abstained: Share of the set that is declined by any calibrated threshold; None without one.
        unsure: Share whose uncertainty score is above its threshold; None without one.
        unfamiliar: Share whose fitted feature score is above its threshold; a sample may be both.
    """

    group: OodGroup
    samples: int
    detection: Mapping[str, Detection]
    mutual_information: float
    disagreement: float
    abstained: float | None = None
    unsure: float | None = field(default=None, metadata=ADDED_LATER)
    unfamiliar: float | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True)
class Selective:
    """What calibrated thresholds do on the in-distribution set: together, and each by itself.

    Attributes:
        score: The score for how unsure an answer is.
        threshold: Threshold of that score; None if only familiarity has one.
        accepted: Share of the samples answered: those that pass every threshold.
        risk: Share of wrong answers among them; None if nothing is answered.
        sure: Share that passes the threshold of `score`; None without one, and in older files.
        familiarity: The fitted score for how unfamiliar an input is; None if it has no threshold.
        familiarity_threshold: Threshold of that score.
        familiar: Share that passes it.
    """

    score: str
    threshold: float | None
    accepted: float
    risk: float | None
    sure: float | None = field(default=None, metadata=ADDED_LATER)
    familiarity: str | None = field(default=None, metadata=ADDED_LATER)
    familiarity_threshold: float | None = field(default=None, metadata=ADDED_LATER)
    familiar: float | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True)
class ModelInfo:
    """Description of the evaluated model, where known; `parameters` to `heads_per_layer` are those of `describe`.

    Attributes:
        kind: `image`, `text`, or `callable` for a model that is not an `Ensemble`.
        class_names: Names in the order of the logits; empty when unknown.
        source: Where the model came from.
        history: What was done to it.
    """

    kind: Literal["image", "text", "callable"]
    members: int
    classes: int
    class_names: tuple[str, ...] = field(default=(), repr=False)
    parameters: int | None = None
    multiply_adds: int | None = None
    tokens: int | None = None
    heads: KeptHeads | None = field(default=None, repr=False)
    heads_per_layer: int | None = None
    source: str = ""
    history: tuple[str, ...] = field(default=(), repr=False)
    calibration: Calibration | None = field(default=None, repr=False)
    pooling_heads: int = field(default=0, metadata=ADDED_LATER)

    @property
    def heads_label(self) -> str | None:
        """Heads kept per layer as the paper writes them: `12`, or `8x3` for three members of eight each."""
        if self.heads is None:
            return None
        blocks = len(self.heads[0]) - bool(self.pooling_heads)
        counts = [len(layer) for member in self.heads for layer in member[:blocks]]
        text = f"{round(sum(counts) / len(counts), 1):g}"
        return text if len(self.heads) == 1 else f"{text}x{len(self.heads)}"


@dataclass(frozen=True)
class Provenance:
    """Library versions, hardware and dtype behind the numbers. No timestamp: the same run gives the same file."""

    versions: Mapping[str, str]
    hardware: str
    dtype: str
    processes: int = 1


Shelf = Literal["sure", "unsure", "wrong"]


@dataclass(frozen=True)
class GalleryItem:
    """One input with the model's answer to it.

    Attributes:
        shelf: Among the most sure, the least sure, or the most sure of the wrong answers.
        index: Its position in the set.
        content: The text, or the image as a `data:` address.
        label: The right class; None for OOD inputs, which have none.
    """

    set: str
    shelf: Shelf
    index: int
    kind: Literal["image", "text"]
    content: str
    score: float
    confidence: float
    predicted: int
    label: int | None


@dataclass(frozen=True)
class Curve:
    """Points of a line, in drawing order."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of confidence: samples, their mean confidence and accuracy (None in an empty bin)."""

    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


@dataclass(frozen=True)
class Figures:
    """Data of the figures of a report.

    Attributes:
        risk_coverage: Error among the most certain share of the in-distribution set.
        score_edges: Common bin edges of the score histograms; scores beyond the ends count in the end bins.
        agreement_id: Share of in-distribution samples on which two members predict the same class, `[M][M]`.
        agreement_ood: The same, unweighted mean over the OOD sets that are in the mean over all; None without any.
    """

    reliability: Reliability
    risk_coverage: Curve
    score_edges: tuple[float, ...]
    id_scores: tuple[int, ...]
    ood_scores: Mapping[str, tuple[int, ...]]
    roc: Mapping[str, Curve]
    agreement_id: tuple[tuple[float, ...], ...]
    agreement_ood: tuple[tuple[float, ...], ...] | None


FORMAT = "hydra_ensembles.evaluation"
VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """Every metric of one model on one suite. Printed as a table of one row; `numbers` has everything.

    Attributes:
        score: The score that detects OOD samples and orders the risk-coverage curve.
        means: Unweighted means of the detection results, `near`, `far` and `all`, for each score.
        shift: Results on labelled sets under distribution shift.
        intervals: Bootstrap intervals, under the names of `numbers`; empty unless asked for.
        gallery: The inputs the model was most and least sure about; empty unless asked for.
        logits: The member logits; None unless asked for. They are saved in a separate file.
        logits_digest: The digest of that file; None if there is none.
        reused: Estimated share of the in-distribution samples that trained the model, or fitted calibration or
            familiarity (the largest of these), from up to 1,024 digests; above 0, numbers are better than on new data.
            None if not known: nothing was trained or fitted with this library, or in a version without digests.
        traces: Digests of every set, by its name in `samples`, from which `compare` recognises other samples; empty in
            older files.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> found = he.evaluate(base, batches, {"noise": [(torch.randn(7, 3, 64, 64),)]}, progress=False)
        >>> found.save("base.json")
        >>> again = he.Evaluation.load("base.json")
        >>> again.numbers() == found.numbers(), again.samples
        (True, {'id': 14, 'ood.noise': 7})
    """

    name: str
    id_name: str
    score: AnyScore
    convention: Convention
    id: Classification
    ood: Mapping[str, OodSet] = field(repr=False)
    means: Mapping[str, Mapping[str, Detection]] = field(repr=False)
    shift: Mapping[str, Classification] = field(repr=False)
    selective: Selective | None
    model: ModelInfo
    provenance: Provenance = field(repr=False)
    figures: Figures = field(repr=False)
    intervals: Mapping[str, Interval] = field(default_factory=dict, repr=False)
    gallery: tuple[GalleryItem, ...] = field(default=(), repr=False)
    logits: MemberLogits | None = field(default=None, compare=False, repr=False)
    logits_digest: str | None = field(default=None, compare=False, repr=False, metadata=ADDED_LATER)
    reused: float | None = field(default=None, repr=False, metadata=ADDED_LATER)
    traces: Mapping[str, SetTrace] = field(default_factory=dict, compare=False, repr=False, metadata=ADDED_LATER)

    def __str__(self) -> str:
        from ..report.compare import compare  # imported here: the report package imports this module
        from ..report.table import to_markdown

        return to_markdown(compare({self.name: self}))

    _repr_markdown_ = __str__  # for notebooks

    @property
    def fitted(self) -> tuple[str, ...]:
        """The reported scores that were fitted to features, such as `mahalanobis`."""
        scores = [score for result in self.ood.values() for score in result.detection if score in get_args(FittedName)]
        return tuple(dict.fromkeys(scores))

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples of every set, by its name in `numbers`."""
        counts = {self.id_name: self.id.samples}
        counts |= {f"ood.{name}": result.samples for name, result in self.ood.items()}
        return counts | {f"shift.{name}": result.samples for name, result in self.shift.items()}

    def numbers(self) -> dict[str, float]:
        """Every number under one flat name: `accuracy`, `near.auroc`, `ood.cifar100.fpr95`, `shift.fog.ece`.

        Detection results of another score than the evaluation's own are prefixed with its name: `energy:near.auroc`.
        Declined shares are `far.abstained`, and by reason `far.unsure` and `far.unfamiliar`. `shift.accuracy` is the
        mean over the shifted sets.
        """
        numbers = self.id.numbers()
        single = {f"ood.{name}": result.detection for name, result in self.ood.items()}
        for name, by_score in {**self.means, **single}.items():
            for score, detection in by_score.items():
                prefix = "" if score == self.score else f"{score}:"
                numbers |= {f"{prefix}{name}.{key}": value for key, value in vars(detection).items()}
        for name, result in self.ood.items():
            shares = {key: getattr(result, key) for key in (*_DIVERSITY, *DECLINED)}
            numbers |= {f"ood.{name}.{key}": share for key, share in shares.items() if share is not None}
        for name, groups in MEANS.items():
            counted = [result for result in self.ood.values() if result.group in groups]
            for key in (*(_DIVERSITY if name == "all" else ()), *DECLINED):
                each = [getattr(result, key) for result in counted]
                if each and None not in each:
                    numbers[f"{name}.{key}"] = sum(each) / len(each)
        for name, shifted in self.shift.items():
            numbers |= {f"shift.{name}.{key}": value for key, value in shifted.numbers().items()}
        if self.shift:
            numbers["shift.accuracy"] = sum(shifted.accuracy for shifted in self.shift.values()) / len(self.shift)
        if self.selective is not None:
            chosen = {key: getattr(self.selective, key) for key in ("accepted", "risk", "sure", "familiar")}
            numbers |= {f"selective.{key}": share for key, share in chosen.items() if share is not None}
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON, without the member logits."""
        plain = to_plain(replace(self, logits=None))
        left_out = ("logits",) if self.traces else ("logits", "traces")  # older files have no traces
        return {"format": FORMAT, "version": VERSION, **{k: v for k, v in plain.items() if k not in left_out}}

    @classmethod
    def from_dict(cls, data: Any, path: str = "evaluation") -> "Evaluation":
        """Build an evaluation from the output of `to_dict`, checked field by field."""
        return from_plain(cls, of_format(data, FORMAT, VERSION, path), path)

    @checked
    def save(self, path: str | Path) -> None:
        """Write a JSON file, and first `<name>.logits.safetensors` next to it if member logits were kept.

        Both store a digest, and the JSON file also stores that of the logits. An evaluation without logits leaves an
        existing logits file in place: it may have been loaded without them.
        """
        file = expanded(path)
        require_regular(file)  # before the logits are written
        digest = self.logits_digest if self.logits is None else self.logits.save(logits_path(file))
        write_sealed(file, replace(self, logits_digest=digest).to_dict())

    @classmethod
    @checked
    def load(cls, path: str | Path, *, with_logits: bool = False) -> "Evaluation":
        """Read a JSON file that `save` wrote; `with_logits` also reads the member logits next to it.

        Raises:
            DataError: The file is missing, was changed, is no evaluation or one of a newer version; the logits are
                missing, were changed, or belong to another evaluation.
            ConfigError: A field has the wrong type or value.
        """
        data = read_saved(path, "a saved evaluation")
        evaluation = cls.from_dict(data, str(path))
        if not with_logits:
            return evaluation
        file = logits_path(expanded(path))
        numbers = (evaluation.model.members * evaluation.model.classes + 1) * sum(evaluation.samples.values())
        logits, digest = MemberLogits.read(file, 8 * numbers + (1 << 20))  # float64, labels, room for names
        if DIGEST in data and digest != evaluation.logits_digest:  # older files store no digest of their logits
            raise DataError(f"the logits in {file} belong to another evaluation; evaluate again with keep_logits=True")
        return replace(evaluation, logits=logits, logits_digest=digest)


def read_saved(path: str | Path, kind: str) -> dict[str, Any]:
    """Read a JSON object and verify its digest if it has one; a `DataError` says what kind of file was expected."""
    try:
        plain = read_object(expanded(path))
        unsealed(plain, "the file", required=False)
    except ValueError as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error
    return plain


def of_format(data: Any, format: str, version: int, path: str | Path) -> dict[str, Any]:
    """Check format and version of a saved object; returns its other fields, without the digest."""
    if not isinstance(data, Mapping) or data.get("format") != format:
        raise DataError(f'{path} was saved as something else: it lacks "format": "{format}"')
    if data.get("version") != version:
        raise DataError(f"{path} has version {data.get('version')!r}, but this library reads {version}; update it")
    return {key: value for key, value in data.items() if key not in ("format", "version", DIGEST)}


def logits_path(path: Path) -> Path:
    """File of the member logits of the evaluation at `path`."""
    return path.with_name(f"{path.stem}.logits.safetensors")
