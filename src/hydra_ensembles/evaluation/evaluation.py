"""What an evaluation found: every number, saved and read as JSON."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .._utils import __version__, write_atomically
from ..errors import DataError
from ..metrics.bootstrap import Interval
from ..metrics.inputs import Convention, at_least_float32
from ..model.config import KeptHeads
from ..model.cost import Description
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..optimize.runner import OptimizedEnsemble
from ..prediction import ScoreName
from ..schema import from_plain, to_plain
from .curves import Figures

OodGroup = Literal["near", "far", "apart", "ungrouped"]


@dataclass(frozen=True)
class Classification:
    """How well a labelled set is classified, and how far the stated confidence can be trusted.

    Attributes:
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

    def numbers(self) -> dict[str, float]:
        """Every metric under a flat name, the counts left out."""
        metrics = {key: value for key, value in vars(self).items() if key not in ("samples", "risk_at_coverage")}
        return metrics | {f"risk@{coverage}": risk for coverage, risk in self.risk_at_coverage.items()}


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


Shelf = Literal["sure", "unsure", "wrong"]


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
                group, _, name = rest.partition("/")  # a name may hold slashes
                if part == "ood":
                    ood.setdefault(group, {})[name] = at_least_float32(tensor)
                elif part == "shift" and group == "logits":
                    shift[name] = LabelledLogits(at_least_float32(tensor), tensors[f"shift/labels/{name}"])
            own = LabelledLogits(at_least_float32(tensors["id/logits"]), tensors["id/labels"])
            return cls(own, ood, shift)
        except KeyError as error:
            raise DataError(f"{path} holds no member logits: {error} is missing; found {sorted(tensors)}") from error


def _stored(logits: Tensor, dtype: torch.dtype) -> Tensor:
    converted = logits.to(dtype)
    return converted if bool(torch.isfinite(converted).all()) else logits


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
        found = self.id.numbers()
        single = {f"ood.{name}": result.detection for name, result in self.ood.items()}
        for place, by_score in {**self.means, **single}.items():
            for score, detection in by_score.items():
                prefix = "" if score == self.score else f"{score}:"
                found |= {f"{prefix}{place}.{key}": value for key, value in vars(detection).items()}
        for name, result in self.ood.items():
            found[f"ood.{name}.mutual_information"] = result.mutual_information
            found[f"ood.{name}.disagreement"] = result.disagreement
            if result.abstained is not None:
                found[f"ood.{name}.abstained"] = result.abstained
        counted = [result for result in self.ood.values() if result.group != "apart"]
        if counted:
            for key in ("mutual_information", "disagreement"):
                found[f"all.{key}"] = sum(getattr(result, key) for result in counted) / len(counted)
        for name, shifted in self.shift.items():
            found |= {f"shift.{name}.{key}": value for key, value in shifted.numbers().items()}
        if self.selective is not None:
            found["selective.accepted"] = self.selective.accepted
            if self.selective.risk is not None:
                found["selective.risk"] = self.selective.risk
        return found

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
        """Read a JSON file that `save` wrote; `with_logits` reads the member logits beside it, too.

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


def describe_model(model: object, members: int, classes: int, calibration: Calibration | None) -> ModelInfo:
    """What is known of a model: everything of an ensemble, counts and parameters of others."""
    describe = getattr(model, "describe", None)
    described = (
        model.description if isinstance(model, OptimizedEnsemble) else describe() if callable(describe) else None
    )
    counts = vars(described) if isinstance(described, Description) else {}
    info = ModelInfo("callable", members, classes, calibration=calibration, **counts)
    if isinstance(model, Ensemble | OptimizedEnsemble):
        kind: Literal["image", "text"] = "text" if model.kind == "text" else "image"
        known = model.metadata
        return replace(info, kind=kind, class_names=known.labels, source=known.source, history=known.history)
    if isinstance(model, nn.Module):
        counted = sum(parameter.numel() for parameter in model.parameters())
        return replace(info, parameters=info.parameters or counted, source=type(model).__qualname__)
    return replace(info, source=str(getattr(model, "__name__", type(model).__qualname__)))


def provenance_of(device: torch.device | None, dtype: torch.dtype, processes: int = 1) -> Provenance:
    """The libraries and the device of this run."""
    libraries = {"torch": str(torch.__version__), "numpy": np.__version__}
    versions = {"hydra_ensembles": __version__, "python": platform.python_version(), **libraries}
    hardware = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    if device is not None and device.type != "cpu":
        gpu = device.type == "cuda"
        hardware = torch.cuda.get_device_name(device) if gpu else f"{device.type} ({platform.machine()})"
    return Provenance(versions, hardware, str(dtype).removeprefix("torch."), processes)
