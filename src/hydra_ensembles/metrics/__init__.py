"""Metrics of a classifier's predictions: pure functions on tensors, independent of any model."""

from .bootstrap import Interval, paired
from .conformal import Reference, conformal_threshold
from .ood import OodMetric, augrc, aupr, aurc, auroc, fpr95, risk_coverage
from .probabilities import Convention, accuracy, adaptive_ece, brier, ece, nll, top_label

__all__ = [
    "Convention", "Interval", "OodMetric", "Reference", "accuracy", "adaptive_ece", "augrc", "aupr", "aurc", "auroc",
    "brier", "conformal_threshold", "ece", "fpr95", "nll", "paired",
    "risk_coverage", "top_label",
]  # fmt: skip
