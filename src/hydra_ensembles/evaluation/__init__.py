"""Evaluation of any ensemble: one pass over each set, every metric, saved as JSON."""

from .curves import Curve, Figures, Reliability
from .evaluate import evaluate, evaluate_logits, evaluate_stored
from .evaluation import (
    Classification,
    Detection,
    Evaluation,
    GalleryItem,
    LabelledLogits,
    MemberLogits,
    ModelInfo,
    OodSet,
    Provenance,
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
    "evaluate_stored",
]
