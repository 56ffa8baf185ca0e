"""What an evaluation found: every number, saved and read as JSON."""

import base64
import io
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .._utils import __version__, require, write_atomically
from ..batches import Inputs
from ..errors import DataError
from ..metrics.bootstrap import Interval
from ..metrics.calibration import reliability_bins
from ..metrics.inputs import Convention
from ..metrics.ood import roc_curve
from ..metrics.selective import risk_coverage
from ..model.config import KeptHeads
from ..model.cost import Description
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..optimize.runner import OptimizedEnsemble
from ..prediction import Prediction, ScoreName
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..schema import from_plain, to_plain

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
        for one in fields(self):
            if one.name not in ("samples", "risk_at_coverage"):
                yield one.name, getattr(self, one.name)
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


POINTS = 160
"""Most points a stored curve has."""

HISTOGRAM_BINS = (12, 40)
"""Fewest and most bins of a score histogram; in between, twice the cube root of the smallest set (Rice's rule)."""


@dataclass(frozen=True)
class Curve:
    """Points of a line, in drawing order."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of confidence.

    Attributes:
        count: Samples in each bin.
        confidence: Mean confidence; None in an empty bin.
        accuracy: Share of correct predictions; None in an empty bin.
    """

    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


@dataclass(frozen=True)
class Figures:
    """What the figures of a report are drawn from.

    Attributes:
        reliability: Of the in-distribution set.
        risk_coverage: Error among the most certain share of the in-distribution set.
        score_edges: Common bin edges of the score histograms; scores beyond the ends count in the end bins.
        id_scores: Histogram of the score on the in-distribution set.
        ood_scores: The same for each OOD set.
        roc: ROC curve of each OOD set.
        agreement_id: Share of in-distribution samples on which two members predict the same class, `[M][M]`.
        agreement_ood: The same, unweighted mean over the OOD sets; None without any.
    """

    reliability: Reliability
    risk_coverage: Curve
    score_edges: tuple[float, ...]
    id_scores: tuple[int, ...]
    ood_scores: Mapping[str, tuple[int, ...]]
    roc: Mapping[str, Curve]
    agreement_id: tuple[tuple[float, ...], ...]
    agreement_ood: tuple[tuple[float, ...], ...] | None


def make_figures(
    prediction: Prediction, labels: Tensor, id_scores: Tensor, ood: Mapping[str, tuple[Prediction, Tensor]]
) -> Figures:
    """Work out every curve.

    Args:
        prediction: For the in-distribution set.
        labels: `[B]`.
        id_scores: `[B]`, higher = more uncertain.
        ood: Prediction and scores of each OOD set.
    """
    wrong = prediction.label != labels
    curve = risk_coverage(id_scores, wrong)
    edges = _edges([id_scores, *(scores for _, scores in ood.values())])
    tables = [_agreement(other) for other, _ in ood.values()]
    return Figures(
        reliability=_reliability(prediction, labels),
        risk_coverage=_thin(curve.coverage, curve.risk),
        score_edges=_rounded(edges),
        id_scores=_histogram(id_scores, edges),
        ood_scores={name: _histogram(scores, edges) for name, (_, scores) in ood.items()},
        roc={name: _roc(id_scores, scores, name) for name, (_, scores) in ood.items()},
        agreement_id=_table(_agreement(prediction)),
        agreement_ood=_table(torch.stack(tables).mean(dim=0)) if tables else None,
    )


def _reliability(prediction: Prediction, labels: Tensor) -> Reliability:
    bins = reliability_bins(prediction.probs, labels)
    filled = (bins.count > 0).tolist()

    def shown(values: Tensor) -> tuple[float | None, ...]:
        return tuple(_round(value) if full else None for value, full in zip(values.tolist(), filled, strict=True))

    return Reliability(tuple(bins.count.tolist()), shown(bins.confidence), shown(bins.accuracy))


def _roc(id_scores: Tensor, ood_scores: Tensor, name: str) -> Curve:
    curve = roc_curve(id_scores, ood_scores, name=name)
    return _thin(curve.fpr, curve.tpr)


def _agreement(prediction: Prediction) -> Tensor:
    votes = prediction.member_probs.argmax(dim=-1)  # [M, B]
    return torch.stack([(votes == vote).double().mean(dim=1) for vote in votes])  # [M, M]


def _edges(scores: list[Tensor]) -> Tensor:
    """Common edges that span all but a thousandth of the samples of each set at either end."""
    ends = [np.quantile(scores_of_set.double().numpy(), (0.001, 0.999)) for scores_of_set in scores]
    low, high = min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)
    if not low < high:
        low, high = low - 0.5, high + 0.5
    fewest, most = HISTOGRAM_BINS
    bins = round(2 * min(len(scores_of_set) for scores_of_set in scores) ** (1 / 3))
    return torch.linspace(low, high, max(fewest, min(bins, most)) + 1, dtype=torch.float64)


def _histogram(scores: Tensor, edges: Tensor) -> tuple[int, ...]:
    bins = torch.bucketize(scores.double(), edges, right=True) - 1
    return tuple(torch.bincount(bins.clamp(0, len(edges) - 2), minlength=len(edges) - 1).tolist())


def _thin(x: Tensor, y: Tensor) -> Curve:
    """At most `POINTS` of the points, evenly spaced along the curve, the first and last always among them."""
    if len(x) > POINTS:
        length = torch.cat([torch.zeros(1).double(), (x.diff().abs() + y.diff().abs()).cumsum(dim=0)])
        wanted = torch.linspace(0, float(length[-1]), POINTS, dtype=torch.float64)
        chosen = torch.searchsorted(length, wanted).clamp(max=len(x) - 1)
        chosen[-1] = len(x) - 1
        chosen = torch.unique(chosen)
        x, y = x[chosen], y[chosen]
    return Curve(_rounded(x), _rounded(y))


def _table(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(_rounded(row) for row in values)


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(_round(value) for value in values.tolist())


def _round(value: float) -> float:
    return float(f"{value:.5g}")


_LIBRARIES = ("torch", "numpy", "scikit-learn")


def describe_model(model: object, members: int, classes: int, calibration: Calibration | None) -> ModelInfo:
    """What is known of a model: everything of an ensemble, counts and parameters of others."""
    describe = getattr(model, "describe", None)
    description = describe() if callable(describe) else None
    if isinstance(model, OptimizedEnsemble):
        description = model.description
    info = ModelInfo("callable", members, classes, calibration=calibration)
    if isinstance(description, Description):
        info = replace(
            info,
            parameters=description.parameters,
            multiply_adds=description.multiply_adds,
            tokens=description.tokens,
            heads=description.heads,
            heads_per_layer=description.heads_per_layer,
        )
    if isinstance(model, Ensemble | OptimizedEnsemble):
        remembered = model.metadata
        return replace(
            info,
            kind="text" if model.kind == "text" else "image",
            class_names=remembered.labels,
            source=remembered.source,
            history=remembered.history,
        )
    if isinstance(model, nn.Module):
        counted = sum(parameter.numel() for parameter in model.parameters())
        return replace(info, parameters=info.parameters or counted, source=type(model).__qualname__)
    return replace(info, source=str(getattr(model, "__name__", type(model).__qualname__)))


def provenance_of(device: torch.device | None, dtype: str, processes: int = 1) -> Provenance:
    """The libraries and the device of this run."""
    versions = {"hydra_ensembles": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return Provenance(versions, hardware(device), dtype, processes)


def hardware(device: torch.device | None) -> str:
    """A device in words."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device is not None and device.type != "cpu":
        return f"{device.type} ({platform.machine()})"
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"


@dataclass(frozen=True, eq=False)
class LabelledLogits:
    """Member logits `[M, B, C]` of a set with labels `[B]`."""

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class MemberLogits:
    """The member logits of every set of one evaluation, before any temperature.

    Attributes:
        id: In-distribution set.
        ood: OOD sets by group and name, each `[M, B, C]`.
        shift: Labelled sets under distribution shift, by name.
    """

    id: LabelledLogits
    ood: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shift: Mapping[str, LabelledLogits] = field(default_factory=dict)

    def save(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write one safetensors file.

        Args:
            path: Where to.
            dtype: How logits are stored. Half precision moves a metric in about its fourth digit; logits too
                large for it are stored as they are.
        """
        tensors = {"id/logits": _stored(self.id.logits, dtype), "id/labels": self.id.labels}
        for group, sets in self.ood.items():
            tensors |= {f"ood/{group}/{name}": _stored(logits, dtype) for name, logits in sets.items()}
        for name, labelled in self.shift.items():
            tensors[f"shift/logits/{name}"] = _stored(labelled.logits, dtype)
            tensors[f"shift/labels/{name}"] = labelled.labels
        # the format takes contiguous tensors only, and no two that share memory
        stored = {key: value.cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
        order = json.dumps(list(stored))  # the format itself keeps no order, and tables should
        write_atomically(Path(path), to_bytes(stored, metadata={"order": order}))

    @classmethod
    def load(cls, path: str | Path) -> "MemberLogits":
        """Read what `save` wrote: half precision comes back as float32, float64 as it is.

        Raises:
            DataError: The file is missing, damaged, or holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                order = json.loads((file.metadata() or {}).get("order", "[]"))
                keys = sorted(file.keys(), key=lambda key: order.index(key) if key in order else len(order))
                tensors = {key: file.get_tensor(key) for key in keys}
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read as stored member logits: {error}") from error
        ood: dict[str, dict[str, Tensor]] = {}
        shift: dict[str, LabelledLogits] = {}
        try:
            for key, tensor in tensors.items():
                part, _, rest = key.partition("/")
                group, _, name = rest.partition("/")
                if part == "ood":
                    ood.setdefault(group, {})[name] = _loaded(tensor)
                elif part == "shift" and group == "logits":
                    shift[name] = LabelledLogits(_loaded(tensor), tensors[f"shift/labels/{name}"])
            return cls(LabelledLogits(_loaded(tensors["id/logits"]), tensors["id/labels"]), ood, shift)
        except KeyError as error:
            raise DataError(f"{path} holds no member logits: {error} is missing; found {sorted(tensors)}") from error


def _stored(logits: Tensor, dtype: torch.dtype) -> Tensor:
    converted = logits.to(dtype)
    return converted if bool(torch.isfinite(converted).all()) else logits


def _loaded(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


Shelf = Literal["sure", "unsure", "wrong"]
Preprocessing = ImagePreprocessing | TextPreprocessing

THUMBNAIL = 96
"""Longest side of an embedded image, in pixels."""

TEXT_LENGTH = 280
"""Most characters of an embedded text."""


@dataclass(frozen=True)
class GalleryItem:
    """One input with what the model said about it.

    Attributes:
        set: Name of the set it is from.
        shelf: Among the most sure, the least sure, or the most sure of the wrong answers.
        index: Its position in the set.
        kind: Whether `content` is the address (`data:` URI) of an image, or a text.
        content: The input itself.
        score: The model's uncertainty.
        confidence: Probability of the predicted class.
        predicted: The predicted class.
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


@dataclass(frozen=True, eq=False)
class Candidate:
    """An input that may end up in the gallery."""

    score: float
    index: int
    confidence: float
    predicted: int
    label: int | None
    row: Inputs


class Extremes:
    """Keeps the most and least certain inputs of a set, batch by batch; ties go to the earlier input."""

    def __init__(self, keep: int) -> None:
        """Keep this many inputs on each shelf."""
        self.keep = keep
        self.shelves: dict[Shelf, list[Candidate]] = {"sure": [], "unsure": [], "wrong": []}

    def update(
        self, first: int, inputs: Inputs, scores: Tensor, confidence: Tensor, predicted: Tensor, labels: Tensor | None
    ) -> None:
        """Look at one batch, whose first sample has position `first` in the set."""
        if not self.keep:
            return
        order = scores.sort(stable=True).indices.tolist()
        wrong = [] if labels is None else [row for row in order if int(predicted[row]) != int(labels[row])]

        def candidate(row: int) -> Candidate:
            label = None if labels is None else int(labels[row])
            return Candidate(
                float(scores[row]),
                first + row,
                float(confidence[row]),
                int(predicted[row]),
                label,
                _row(inputs, row),
            )

        self._add("sure", [candidate(row) for row in order[: self.keep]])
        self._add("wrong", [candidate(row) for row in wrong[: self.keep]])
        unsure = scores.sort(stable=True, descending=True).indices.tolist()
        self._add("unsure", [candidate(row) for row in unsure[: self.keep]])

    def merge(self, others: "Extremes") -> None:
        """Take in what another process found."""
        for shelf, candidates in others.shelves.items():
            self._add(shelf, candidates)

    def _add(self, shelf: Shelf, found: list[Candidate]) -> None:
        sign = -1 if shelf == "unsure" else 1
        both = sorted([*self.shelves[shelf], *found], key=lambda one: (sign * one.score, one.index))
        self.shelves[shelf] = both[: self.keep]

    def items(self, name: str, preprocessing: Preprocessing | None) -> list[GalleryItem]:
        """The kept inputs as gallery items of the set called `name`."""
        show = _drawing(preprocessing)
        items = []
        for shelf, candidates in self.shelves.items():
            for one in candidates:
                kind, content = show(one.row)
                items.append(
                    GalleryItem(
                        name, shelf, one.index, kind, content, one.score, one.confidence, one.predicted, one.label
                    )
                )
        return items


def _row(inputs: Inputs, row: int) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[row].detach().cpu().clone()
    return {name: tensor[row].detach().cpu().clone() for name, tensor in inputs.items()}


def _drawing(preprocessing: Preprocessing | None) -> Callable[[Inputs], tuple[Literal["image", "text"], str]]:
    def show(row: Inputs) -> tuple[Literal["image", "text"], str]:
        tensor = row if isinstance(row, Tensor) else row.get("pixel_values", row.get("input_ids"))
        if tensor is None:
            return "text", f"inputs: {', '.join(sorted(row))}"
        if tensor.ndim == 3:
            return "image", image_uri(tensor, preprocessing if isinstance(preprocessing, ImagePreprocessing) else None)
        text = preprocessing if isinstance(preprocessing, TextPreprocessing) else None
        mask = None if isinstance(row, Tensor) else row.get("attention_mask")
        return "text", token_text(tensor if mask is None else tensor[mask.bool()], text)

    return show


def image_uri(pixels: Tensor, preprocessing: ImagePreprocessing | None = None) -> str:
    """A small image as a `data:` address.

    Args:
        pixels: `[channels, H, W]` as the model saw it; the first three channels are shown.
        preprocessing: Its normalisation is undone; without one the values are stretched to the full range.
    """
    image_module = require("PIL.Image", extra="data")
    pixels = pixels.float()[: 3 if len(pixels) >= 3 else 1]
    if preprocessing is not None:
        shape = (-1, 1, 1)
        pixels = pixels * torch.tensor(preprocessing.std).view(shape) + torch.tensor(preprocessing.mean).view(shape)
    else:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = (pixels - low) / ((high - low) or 1.0)
    levels = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()  # [H, W, channels]
    image = image_module.fromarray(levels.squeeze(-1) if levels.shape[-1] == 1 else levels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def token_text(ids: Tensor, preprocessing: TextPreprocessing | None = None) -> str:
    """Token ids as text, or as numbers where no tokenizer is known."""
    if preprocessing is None or not preprocessing.tokenizer:
        text = "token ids " + " ".join(str(token) for token in ids.tolist())
    else:
        tokenizer = require("tokenizers", extra="text").Tokenizer.from_str(preprocessing.tokenizer)
        text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"


FORMAT = "hydra_ensembles.evaluation"
VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """Every metric of one model on one suite.

    Attributes:
        name: What tables call the model.
        id_name: Name of the in-distribution set.
        score: The score that detects OOD samples and orders the risk-coverage curve.
        convention: How AUPR and FPR95 are defined.
        id: Results on the in-distribution set.
        ood: Results on each OOD set.
        means: Unweighted means of the detection results: `near`, `far`, `all`, as far as there are such sets;
            for each score.
        shift: Results on labelled sets under distribution shift.
        selective: What the calibrated threshold does; None without one.
        model: What was evaluated.
        provenance: Where.
        figures: Curves for the report.
        intervals: Bootstrap intervals, under the names of `numbers`; empty unless asked for.
        gallery: The inputs the model was most and least sure about; empty unless asked for.
        logits: The member logits; None unless asked for. They are saved as a file of their own.
    """

    name: str
    id_name: str
    score: ScoreName
    convention: Convention
    id: Classification
    ood: Mapping[str, OodSet]
    means: Mapping[str, Mapping[str, Detection]]
    shift: Mapping[str, Classification]
    selective: Selective | None
    model: ModelInfo
    provenance: Provenance
    figures: Figures
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    gallery: tuple[GalleryItem, ...] = ()
    logits: MemberLogits | None = field(default=None, compare=False, repr=False)

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples of every set, by its name in `numbers`."""
        counts = {self.id_name: self.id.samples}
        counts |= {f"ood.{name}": result.samples for name, result in self.ood.items()}
        return counts | {f"shift.{name}": result.samples for name, result in self.shift.items()}

    def numbers(self) -> dict[str, float]:
        """Every number under one flat name: `accuracy`, `near.auroc`, `ood.cifar100.fpr95`, `shift.fog.ece`.

        Detection results of a score other than the evaluation's own have its name in front: `energy:near.auroc`.
        """
        found = dict(self.id.numbers())
        for group, by_score in self.means.items():
            for score, detection in by_score.items():
                found |= {f"{self._prefix(score)}{group}.{key}": value for key, value in asdict(detection).items()}
        for name, result in self.ood.items():
            for score, detection in result.detection.items():
                found |= {f"{self._prefix(score)}ood.{name}.{key}": value for key, value in asdict(detection).items()}
            found[f"ood.{name}.mutual_information"] = result.mutual_information
            found[f"ood.{name}.disagreement"] = result.disagreement
            if result.abstained is not None:
                found[f"ood.{name}.abstained"] = result.abstained
        counted = [result for result in self.ood.values() if result.group != "apart"]
        for key in ("mutual_information", "disagreement"):
            if counted:
                found[f"all.{key}"] = sum(getattr(result, key) for result in counted) / len(counted)
        for name, shifted in self.shift.items():
            found |= {f"shift.{name}.{key}": value for key, value in shifted.numbers()}
        if self.selective is not None:
            found["selective.accepted"] = self.selective.accepted
            if self.selective.risk is not None:
                found["selective.risk"] = self.selective.risk
        return found

    def _prefix(self, score: str) -> str:
        return "" if score == self.score else f"{score}:"

    def renamed(self, name: str) -> "Evaluation":
        """The same evaluation under another name."""
        return replace(self, name=name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the member logits."""
        parts = {item.name: to_plain(getattr(self, item.name)) for item in fields(self) if item.name != "logits"}
        return {"format": FORMAT, "version": VERSION, **parts}

    @classmethod
    def from_dict(cls, data: Any, path: str = "evaluation") -> "Evaluation":
        """Build an evaluation from what `to_dict` gave, checked field by field.

        Raises:
            DataError: It is not an evaluation, or one of a newer version.
            ConfigError: A field does not hold what it should.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise DataError(f'{path} is not a saved evaluation: it lacks "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise DataError(
                f"{path} has version {data.get('version')!r} and this library reads {VERSION}; "
                "evaluate again, or install the version that wrote it"
            )
        parts = {key: value for key, value in data.items() if key not in ("format", "version")}
        return from_plain(cls, parts, path)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, and beside it `<name>.logits.safetensors` where member logits were kept.

        The JSON file is written last, so that it never lies there without its logits. An evaluation without logits
        leaves alone those beside the file: it may have been read without them.
        """
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
        if self.logits is not None:
            self.logits.save(logits_path(path))
        write_atomically(path, text.encode())

    @classmethod
    def load(cls, path: str | Path, *, with_logits: bool = False) -> "Evaluation":
        """Read a JSON file that `save` wrote.

        Args:
            path: The JSON file.
            with_logits: Also read the member logits beside it.

        Raises:
            DataError: The file is missing or not an evaluation.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a saved evaluation: {error}") from error
        evaluation = cls.from_dict(data, str(path))
        return replace(evaluation, logits=MemberLogits.load(logits_path(path))) if with_logits else evaluation


def logits_path(path: Path) -> Path:
    """Where the member logits of the evaluation at `path` lie."""
    return path.with_name(f"{path.stem}.logits.safetensors")
