"""From member logits to an `Evaluation`: the pure part, which needs neither a model nor a device."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from ..errors import ConfigError
from ..metrics.inputs import Convention, check_convention
from ..model.metadata import Calibration
from ..prediction import ScoreName
from .evaluation import Evaluation
from .figures import make_figures
from .gallery import GalleryItem
from .intervals import bootstrap_intervals
from .logits import LabelledLogits, MemberLogits
from .measure import check_labels, classification, detection_means, mean_sets, ood_set, predict, read_groups, selective
from .provenance import provenance_of
from .results import ModelInfo, Provenance


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
    wanted = check_settings(score, scores, convention, bootstrap)
    calibration = calibration or Calibration()
    groups = read_groups(ood)

    prediction = predict(id_logits, calibration, score, id_name)
    id_labels = check_labels(labels, prediction, id_name)
    id_scores = prediction.score(score)
    like = (prediction.members, prediction.classes)

    answers, results = {}, {}
    for group, sets in groups.items():
        for key, logits in sets.items():
            answers[key] = predict(logits, calibration, score, key, like)
            results[key] = ood_set(group, prediction, answers[key], wanted, convention, key)
    ood_scores = {key: answer.score(score) for key, answer in answers.items()}

    shift_results, shift_logits = {}, {}
    for key, (logits, set_labels) in (shift or {}).items():
        answer = predict(logits, calibration, score, key, like)
        shift_logits[key] = LabelledLogits(logits, check_labels(set_labels, answer, key))
        shift_results[key] = classification(answer, shift_logits[key].labels, score, key)

    by_group = {str(group): sets for group, sets in groups.items()}
    means = mean_sets({key: result.group for key, result in results.items()})
    return Evaluation(
        name=name,
        id_name=id_name,
        score=score,
        convention=convention,
        id=classification(prediction, id_labels, score, id_name),
        ood=results,
        means=detection_means(results, wanted),
        shift=shift_results,
        selective=selective(prediction, id_labels),
        model=model or ModelInfo("callable", *like, calibration=calibration),
        provenance=provenance or provenance_of(None, str(id_logits.dtype).removeprefix("torch.")),
        figures=make_figures(
            prediction, id_labels, id_scores, {key: (answers[key], ood_scores[key]) for key in answers}
        ),
        intervals=(
            bootstrap_intervals(
                prediction, id_labels, id_scores, ood_scores, means, convention, bootstrap, id_name=id_name
            )
            if bootstrap
            else {}
        ),
        gallery=tuple(gallery),
        logits=MemberLogits(LabelledLogits(id_logits, id_labels), by_group, shift_logits) if keep_logits else None,
    )


def evaluate_stored(logits: MemberLogits, **settings: Any) -> Evaluation:
    """Make an evaluation again from stored member logits; `settings` are those of `evaluate_logits`."""
    shift = {name: (labelled.logits, labelled.labels) for name, labelled in logits.shift.items()}
    return evaluate_logits(logits.id.logits, logits.id.labels, logits.ood, shift, **settings)


def check_settings(
    score: ScoreName, scores: Sequence[ScoreName], convention: Convention, bootstrap: int
) -> tuple[ScoreName, ...]:
    """Refuse unknown settings before anything is computed; all scores asked for, each once.

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
    return tuple(dict.fromkeys((score, *scores)))
