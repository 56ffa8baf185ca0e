"""Bootstrap confidence intervals for the numbers of an evaluation."""

from collections.abc import Mapping, Sequence
from typing import get_args

from torch import Tensor

from ..metrics.bootstrap import Interval, OodMetric, bootstrap_metric, bootstrap_ood
from ..metrics.calibration import adaptive_ece_of_confidence, brier_per_sample, ece_of_confidence, top_label
from ..metrics.inputs import Convention
from ..metrics.selective import aurc
from ..prediction import Prediction


def bootstrap_intervals(
    prediction: Prediction,
    labels: Tensor,
    id_scores: Tensor,
    ood_scores: Mapping[str, Tensor],
    means: Mapping[str, Sequence[str]],
    convention: Convention,
    resamples: int,
    id_name: str = "id",
) -> dict[str, Interval]:
    """95 % intervals under the names of `Evaluation.numbers`.

    Args:
        prediction: For the in-distribution set.
        labels: `[B]`.
        id_scores: `[B]`, higher = more uncertain.
        ood_scores: Scores of each OOD set.
        means: Names of the sets each mean is over.
        convention: How AUPR and FPR95 are defined.
        resamples: Number of resamples.
        id_name: Name of the in-distribution set, for error messages.
    """
    confidence, correct = top_label(prediction.probs, labels, name=id_name)
    nll = -prediction.log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)  # [B, C] -> [B]

    def interval_of_mean(values: Tensor) -> Interval:
        return bootstrap_metric(_mean, [values.double()], resamples=resamples, name=id_name)

    found = {
        "accuracy": interval_of_mean(correct),
        "brier": interval_of_mean(brier_per_sample(prediction.probs, labels, name=id_name)),
        "nll": interval_of_mean(nll),
        "ece": bootstrap_metric(ece_of_confidence, [confidence, correct], resamples=resamples, name=id_name),
        "aece": bootstrap_metric(adaptive_ece_of_confidence, [confidence, correct], resamples=resamples, name=id_name),
        "mutual_information": interval_of_mean(prediction.epistemic),
        "disagreement": interval_of_mean(prediction.disagreement),
        "aurc": bootstrap_metric(aurc, [id_scores, ~correct], resamples=resamples, name=id_name),
    }
    sets = {f"ood.{name}": [scores] for name, scores in ood_scores.items()}
    sets |= {mean: [ood_scores[name] for name in names] for mean, names in means.items()}
    for key, scores in sets.items():
        for metric in get_args(OodMetric):
            found[f"{key}.{metric}"] = bootstrap_ood(
                metric, id_scores, scores, convention=convention, resamples=resamples, name=key
            )
    return found


def _mean(values: Tensor) -> float:
    return float(values.mean())
