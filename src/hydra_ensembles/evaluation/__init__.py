"""Evaluation of any ensemble: one pass over each set, every metric, saved as JSON."""

from .evaluate import evaluate, evaluate_logits
from .evaluation import (
    Classification,
    Curve,
    Detection,
    Evaluation,
    Figures,
    GalleryItem,
    LabelledLogits,
    MemberLogits,
    ModelInfo,
    OodSet,
    Provenance,
    Reliability,
    Selective,
)

__all__ = [
    "Classification",
    "Curve",
    "Detection",
    "Evaluation",
    "Figures",
    "GalleryItem",
    "LabelledLogits",
    "MemberLogits",
    "ModelInfo",
    "OodSet",
    "Provenance",
    "Reliability",
    "Selective",
    "evaluate",
    "evaluate_logits",
]
