"""Evaluate a model: one pass over each set. What it answers can be kept, so that an interrupted evaluation resumes."""

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._utils import __version__, unwrapped, warn
from ..batches import Batches, Inputs, iterate, length_of, move, renumbered, require_labels, size_of
from ..calibrate import REUSED
from ..data.dataset import Dataset
from ..digest import digest, require_other_samples
from ..errors import DataError
from ..familiarity import recognised, sample_digests
from ..metrics.probabilities import Convention, at_least_float32
from ..model.dual_encoder import require_classifier, require_model
from ..model.ensemble import Answering, Ensemble, warn_if_edited
from ..model.inputs import model_call
from ..model.layers import evaluating
from ..model.metadata import Calibration, Metadata
from ..prediction import AnyScore, ScoreName
from ..store import TENSORS, Store
from .evaluation import UNNAMED, Answers, Evaluation, ModelInfo, OodGroup, columns_of


def evaluate(
    ensemble: Answering | Callable[[Any], Any],
    id_data: Batches,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, Batches] | None = None,
    *,
    name: str | None = None,
    id_name: str | None = None,
    score: AnyScore = "msp",
    scores: Sequence[AnyScore] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure a model: accuracy, calibration, diversity, OOD detection, selective risk. One pass over each set.

    Args:
        ensemble: An `Ensemble` or a cascade, as it is or prepared by `optimize`; or anything that is called with the
            inputs of a batch and returns member logits `[M, B, C]` (`[B, C]` counts as one member; of an object,
            `.logits` is used; a mapping is passed as keywords if its `forward` accepts them). A module of another
            library is put in evaluation mode meanwhile.
        id_data: Batches of a labelled in-distribution set.
        ood: OOD sets, `{"near": {name: batches}, "far": {...}}`, or flat, `{name: batches}`, for the mean over all sets
            only. The group `"apart"` is in no mean. Labels of OOD sets are not read.
        shift: `{name: batches}` of labelled sets under distribution shift, such as corruptions.
        name: What tables call the model.
        id_name: Name of the in-distribution set; that of the data set in a loader, if not given.
        score: Score that detects OOD samples, of the mean over members.
        scores: Further scores to report; fitted ones (`fit_familiarity`) are always reported.
        convention: How AUPR and FPR95 are defined; see `hydra_ensembles.metrics.ood`.
        calibration: Temperature and threshold to apply; an ensemble has its own.
        output: Folder that keeps the answers of a model of ours to every batch, whatever the settings: called again, an
            interrupted evaluation resumes, and one with other scores or another calibration is only computed.
        progress: Whether to show progress bars.

    Examples:
        >>> noise = [(torch.rand(7, 3, 64, 64),)]
        >>> found = he.evaluate(base, batches, {"far": {"noise": noise}}, name="Single", progress=False)
        >>> numbers = found.numbers()
        >>> 0 <= numbers["accuracy"] <= 1, 0 <= numbers["ood.noise.auroc"] <= 1
        (True, True)
    """
    if not callable(ensemble):
        require_model(ensemble, "evaluate", Ensemble)  # raises
    inner = unwrapped(ensemble) if isinstance(ensemble, nn.Module) else ensemble
    model: Any = inner if isinstance(inner, Answering) else ensemble  # what lies around an ensemble changes no answer
    if calibration is None and isinstance(model, Answering) and isinstance(model, nn.Module):
        warn_if_edited(model)
    stored = getattr(model, "metadata", None)
    metadata = stored if isinstance(stored, Metadata) else Metadata()
    calibration = calibration or metadata.calibration
    classes = model.num_classes if isinstance(model, Answering) else None  # of others unknown
    if classes is not None:
        require_classifier(model, "evaluate")
    familiarity = None if classes is None else metadata.familiarity
    fitted: tuple[AnyScore, ...] = () if familiarity is None else familiarity.settings.scores
    reported = tuple(dict.fromkeys((score, *scores, *fitted)))
    source = getattr(id_data, "dataset", id_data)  # of a loader
    id_name = id_name or (source.name if isinstance(source, Dataset) else "id")
    groups = read_groups(ood)
    labelled = {f"set {id_name!r}": id_data, **{f"shifted set {key!r}": data for key, data in (shift or {}).items()}}
    id_data, *shifted = renumbered(labelled, metadata.labels, classes).values()
    sets: list[tuple[str, Any, Any]] = [(id_name, "id", id_data)]  # name, group, data
    sets += [(f"ood.{key}", group, data) for group, members in groups.items() for key, data in members.items()]
    sets += [(f"shift.{key}", "shift", data) for key, data in zip(shift or {}, shifted, strict=True)]
    rule = calibration or Calibration()
    if rule.threshold is None and score in get_args(ScoreName):
        rule = replace(rule, score=cast(ScoreName, score), reference=None)
    answers, rows, logits = dict[str, Answers](), dict[str, Tensor](), torch.empty(0)
    with Store(output, _identity(model, output), "an evaluation") as kept, torch.no_grad(), evaluating(model):
        for key, group, data in sets:
            columns, digests = dict[str, list[Tensor]](), list[Tensor]()
            for found, labels, samples in _over(model, data, key, group in ("id", "shift"), kept, progress):
                far = familiarity.about(found["scores"]) if familiarity and "scores" in found else None
                raw = at_least_float32(found["logits"])  # [M, B, C]
                prediction = rule.prediction(raw, check_finite=False, unfamiliarity=far)
                more: dict[str, Any] = {one: found[one] for one in ("stage", "forced") if one in found}
                for title, column in columns_of(replace(prediction, **more), reported, labels).items():
                    columns.setdefault(title, []).append(column)
                digests.append(samples)
                logits = found["logits"][:, :1].clone()  # of one sample
            rows[key] = torch.cat(digests)
            joined = {title: torch.cat(parts, dim=-1) for title, parts in columns.items()}
            answers[key] = Answers(group, digest(rows[key].sort().values), joined)
    _require_fresh(id_name, rows, rule)
    brief = calibration and replace(calibration, reference=None, watched={}, weights="", rows=())
    about = _described(model, logits, brief)
    return Evaluation(name or UNNAMED, id_name, score, convention, answers, about, _provenance(model, logits.dtype))


def _identity(model: Any, output: object) -> dict[str, Any]:
    """What answers depend on, besides the inputs, for a folder that keeps them."""
    if output is None:
        return {}
    fitted = model.metadata.familiarity
    statistics = None if fitted is None else [fitted.settings.scores, fitted.state]
    kind = model.device.type
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    return {"model": digest([model.config, model, statistics]), "autocast": autocast}


def read_groups(ood: Mapping[str, Any] | None) -> dict[OodGroup, dict[str, Any]]:
    """OOD sets by group and name, from a nested or a flat mapping; `{}` for None."""
    ood = ood or {}
    if not any(isinstance(value, Mapping) for value in ood.values()):
        ood = {"ungrouped": ood}
    elif not all(isinstance(value, Mapping) for value in ood.values()) or not set(ood) <= set(get_args(OodGroup)):
        accepted = list(get_args(OodGroup))
        raise DataError(f"ood has the keys {list(ood)}; give groups of sets, among {accepted}, or {{name: data}}")
    named = [(name, data) for group in ood.values() for name, data in group.items()]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise DataError(f"OOD sets {twice} occur in more than one group; give each set one name in one group")
    return {cast(OodGroup, group): dict(sets) for group, sets in ood.items() if sets}


def _over(
    model: Any, batches: Batches, key: str, labelled: bool, kept: Store, progress: bool
) -> Iterator[tuple[dict[str, Tensor], Tensor | None, Tensor]]:
    """Of every batch of a set what `answered` returns, or returned before an interruption, labels and digests `[B]`."""
    title = f"set {key.removeprefix('ood.').removeprefix('shift.')!r}"
    source = iterate(batches, title, labelled, getattr(model, "raw", False))
    with tqdm(desc=key, total=length_of(batches), leave=False, disable=not progress, unit="batch") as bar:
        for index, inputs, given in source:
            contents = "" if kept.folder is None else digest(inputs)
            answer = partial(answered, model, inputs, f"{title}, batch {index}")
            found = kept.step(f"answers/{contents[:32]}", answer, TENSORS)
            labels = require_labels(given, found["logits"].shape[2], title, index).cpu() if labelled else None
            yield found, labels, sample_digests(inputs)
            bar.update()


def answered(model: Any, inputs: Inputs, where: str) -> dict[str, Tensor]:
    """Member logits `[M, B, C]` in the model's dtype, feature scores `[S, M, B]`, rows `[B]` of a batch, on the CPU."""
    more: dict[str, Tensor] = {}
    if not hasattr(model, "prepare"):  # not ours
        one = next((one for one in _parameters(model) if one.is_floating_point()), None)
        answer = model_call(model, inputs if one is None else move(inputs, one.device, one.dtype))()
    else:
        try:
            prepared = model.prepare(inputs)
        except DataError as problem:
            raise DataError(f"{where}: {problem}") from problem
        if isinstance(model, Answering):
            answer, scores, more = model.answered(prepared)
            more = more if scores is None else {**more, "scores": scores}
        else:  # a view, such as MC Dropout
            answer = model(prepared)
    logits = getattr(answer, "logits", answer)
    shape = list(logits.shape) if isinstance(logits, Tensor) else []
    is_fit = len(shape) in (2, 3) and 0 not in shape and shape[-1] > 1 and shape[-2] == size_of(inputs)
    if not is_fit or not logits.is_floating_point():
        got = f"{logits.dtype} {shape}" if isinstance(logits, Tensor) else type(logits).__name__
        expected = "floating point [M, B, C] (members, inputs, classes), or [B, C] of one member"
        raise DataError(f"{where}: the model answered with {got}; expected {expected}")
    if not bool(logits.isfinite().all()):
        raise DataError(f"{where}: the answer has NaN or infinity; look for them in the inputs")
    found = {"logits": logits.detach().reshape(-1, *shape[-2:]), **more}  # [B, C] -> [1, B, C]
    return {name: one.cpu() for name, one in found.items()}


def _require_fresh(id_name: str, rows: Mapping[str, Tensor], calibration: Calibration) -> None:
    """Refuse OOD sets of ID samples, and warn of samples that set the thresholds."""
    known = {name: [str(one).encode() for one in digests.tolist()] for name, digests in rows.items()}
    others = {f"OOD set {name[4:]!r}": digests for name, digests in known.items() if name.startswith("ood.")}
    require_other_samples(f"the in-distribution set {id_name!r}", known[id_name], others)
    reused = recognised(calibration.rows, rows[id_name])
    if reused >= REUSED:
        warn(
            f"{reused} of {len(calibration.rows)} samples known to have fitted the calibration are in the "
            f"in-distribution set {id_name!r}: the numbers look better than on new data; evaluate on other samples"
        )


def _described(model: Any, logits: Tensor, calibration: Calibration | None) -> ModelInfo:
    """Describe a model by its member logits `[M, B, C]` and, if it is ours, by what it knows of itself."""
    info = ModelInfo("callable", len(logits), logits.shape[-1], calibration=calibration)
    if isinstance(model, Answering):
        counts, known = model.describe(), model.metadata
        blocks = len(counts.heads[0]) - bool(counts.pooling_heads) if counts.heads else 0
        kept = [len(layer) for member in counts.heads for layer in member[:blocks]]
        heads = f"{round(sum(kept) / len(kept), 1):g}" if kept else ""
        heads += f"x{len(counts.heads)}" if len(counts.heads) > 1 else ""
        info = replace(info, parameters=counts.parameters, multiply_adds=counts.multiply_adds, heads=heads)
        return replace(info, kind=model.kind, class_names=known.labels, source=known.source, history=known.history)
    if isinstance(model, nn.Module):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return replace(info, parameters=parameters, source=type(model).__qualname__)
    return replace(info, source=str(getattr(model, "__name__", type(model).__qualname__)))


def _parameters(model: object) -> Iterator[nn.Parameter]:
    return model.parameters() if isinstance(model, nn.Module) else iter(())


def _provenance(model: object, dtype: torch.dtype) -> dict[str, str]:
    """The device and the libraries of this run."""
    device = getattr(model, "device", None) or next((one.device for one in _parameters(model)), torch.device("cpu"))
    hardware = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    if device.type != "cpu":
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    libraries = {"torch": str(torch.__version__), "numpy": np.__version__}
    about = {"hardware": hardware, "dtype": str(dtype).removeprefix("torch."), "python": platform.python_version()}
    return {**about, "hydra_ensembles": __version__, **libraries}
