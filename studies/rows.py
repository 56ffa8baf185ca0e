"""Every number of a study, method by method and seed by seed, from the stored logits."""

from collections.abc import Mapping

from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.metrics.calibration import adaptive_ece, brier, ece, nll
from hydra_ensembles.prediction import Prediction, ScoreName

from .results import StoredStudy

Rows = dict[str, dict[str, list[float]]]  # method -> metric -> one number a seed

ID_METRICS = ("accuracy", "brier", "nll", "ece", "aece", "aurc", "mutual_information", "disagreement")
DETECTION = ("auroc", "fpr95", "aupr")
MEANS = ("near", "far", "all")
DIGITS = 6


def study_rows(study: StoredStudy) -> Rows:
    """All rows."""
    rows: Rows = {}
    for method in study.methods:
        for seed in study.seeds:
            for metric, value in method_numbers(study, method, seed).items():
                rows.setdefault(method, {}).setdefault(metric, []).append(round(value, DIGITS))
    return rows


def method_numbers(study: StoredStudy, method: str, seed: int) -> dict[str, float]:
    """Numbers of one method and seed: with the maximum softmax probability, and `chosen.` with its own score."""
    id_logits, labels = study.logits(method, seed, study.groups("id")[0]), study.labels(seed)
    score = study.score(method)
    scores: tuple[ScoreName, ...] = () if score == "msp" else (score,)
    evaluation = evaluate_logits(
        id_logits,
        labels,
        {
            group: {name: study.logits(method, seed, name) for name in study.groups(group)}
            for group in ("near", "far", "apart")
            if study.groups(group)
        },
        name=method,
        scores=scores,
        calibration=study.calibration(method, seed),
    )
    numbers = evaluation.numbers()
    found = {metric: numbers[metric] for metric in (*ID_METRICS, "all.mutual_information", "all.disagreement")}
    prefix = "" if score == "msp" else f"{score}:"
    places = [*MEANS, *(f"ood.{name}" for name in study.groups("near", "far", "apart"))]
    for place in places:
        for metric in DETECTION:
            found[f"{place}.{metric}"] = numbers[f"{place}.{metric}"]
            found[f"chosen.{place}.{metric}"] = numbers[f"{prefix}{place}.{metric}"]
    probs = Prediction.from_logits(id_logits, temperature=study.temperature(method, seed)).probs
    calibrated = {"brier": brier, "nll": nll, "ece": ece, "aece": adaptive_ece}
    found |= {f"calibrated.{name}": metric(probs, labels) for name, metric in calibrated.items()}
    return found


def largest_difference(first: Rows, second: Mapping[str, Mapping[str, list[float]]]) -> float:
    """How far two sets of rows are apart; infinite where they do not have the same entries."""
    if {method: set(row) for method, row in first.items()} != {method: set(row) for method, row in second.items()}:
        return float("inf")
    pairs = [
        (one, other)
        for method, row in first.items()
        for metric, values in row.items()
        for one, other in zip(values, second[method][metric], strict=True)
    ]
    return max((abs(one - other) for one, other in pairs), default=0.0)
