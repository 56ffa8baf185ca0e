"""The numbers of one set, from predictions; and the checks that name the set when it cannot be measured."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from ..errors import DataError
from ..metrics.calibration import (
    accuracy,
    adaptive_ece_of_confidence,
    brier,
    ece_of_confidence,
    nll_of_log_probs,
    top_label,
)
from ..metrics.diversity import disagreement, mutual_information
from ..metrics.inputs import Convention, check_finite, check_same_length, where
from ..metrics.ood import aupr, auroc, fpr95
from ..metrics.selective import aurc, risk_at_coverage
from ..model.metadata import Calibration
from ..prediction import Prediction, ScoreName
from .results import COVERAGES, Classification, Detection, OodGroup, OodSet, Selective

MEANS: tuple[Literal["near", "far", "all"], ...] = ("near", "far", "all")


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


def mean_sets(groups: Mapping[str, OodGroup]) -> dict[str, list[str]]:
    """Which sets each mean is over: near, far, and all of them; a mean over no set is left out."""
    chosen = {
        "near": [name for name, group in groups.items() if group == "near"],
        "far": [name for name, group in groups.items() if group == "far"],
        "all": [name for name, group in groups.items() if group != "apart"],
    }
    return {mean: chosen[mean] for mean in MEANS if chosen[mean]}


def predict(
    logits: Tensor, calibration: Calibration, score: ScoreName, name: str, like: tuple[int, int] | None = None
) -> Prediction:
    """Prediction for one set, calibrated.

    Args:
        logits: `[M, B, C]`, or `[B, C]` for one member.
        calibration: Its temperature is applied; its threshold too.
        score: Score to use where the calibration has no threshold.
        name: Name of the set, for error messages.
        like: Members and classes of the in-distribution set, which this one must share.

    Raises:
        DataError: The set is empty, holds NaN, or does not fit.
    """
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or not logits.is_floating_point():
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"{where(name)}member logits must be floating point [M, B, C] or [B, C], got {got}")
    logits = (logits.unsqueeze(0) if logits.ndim == 2 else logits).detach().cpu()  # [B, C] -> [1, B, C]
    members, samples, classes = logits.shape
    if samples == 0:
        raise DataError(f"{where(name)}there are no samples; check how the set was loaded")
    if members == 0 or classes < 2:
        raise DataError(
            f"{where(name)}member logits have shape {list(logits.shape)}; at least one member and two classes are "
            "needed: with one class there is nothing to decide"
        )
    if like is not None and (members, classes) != like:
        raise DataError(
            f"{where(name)}it has logits of {members} members over {classes} classes, and the in-distribution set of "
            f"{like[0]} over {like[1]}; both must come from the same model"
        )
    check_finite(logits, "member logits [M, B, C]", name)
    temperature = calibration.temperature
    return Prediction.from_logits(
        logits,
        temperature=temperature if len(temperature) > 1 else temperature[0],
        threshold=calibration.threshold,
        score=score if calibration.threshold is None else calibration.score,
    )


def check_labels(labels: Tensor, prediction: Prediction, name: str) -> Tensor:
    """Labels `[B]` as int64 on the CPU, one a sample, of at least two classes.

    Raises:
        DataError: They do not fit.
    """
    labels = torch.as_tensor(labels).detach().cpu()
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"{where(name)}labels must be whole numbers [B], got {labels.dtype} {list(labels.shape)}")
    check_same_length({"samples": len(prediction), "labels": len(labels)}, name)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= prediction.classes:
        raise DataError(
            f"{where(name)}labels run from {lowest} to {highest}, but the model has {prediction.classes} classes "
            f"(0 to {prediction.classes - 1}); check that model and set have the same classes"
        )
    if lowest == highest:
        raise DataError(
            f"{where(name)}all {len(labels)} labels are {lowest}; accuracy and calibration need at least two "
            "classes: check that sorted data were not cut, or shuffle before taking a part"
        )
    return labels.long()


def classification(prediction: Prediction, labels: Tensor, score: ScoreName, name: str) -> Classification:
    """Accuracy, calibration, diversity and selective risk on a labelled set."""
    probs, members = prediction.probs, prediction.member_probs
    confidence, correct = top_label(probs, labels, name=name)
    scores, wrong = prediction.score(score), ~correct
    log_probs = prediction.log_probs
    if not bool(torch.isfinite(log_probs).all()):  # float32 overflows between logits of 1e38 and -1e38
        log_probs = Prediction.from_logits(prediction.member_logits.double()).log_probs
    return Classification(
        samples=len(prediction),
        accuracy=accuracy(probs, labels, name=name),
        brier=brier(probs, labels, name=name),
        nll=nll_of_log_probs(log_probs, labels, name=name),
        ece=ece_of_confidence(confidence, correct, name=name),
        aece=adaptive_ece_of_confidence(confidence, correct, name=name),
        mutual_information=mutual_information(members, name=name),
        disagreement=disagreement(members, name=name),
        aurc=aurc(scores, wrong, name=name),
        risk_at_coverage={
            f"{coverage:.2f}": risk_at_coverage(scores, wrong, coverage, name=name) for coverage in COVERAGES
        },
    )


def detection(id_scores: Tensor, ood_scores: Tensor, convention: Convention, name: str) -> Detection:
    """AUROC, FPR95 and AUPR of one score."""
    return Detection(
        auroc=auroc(id_scores, ood_scores, convention, name=name),
        fpr95=fpr95(id_scores, ood_scores, convention, name=name),
        aupr=aupr(id_scores, ood_scores, convention, name=name),
    )


def ood_set(
    group: OodGroup,
    id_prediction: Prediction,
    prediction: Prediction,
    scores: Sequence[ScoreName],
    convention: Convention,
    name: str,
) -> OodSet:
    """Everything measured on one OOD set."""
    accept = prediction.accept
    return OodSet(
        group=group,
        samples=len(prediction),
        detection={
            score: detection(id_prediction.score(score), prediction.score(score), convention, name) for score in scores
        },
        mutual_information=mutual_information(prediction.member_probs, name=name),
        disagreement=disagreement(prediction.member_probs, name=name),
        abstained=None if accept is None else int((~accept).sum()) / len(accept),
    )


def detection_means(ood: Mapping[str, OodSet], scores: Sequence[ScoreName]) -> dict[str, dict[str, Detection]]:
    """Unweighted means over the near, the far and all sets, for each score."""
    means: dict[str, dict[str, Detection]] = {}
    for mean, names in mean_sets({name: result.group for name, result in ood.items()}).items():
        means[mean] = {}
        for score in scores:
            found = [ood[name].detection[score] for name in names]
            means[mean][score] = Detection(
                auroc=sum(one.auroc for one in found) / len(found),
                fpr95=sum(one.fpr95 for one in found) / len(found),
                aupr=sum(one.aupr for one in found) / len(found),
            )
    return means


def selective(prediction: Prediction, labels: Tensor) -> Selective | None:
    """What the calibrated threshold does on a labelled set; None without a threshold."""
    accept = prediction.accept
    if accept is None or prediction.threshold is None:
        return None
    accepted = int(accept.sum())
    wrong = int((prediction.label != labels)[accept].sum())
    return Selective(
        score=prediction.score_name,
        threshold=prediction.threshold,
        accepted=accepted / len(accept),
        risk=wrong / accepted if accepted else None,
    )
