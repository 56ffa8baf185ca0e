"""Evaluation of any ensemble: one pass over each set, every metric, saved as JSON."""

from .core import evaluate_logits, evaluate_stored
from .evaluate import evaluate
from .evaluation import Evaluation
from .figures import Curve, Figures, Reliability
from .gallery import GalleryItem
from .logits import LabelledLogits, MemberLogits
from .results import Classification, Detection, ModelInfo, OodSet, Provenance, Selective

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
