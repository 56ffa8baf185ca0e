"""Evaluate a model, or its logits: reads the data, runs the model, warns about reused samples."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from .._distributed import current_ranks
from .._utils import require_device, unwrapped, warn
from ..arguments import Count, Whole, checked
from ..batches import Batches
from ..classes import renumbered, why_not_exclusive
from ..data.batching import Preprocess
from ..data.batching import batches as make_batches
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..fingerprints import trace_sets
from ..metrics.conformal import chance_of_fewer
from ..metrics.inputs import Convention, check_labels, warn_of_probabilities
from ..model.ensemble import Ensemble
from ..model.kinds import require_model
from ..model.metadata import Calibration, Familiarity, Metadata
from ..optimize.runner import OptimizedEnsemble
from ..overlap import (
    FittedSet,
    Known,
    require_unlike,
    sample_keys,
    warn_if_fitted,
    warn_if_shared,
    warn_of_copies,
    warn_of_one_sample,
)
from ..prediction import AnyScore, ScoreName
from .evaluation import UNNAMED, Evaluation, ModelInfo, OodGroup, Provenance
from .logits import LabelledLogits, MemberLogits
from .measure import Measure
from .running import AnswerStore, Pass, Runner, describe_model, member_logits, provenance_of, running

Data = Batches | Dataset[Any]
_CHANCE = 0.001  # significance level at which a warning says that too few samples are accepted


@checked
def evaluate(
    ensemble: Ensemble | OptimizedEnsemble | Callable[[Any], Any],
    id_data: Data,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, Data] | None = None,
    *,
    name: str | None = None,
    id_name: str | None = None,
    score: AnyScore = "msp",
    scores: Sequence[AnyScore] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    preprocess: Preprocess | None = None,
    batch_size: Whole = 64,
    num_workers: Count = 0,
    device: str | torch.device | None = None,
    bootstrap: Count = 0,
    gallery: Count = 0,
    keep_logits: bool = False,
    output: str | Path | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure a model: accuracy, calibration, diversity, OOD detection, selective risk. One pass over each set.

    Under `torchrun` or `accelerate` (an initialised `torch.distributed`) the processes share the batches, each
    returns the whole result, and the numbers are those of a single process. Give every process the plain
    loader, in the same order: one that is split between them, or a stream that splits itself, is refused. With NCCL
    each must have chosen its GPU before (`torch.cuda.set_device`).

    Args:
        ensemble: An `Ensemble`, as it is or prepared by `optimize`; or anything that is called with the inputs of a
            batch and returns member logits `[M, B, C]` (`[B, C]` counts as one member; of an object, `.logits` is
            used; a mapping is passed as keywords if its `forward` accepts them). A module of another library is put
            in evaluation mode meanwhile: do not train it in another thread. Ours change no flag.
        id_data: Labelled in-distribution set: batches, as from a `DataLoader`, or a data set of
            `hydra_ensembles.data`, which is batched with the model's preprocessing.
        ood: OOD sets, `{"near": {name: data}, "far": {...}}` as from `Suite.load`, or flat, `{name: data}`,
            for the mean over all sets only. The group `"apart"` is in no mean. Labels of OOD sets are not read.
        shift: `{name: data}` of labelled sets under distribution shift, such as corruptions.
        name: What tables call the model.
        id_name: Name of the in-distribution set; not needed for a data set.
        score: Score that detects OOD samples, of the mean over members.
        scores: Further scores to report; fitted ones (`fit_familiarity`) are always reported.
        convention: How AUPR and FPR95 are defined; see `hydra_ensembles.metrics.ood`.
        calibration: Temperature and threshold to apply; an ensemble has its own.
        preprocess: Turns a list of raw items into inputs; an ensemble has its own.
        batch_size: For data sets that are not in batches.
        num_workers: Worker processes for such data sets.
        device: Where to run, if not where the model is; it is moved back. An optimized model cannot be moved.
        bootstrap: Number of resamples for confidence intervals; 0 for none. `metrics.bootstrap` says how often they
            contain the true number: with few samples they are too narrow.
        gallery: How many of the inputs the model was most and least sure about to keep for the report.
        keep_logits: Whether the result keeps the member logits, to be saved with it.
        output: Run folder that keeps the answers of an `Ensemble` to every batch; an interrupted evaluation resumes
            when called again. None keeps nothing.
        progress: Whether to show progress bars.

    Raises:
        DataError: A set is empty, has one class, holds NaN, does not fit the model, or is given twice, also under
            another name; the message names it. A `HydraWarning` is given for OOD sets with some ID samples, or one
            sample; for shifted sets with samples that are not shifted; for sets with samples that trained the model, or
            fitted calibration or familiarity, with their estimated share, from up to 1,024 digests; and for thresholds
            that accept significantly fewer of the in-distribution set than they promise.
        ConfigError: A setting is not known.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> noise = [(torch.randn(7, 3, 64, 64),)]
        >>> found = he.evaluate(base, batches, {"far": {"noise": noise}}, name="Single", progress=False)
        >>> sorted(found.ood), 0 <= found.id.accuracy <= 1, 0 <= found.ood["noise"].detection["msp"].auroc <= 1
        (['noise'], True, True)
    """
    if not callable(ensemble):
        require_model(ensemble, "evaluate", Ensemble)  # raises
    model, metadata, calibration = _read_model(ensemble, calibration)
    num_classes = model.num_classes if isinstance(model, Ensemble | OptimizedEnsemble) else None  # of others unknown
    preprocess = preprocess or metadata.preprocessing
    id_name = id_name or set_name(id_data)
    applied = calibration or Calibration()
    fitted = None if num_classes is None else metadata.familiarity
    measure = Measure(name or UNNAMED, id_name, score, scores, convention, applied, bootstrap, keep_logits, fitted)
    if num_classes == 0:
        raise ConfigError("this ensemble has no classifier to evaluate; convert the model with num_labels=")
    groups = read_groups(ood, id_data)
    ood_sets = {key: data for sets in groups.values() for key, data in sets.items()}
    title = f"the in-distribution set {id_name!r}"
    labelled = {title: id_data, **{f"set {key!r}": data for key, data in (shift or {}).items()}}
    id_data, *shifted = renumbered(labelled, metadata.labels, num_classes).values()
    shift = dict(zip(shift or {}, shifted, strict=True))
    model_ready = running(model, None if device is None else require_device(device))
    with AnswerStore(output, model, {}, "an evaluation") as kept, model_ready as (home, dtype):
        runner = Runner(model, home, dtype, measure, gallery, metadata.preprocessing or preprocess, progress, kept)

        def run(data: Data, key: str, labelled: bool, like: Tensor | None = None) -> Pass:
            hidden = labelled and like is not None  # no inputs of shifted sets are shown
            of_set = replace(runner, keep=0) if hidden else runner
            return of_set.run(batched(data, key, preprocess, batch_size, num_workers), key, labelled, like)

        id_pass = run(id_data, id_name, labelled=True)
        like = id_pass.answers.logits  # [M, B, C]
        if num_classes is None:
            renumbered({title: id_data}, metadata.labels, like.shape[2])  # a function's number of classes is known now
        ood_passes = {key: run(data, key, False, like) for key, data in ood_sets.items()}
        shift_passes = {key: run(data, key, True, like) for key, data in shift.items()}
    passes = {id_name: id_pass, **{f"ood.{key}": set_pass for key, set_pass in ood_passes.items()}}
    passes |= {f"shift.{key}": set_pass for key, set_pass in shift_passes.items()}
    reused = _check_overlap(title, id_pass, ood_passes, shift_passes, fitted_sets(metadata, applied, fitted))
    members, _, classes = like.shape
    logits = MemberLogits(
        id_pass.answers,
        {group: {key: ood_passes[key].answers.logits for key in sets} for group, sets in groups.items()},
        {key: set_pass.answers for key, set_pass in shift_passes.items()},
    )
    evaluation = measure.evaluation(
        logits,
        model=describe_model(model, members, classes, calibration),
        provenance=provenance_of(home, id_pass.dtype, current_ranks().size),
        gallery=[item for each in (id_pass, *ood_passes.values()) for item in each.gallery],
        unfamiliarity={key: set_pass.unfamiliarity for key, set_pass in passes.items()},
    )
    warn_of_missed_shares(title, evaluation, applied, fitted)
    labels = {key: set_pass.answers.labels for key, set_pass in passes.items()}
    traces = trace_sets(labels, {key: set_pass.keys for key, set_pass in passes.items()})
    return replace(evaluation, reused=reused, traces=traces)


def _read_model(model: Any, calibration: Calibration | None) -> tuple[Any, Metadata, Calibration | None]:
    """What to run for a model, its metadata, and the calibration to apply: the given one, or its own if it has one."""
    inner = unwrapped(model) if isinstance(model, nn.Module) else model
    if (why := why_not_exclusive(inner)) is not None:
        raise ConfigError(f"this {type(inner).__name__} cannot be evaluated: {why}")
    if isinstance(inner, Ensemble):
        fitted = inner.metadata.familiarity is not None
        model = inner if fitted or not hasattr(model, "metadata") else model  # a wrapper forwards only logits
    stored = getattr(model, "metadata", None)
    metadata = stored if isinstance(stored, Metadata) else Metadata()
    calibration = calibration or metadata.calibration
    parts = inner.modules() if isinstance(inner, nn.Module) and not isinstance(inner, Ensemble) else ()
    if calibration is None and any(isinstance(part, Ensemble) and part.metadata.measured for part in parts):
        warn(
            f"this {type(inner).__name__} holds an ensemble that is calibrated or measured, but returns only logits, "
            "which are evaluated as they are. Give the ensemble itself, or calibration="
        )
    return model, metadata, calibration


def _check_overlap(
    title: str, id_pass: Pass, ood: Mapping[str, Pass], shift: Mapping[str, Pass], known_sets: Mapping[str, FittedSet]
) -> float | None:
    """Warn about samples in sets where they do not belong; returns the share of the ID set that fitted the model."""
    inside, ood_keys = id_pass.keys, {f"OOD set {key!r}": set_pass.keys for key, set_pass in ood.items()}
    shifted = {f"set {key!r}": set_pass.keys for key, set_pass in shift.items()}
    for name, keys in {title: inside, **ood_keys, **shifted}.items():
        warn_of_copies(name, len(keys), len(np.unique(keys)), "numbers and intervals count copies as separate samples")
    require_unlike(title, inside, ood_keys)
    for name, keys in shifted.items():
        warn_if_fitted(name, keys, known_sets)
        warn_if_shared(title, Known(None, inside), name, Known(None, keys), "these are not shifted at all")
    return warn_if_fitted(title, inside, known_sets)


def warn_of_missed_shares(
    title: str, evaluation: Evaluation, calibration: Calibration, familiarity: Familiarity | None
) -> None:
    """Warn if a threshold accepts significantly fewer samples of the in-distribution set than it promises."""
    found, samples = evaluation.selective, evaluation.id.samples
    if found is None:
        return
    fitted = calibration if familiarity is None else familiarity.settings
    for word, share, settings in (("sure", found.sure, calibration), ("familiar", found.familiar, fitted)):
        promised, reference = settings.accepted_share, settings.reference
        if share is None or reference is None:
            continue
        if chance_of_fewer(round(share * samples), samples, promised, reference.samples) < _CHANCE:
            warn(
                f"{100 * share:.4g} % of the {samples:,} samples of {title} are {word} enough to be accepted, "
                f"significantly fewer than the {100 * promised:.4g} % promised for inputs like those that set the "
                "threshold: these differ, or those trained the model; calibrate on data like these"
            )


@checked
def evaluate_logits(
    id_logits: Tensor,
    labels: Tensor,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    *,
    name: str = UNNAMED,
    id_name: str = "id",
    score: ScoreName = "msp",
    scores: Sequence[ScoreName] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    bootstrap: Count = 0,
    keep_logits: bool = False,
    model: ModelInfo | None = None,
    provenance: Provenance | None = None,
) -> Evaluation:
    """Every metric from member logits `[M, B, C]` (or `[B, C]` for one member) before any temperature, on the CPU.

    `ood` is nested or flat as in `evaluate`, with logits for data; `shift` is `{name: (logits, labels)}`; settings and
    errors are those of `evaluate`. If known, `model` says what made the logits, and `provenance` where. Stored
    logits are given as `evaluate_logits(*kept.id, kept.ood, kept.shift)`.

    Samples cannot be recognised here. A `HydraWarning` is given for logits, the same to the last bit, that
    `fit_calibration` fitted `calibration` on; samples of `calibrate` are recognised only by `evaluate`.
    """
    calibration = calibration or Calibration()
    measure = Measure(name, id_name, score, scores, convention, calibration, bootstrap, keep_logits)

    def read(logits: Tensor, key: str, like: Tensor | None = None) -> Tensor:
        logits = member_logits(logits, key, like=like)
        warn_of_probabilities(logits, key)
        return logits

    def labelled(raw: Tensor, targets: Tensor, key: str, like: Tensor | None = None) -> LabelledLogits:
        logits = read(raw, key, like)
        _, samples, classes = logits.shape
        return LabelledLogits(logits, check_labels(torch.as_tensor(targets, device="cpu"), samples, classes, key))

    id_set = labelled(id_logits, labels, id_name)
    id_members, groups = id_set.logits, read_groups(ood).items()
    logits = MemberLogits(
        id_set,
        {group: {key: read(raw, key, id_members) for key, raw in sets.items()} for group, sets in groups},
        {key: labelled(raw, targets, key, id_members) for key, (raw, targets) in (shift or {}).items()},
    )
    for sets in logits.ood.values():
        for key, ood_logits in sets.items():
            warn_of_one_sample(f"OOD set {key!r}", ood_logits.shape[1])
    known_sets = {"fitted the calibration": calibration.fitted_logits}
    reused = warn_if_fitted(f"the in-distribution set {id_name!r}", sample_keys(id_members.transpose(0, 1)), known_sets)
    for key, shifted in logits.shift.items():
        warn_if_fitted(f"set {key!r}", sample_keys(shifted.logits.transpose(0, 1)), known_sets)
    evaluation = measure.evaluation(logits, model, provenance or provenance_of(None, id_logits.dtype))
    targets = {id_name: logits.id.labels, **{f"shift.{key}": shifted.labels for key, shifted in logits.shift.items()}}
    return replace(evaluation, reused=reused or None, traces=trace_sets(targets))  # 0 of equal logits proves nothing


def fitted_sets(metadata: Metadata, calibration: Calibration, familiarity: Familiarity | None) -> dict[str, FittedSet]:
    """Digests of the samples that trained the model or fitted part of it, by what they were used for."""
    sets = {"fitted the calibration": calibration.fitted_set}
    return sets if familiarity is None else {**sets, "fitted the familiarity": familiarity.settings.fitted_set}


def read_groups(ood: Mapping[str, Any] | None, id_data: object = None) -> dict[OodGroup, dict[str, Any]]:
    """OOD sets by group and name, from a nested or a flat mapping; `{}` for None. Raises if one is the ID data."""
    ood = ood or {}
    if not any(isinstance(value, Mapping) for value in ood.values()):
        ood = {"ungrouped": ood}
    elif not all(isinstance(value, Mapping) for value in ood.values()) or not set(ood) <= set(get_args(OodGroup)):
        accepted = list(get_args(OodGroup))
        raise DataError(f"ood has the keys {list(ood)}; give groups of sets, among {accepted}, or {{name: data}}")
    named = [(name, data) for group in ood.values() for name, data in group.items()]
    counts = Counter(name for name, _ in named)
    twice = sorted(name for name in counts if counts[name] > 1)
    if twice:
        raise DataError(f"OOD sets {twice} occur in more than one group; give each set one name in one group")
    same = [name for name, data in named if data is id_data]  # keys may miss it: each pass may differ
    if same:
        raise DataError(f"OOD set {same[0]!r} is the in-distribution set; OOD detection needs different data")
    return {cast(OodGroup, group): dict(sets) for group, sets in ood.items() if sets}


def batched(data: Data, key: str, preprocess: Preprocess | None, batch_size: int, num_workers: int) -> Batches:
    """Return batches unchanged, and make batches of a data set with `preprocess`."""
    if not isinstance(data, Dataset):
        return data
    if preprocess is None:
        raise ConfigError(f"set {key!r} holds raw items; pass preprocess=, or give batches (a DataLoader)")
    return make_batches(data, preprocess, batch_size, num_workers=num_workers)


def set_name(data: object) -> str:
    """Name of a data set, or of the data set inside a loader; `"id"` if it has none."""
    dataset = data if isinstance(data, Dataset) else getattr(data, "dataset", None)
    return dataset.name if isinstance(dataset, Dataset) else "id"
