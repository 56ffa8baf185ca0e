"""Metrics of a classifier's predictions: pure functions on tensors, independent of any model."""

from .bootstrap import Interval, paired
from .conformal import LabelSets, Reference, conformal_threshold, fit_sets, p_values
from .ood import OodMetric, aupr, aurc, auroc, fpr95, risk_at_coverage, risk_coverage, roc_curve
from .probabilities import (
    Convention,
    accuracy,
    adaptive_ece,
    adaptive_ece_of_confidence,
    brier,
    brier_per_sample,
    disagreement,
    ece,
    ece_of_confidence,
    entropy_parts,
    mutual_information,
    nll,
    nll_per_sample,
    reliability_bins,
    top_label,
)

__all__ = [
    "Convention", "Interval", "LabelSets", "OodMetric", "Reference", "accuracy", "adaptive_ece",
    "adaptive_ece_of_confidence", "aupr", "aurc", "auroc", "brier", "brier_per_sample", "conformal_threshold",
    "disagreement", "ece", "ece_of_confidence", "entropy_parts", "fit_sets",
    "fpr95", "mutual_information", "nll", "nll_per_sample", "p_values", "paired", "reliability_bins",
    "risk_at_coverage", "risk_coverage", "roc_curve", "top_label",
]  # fmt: skip
