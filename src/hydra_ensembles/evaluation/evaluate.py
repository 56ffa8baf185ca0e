"""One pass over each set, every metric."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, cast, get_args

import torch
from torch import Tensor

from .._distributed import current_ranks
from .._utils import require_device
from ..batches import Batches
from ..data.batching import BatchLoader, Preprocess
from ..data.batching import batches as make_batches
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..metrics.bootstrap import Interval, bootstrap_metric, bootstrap_ood
from ..metrics.calibration import at_labels, equal_count_error, equal_width_error, squared_errors
from ..metrics.inputs import Convention, check_convention, check_labels, mean, where
from ..metrics.ood import OodMetric, flagged, of_counts
from ..metrics.selective import risk_curve
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration, Metadata
from ..optimize.runner import OptimizedEnsemble
from ..prediction import Prediction, ScoreName
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from .curves import make_figures
from .evaluation import (
    COVERAGES,
    Classification,
    Detection,
    Evaluation,
    GalleryItem,
    LabelledLogits,
    MemberLogits,
    ModelInfo,
    OodGroup,
    OodSet,
    Provenance,
    Selective,
    describe_model,
    provenance_of,
)
from .running import Runner, member_logits, require_like, running

Data = Batches | Dataset[Any]


def evaluate(
    ensemble: Ensemble | OptimizedEnsemble | Callable[[Any], Any],
    id_data: Data,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, Data] | None = None,
    *,
    name: str | None = None,
    id_name: str | None = None,
    score: ScoreName = "msp",
    scores: Sequence[ScoreName] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str | torch.device | None = None,
    bootstrap: int = 0,
    gallery: int = 0,
    keep_logits: bool = False,
    progress: bool = True,
) -> Evaluation:
    """Measure a model: accuracy, calibration, diversity, OOD detection, selective risk. One pass over each set.

    Under `torchrun` or `accelerate` (an initialised `torch.distributed`) the processes share the batches, every
    one of them gets the whole result, and the numbers are those of a single process. Give every process the plain
    loader, in the same order; with NCCL each must have chosen its GPU before (`torch.cuda.set_device`).

    Args:
        ensemble: An `Ensemble`, as it is or prepared by `optimize`; or anything that is called with the inputs of a
            batch and answers with member logits `[M, B, C]` (`[B, C]` counts as one member; an object with `.logits`
            is looked into).
        id_data: Labelled in-distribution set: batches, as a `DataLoader` gives them, or a data set of
            `hydra_ensembles.data`, which is put in batches with the model's preprocessing.
        ood: OOD sets, `{"near": {name: data}, "far": {...}}` as `Suite.load` gives them, or flat, `{name: data}`,
            which gives the mean over all sets only. A group `"apart"` is reported, but in no mean. Labels of
            OOD sets are not read.
        shift: `{name: data}` of labelled sets under distribution shift, such as corruptions.
        name: What tables call the model.
        id_name: Name of the in-distribution set; that of a data set is known.
        score: Score that detects OOD samples, of the mean over members.
        scores: Further scores to report.
        convention: How AUPR and FPR95 are defined; see `hydra_ensembles.metrics.ood`.
        calibration: Temperature and threshold to apply; an ensemble brings its own.
        preprocess: Turns a list of raw items into inputs; an ensemble brings its own.
        batch_size: For data sets that are not in batches.
        num_workers: Worker processes for such data sets.
        device: Where to run; a model is moved there and back, one prepared by `optimize` cannot be. None: where it is.
        bootstrap: Number of resamples for confidence intervals; 0 for none.
        gallery: How many of the inputs it was most and least sure about to keep, for the report; 0 for none.
            They become part of the saved evaluation.
        keep_logits: Whether the result keeps the member logits, to be saved beside it.
        progress: Whether to show progress bars.

    Raises:
        DataError: A set is empty, has one class, holds NaN, does not fit the model, or is given twice (as ID and as OOD
            set, or as two OOD sets, as far as that shows without reading them); the message names it.
        ConfigError: A setting is not known.
    """
    check_settings(score, scores, convention, bootstrap)
    if gallery < 0:
        raise ConfigError(f"gallery={gallery} is not a number of inputs; use 0 for none, or 6")
    if isinstance(ensemble, Ensemble | OptimizedEnsemble) and not ensemble.num_classes:
        raise ConfigError("this ensemble has no classifier to evaluate; convert the model with num_labels=")
    remembered = getattr(ensemble, "metadata", None)
    if isinstance(remembered, Metadata):
        calibration = calibration or remembered.calibration
        preprocess = preprocess or remembered.preprocessing
    undone = remembered.preprocessing if isinstance(remembered, Metadata) else preprocess
    id_name = id_name or _set_name(id_data)
    groups = read_groups(ood)
    foreign = {key: data for sets in groups.values() for key, data in sets.items()}
    given = {f"the in-distribution set {id_name!r}": id_data, **{f"OOD set {key!r}": foreign[key] for key in foreign}}
    _require_different(given, preprocess)
    batched = partial(_in_batches, preprocess=preprocess, batch_size=batch_size, num_workers=num_workers)
    with running(ensemble, require_device(device)) as (place, dtype):
        runner = Runner(
            model=ensemble,
            device=place,
            dtype=dtype,
            predict=partial(_predict, calibration=calibration or Calibration(), score=score),
            score=score,
            keep=gallery,
            preprocessing=undone if isinstance(undone, ImagePreprocessing | TextPreprocessing) else None,
            progress=progress,
        )
        own = runner.run(batched(id_data, id_name), id_name, labelled=True)
        others = {
            key: runner.run(batched(data, key), key, labelled=False, like=own.logits) for key, data in foreign.items()
        }
        shifted = {
            key: runner.run(batched(data, key), key, labelled=True, like=own.logits)
            for key, data in (shift or {}).items()
        }
    members, _, classes = own.logits.shape
    return _measure(
        MemberLogits(
            LabelledLogits(own.logits, own.labels),
            {group: {key: others[key].logits for key in sets} for group, sets in groups.items()},
            {key: LabelledLogits(one.logits, one.labels) for key, one in shifted.items()},
        ),
        name=name or "model",
        id_name=id_name,
        score=score,
        scores=scores,
        convention=convention,
        calibration=calibration,
        bootstrap=bootstrap,
        keep_logits=keep_logits,
        model=describe_model(ensemble, members, classes, calibration),
        provenance=provenance_of(place, own.dtype, current_ranks().size),
        gallery=[item for one in (own, *others.values()) for item in one.gallery],
    )


def evaluate_logits(
    id_logits: Tensor,
    labels: Tensor,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    *,
    name: str = "model",
    id_name: str = "id",
    score: ScoreName = "msp",
    scores: Sequence[ScoreName] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    bootstrap: int = 0,
    keep_logits: bool = False,
    model: ModelInfo | None = None,
    provenance: Provenance | None = None,
    gallery: Sequence[GalleryItem] = (),
) -> Evaluation:
    """Every metric from member logits `[M, B, C]` (or `[B, C]` for one member), on the CPU.

    Args:
        id_logits: Of the in-distribution set, before any temperature.
        labels: Its labels, `[B]`.
        ood: Member logits of the OOD sets: `{"near": {name: logits}, "far": {...}}`, or flat, `{name: logits}`,
            which gives the mean over all sets only. A group `"apart"` is reported, but in no mean.
        shift: `{name: (logits, labels)}` of sets under distribution shift.
        name: What tables call the model.
        id_name: Name of the in-distribution set.
        score: Score that detects OOD samples.
        scores: Further scores to report.
        convention: How AUPR and FPR95 are defined.
        calibration: Temperature, and threshold for the selective numbers.
        bootstrap: Number of resamples for confidence intervals; 0 for none.
        keep_logits: Whether the result keeps the logits.
        model: What made the logits, where more is known than their shape.
        provenance: Where they were made; this machine, if not given.
        gallery: Inputs to show in the report.

    Raises:
        DataError: A set is empty, has one class, holds NaN, or does not fit the others; the message names it.
        ConfigError: A setting is not known.
    """
    check_settings(score, scores, convention, bootstrap)
    own = member_logits(id_logits, id_name)

    def alike(logits: Tensor, key: str) -> Tensor:
        found = member_logits(logits, key)
        require_like(found, own, key)
        return found

    return _measure(
        MemberLogits(
            _labelled(own, labels, id_name),
            {group: {key: alike(one, key) for key, one in sets.items()} for group, sets in read_groups(ood).items()},
            {key: _labelled(alike(one, key), targets, key) for key, (one, targets) in (shift or {}).items()},
        ),
        name=name,
        id_name=id_name,
        score=score,
        scores=scores,
        convention=convention,
        calibration=calibration,
        bootstrap=bootstrap,
        keep_logits=keep_logits,
        model=model,
        provenance=provenance or provenance_of(None, id_logits.dtype),
        gallery=gallery,
    )


def evaluate_stored(logits: MemberLogits, **settings: Any) -> Evaluation:
    """Make an evaluation again from stored member logits; `settings` are those of `evaluate_logits`."""
    shift = {name: (labelled.logits, labelled.labels) for name, labelled in logits.shift.items()}
    return evaluate_logits(logits.id.logits, logits.id.labels, logits.ood, shift, **settings)


def check_settings(score: ScoreName, scores: Sequence[ScoreName], convention: Convention, bootstrap: int) -> None:
    """Refuse unknown settings before anything is computed.

    Raises:
        ConfigError: A setting is not known.
    """
    check_convention(convention)
    if isinstance(scores, str):
        raise ConfigError(f"scores={scores!r} is a string; give a sequence of score names, such as ({scores!r},)")
    known = get_args(ScoreName)
    unknown = [name for name in (score, *scores) if name not in known]
    if unknown:
        raise ConfigError(f"scores {unknown} are not known; choose from {', '.join(known)}")
    if bootstrap < 0:
        raise ConfigError(f"bootstrap={bootstrap} is not a number of resamples; use 0 for none (1000 is the custom)")


def read_groups(ood: Mapping[str, Any] | None) -> dict[OodGroup, dict[str, Any]]:
    """OOD sets by group and name, from a nested or a flat mapping; `{}` for None.

    Raises:
        DataError: Groups and sets are mixed, a group is not known, or a name occurs twice.
    """
    if not ood:
        return {}
    nested = [isinstance(value, Mapping) for value in ood.values()]
    if not any(nested):
        return {"ungrouped": dict(ood)}
    known = get_args(OodGroup)
    if not all(nested) or not set(ood) <= set(known):
        raise DataError(
            f"ood has the keys {list(ood)}; give groups of sets, with keys among {list(known)}, or a flat mapping "
            "from set names to data"
        )
    names = [name for sets in ood.values() for name in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"OOD sets {twice} occur in more than one group; give each set one name in one group")
    return {cast(OodGroup, group): dict(sets) for group, sets in ood.items() if sets}


def _labelled(logits: Tensor, labels: Tensor, name: str) -> LabelledLogits:
    _, samples, classes = logits.shape
    return LabelledLogits(logits, check_labels(torch.as_tensor(labels).cpu(), samples, classes, name))


def _predict(logits: Tensor, calibration: Calibration, score: ScoreName) -> Prediction:
    """A prediction from logits that are finite; only a division by less than one can change that."""
    temperature = calibration.temperature
    return Prediction.from_logits(
        logits,
        temperature=temperature if len(temperature) > 1 else temperature[0],
        threshold=calibration.threshold,
        score=score if calibration.threshold is None else calibration.score,
        check_finite=min(temperature) < 1,
    )


def _measure(
    logits: MemberLogits,
    *,
    name: str,
    id_name: str,
    score: ScoreName,
    scores: Sequence[ScoreName],
    convention: Convention,
    calibration: Calibration | None,
    bootstrap: int,
    keep_logits: bool,
    model: ModelInfo | None,
    provenance: Provenance,
    gallery: Iterable[GalleryItem],
) -> Evaluation:
    """Everything that `evaluate` reports, from logits and labels that are known to be good."""
    calibration = calibration or Calibration()
    predict = partial(_predict, calibration=calibration, score=score)
    prediction, labels = predict(logits.id.logits), logits.id.labels
    answers = {key: predict(one) for sets in logits.ood.values() for key, one in sets.items()}
    wanted = tuple(dict.fromkeys((score, *scores)))
    id_scores = {one: prediction.score(one) for one in wanted}
    ood_scores = {key: answer.score(score) for key, answer in answers.items()}
    ood = {
        key: OodSet(
            group=cast(OodGroup, group),
            samples=len(answers[key]),
            detection={one: _detection(id_scores[one], answers[key].score(one), convention) for one in wanted},
            mutual_information=mean(answers[key].epistemic),
            disagreement=mean(answers[key].disagreement),
            abstained=None if (accept := answers[key].accept) is None else mean(~accept),
        )
        for group, sets in logits.ood.items()
        for key in sets
    }
    averaged = {
        "near": [key for key, one in ood.items() if one.group == "near"],
        "far": [key for key, one in ood.items() if one.group == "far"],
        "all": [key for key, one in ood.items() if one.group != "apart"],
    }
    averaged = {group: keys for group, keys in averaged.items() if keys}
    shift = {key: _classification(predict(one.logits), one.labels, score, key) for key, one in logits.shift.items()}
    return Evaluation(
        name=name,
        id_name=id_name,
        score=score,
        convention=convention,
        id=_classification(prediction, labels, score, id_name),
        ood=ood,
        means={
            group: {one: _mean_detection([ood[key].detection[one] for key in keys]) for one in wanted}
            for group, keys in averaged.items()
        },
        shift=shift,
        selective=_selective(prediction, labels),
        model=model or ModelInfo("callable", prediction.members, prediction.classes, calibration=calibration),
        provenance=provenance,
        figures=make_figures(prediction, labels, id_scores[score], answers, ood_scores),
        intervals=(
            _intervals(prediction, labels, id_scores[score], ood_scores, averaged, convention, bootstrap)
            if bootstrap
            else {}
        ),
        gallery=tuple(gallery),
        logits=logits if keep_logits else None,
    )


def _per_sample(prediction: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """What the numbers of a labelled set are means of, `[B]` each."""
    nll = -at_labels(prediction.log_probs, labels)
    if not bool(torch.isfinite(nll).all()):  # float32 overflows between logits of 1e38 and -1e38
        nll = -at_labels(Prediction(prediction.member_logits.double()).log_probs, labels)
    return {
        "accuracy": prediction.label == labels,
        "brier": squared_errors(prediction.probs, labels),
        "nll": nll,
        "mutual_information": prediction.epistemic,
        "disagreement": prediction.disagreement,
    }


def _classification(prediction: Prediction, labels: Tensor, score: ScoreName, name: str) -> Classification:
    """Accuracy, calibration, diversity and selective risk on a labelled set."""
    if bool((labels == labels[0]).all()):
        raise DataError(
            f"{where(name)}all {len(labels)} labels are {int(labels[0])}; accuracy and calibration need at least two "
            "classes: check that sorted data were not cut, or shuffle before taking a part"
        )
    confidence, correct = prediction.confidence, prediction.label == labels
    curve = risk_curve(prediction.score(score), ~correct)
    return Classification(
        samples=len(prediction),
        **{key: mean(values) for key, values in _per_sample(prediction, labels).items()},
        ece=equal_width_error(confidence, correct),
        aece=equal_count_error(confidence, correct),
        aurc=curve.area,
        risk_at_coverage={f"{coverage:.2f}": curve.at(coverage) for coverage in COVERAGES},
    )


def _detection(id_scores: Tensor, ood_scores: Tensor, convention: Convention) -> Detection:
    fp, tp, _ = flagged(id_scores, ood_scores)
    return Detection(**{metric: of_counts(metric, fp, tp, convention).item() for metric in get_args(OodMetric)})


def _mean_detection(found: Sequence[Detection]) -> Detection:
    """Unweighted mean over sets."""
    return Detection(**{key: sum(getattr(one, key) for one in found) / len(found) for key in get_args(OodMetric)})


def _selective(prediction: Prediction, labels: Tensor) -> Selective | None:
    """What the calibrated threshold does on a labelled set; None without a threshold."""
    accept = prediction.accept
    if accept is None or prediction.threshold is None:
        return None
    wrong = (prediction.label != labels)[accept]
    return Selective(
        score=prediction.score_name,
        threshold=prediction.threshold,
        accepted=mean(accept),
        risk=mean(wrong) if len(wrong) else None,
    )


def _intervals(
    prediction: Prediction,
    labels: Tensor,
    id_scores: Tensor,
    ood_scores: Mapping[str, Tensor],
    averaged: Mapping[str, Sequence[str]],
    convention: Convention,
    resamples: int,
) -> dict[str, Interval]:
    """95 % intervals under the names of `Evaluation.numbers`; `averaged` names the sets that each mean is over."""
    correct = prediction.label == labels
    interval = partial(bootstrap_metric, resamples=resamples)
    found = {key: interval(mean, [values]) for key, values in _per_sample(prediction, labels).items()}
    found |= {
        "ece": interval(equal_width_error, [prediction.confidence, correct]),
        "aece": interval(equal_count_error, [prediction.confidence, correct]),
        "aurc": interval(lambda scores, wrong: risk_curve(scores, wrong).area, [id_scores, ~correct]),
    }
    sets = {f"ood.{name}": [scores] for name, scores in ood_scores.items()}
    sets |= {group: [ood_scores[name] for name in names] for group, names in averaged.items()}
    for key, scores in sets.items():
        for metric in get_args(OodMetric):
            found[f"{key}.{metric}"] = bootstrap_ood(
                metric, id_scores, scores, convention=convention, resamples=resamples
            )
    return found


def _in_batches(data: Data, name: str, preprocess: Preprocess | None, batch_size: int, num_workers: int) -> Batches:
    if not isinstance(data, Dataset):
        return data
    if preprocess is None:
        raise ConfigError(
            f"set {name!r} is a data set of raw items, and this model has no saved preprocessing; "
            "pass preprocess=, or give batches (a DataLoader)"
        )
    return make_batches(data, preprocess, batch_size, num_workers=num_workers)


def _require_different(sets: Mapping[str, object], preprocess: Preprocess | None) -> None:
    for (first, one), (second, other) in combinations(sets.items(), 2):
        if _are_same(one, other, preprocess):
            raise DataError(
                f"{second} has the same samples as {first}; OOD detection tells different data apart: give each set "
                "data of its own, or leave it out"
            )


def _are_same(one: object, other: object, preprocess: Preprocess | None) -> bool:
    """Whether two sets are surely the same. Loaders that are not ours may choose and change what they read."""

    def read(data: object) -> tuple[object, Preprocess | None]:
        return (data.dataset, data.preprocess) if isinstance(data, BatchLoader) else (data, preprocess)

    (mine, my_way), (theirs, their_way) = read(one), read(other)
    if isinstance(mine, Dataset) and isinstance(theirs, Dataset):
        return my_way == their_way and mine.same_items(theirs)
    return one is other


def _set_name(data: object) -> str:
    """The name a data set gives itself, also inside a loader."""
    for candidate in (data, getattr(data, "dataset", None)):
        if isinstance(candidate, Dataset):
            return candidate.name
    return "id"
