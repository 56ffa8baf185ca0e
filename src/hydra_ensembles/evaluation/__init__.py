"""Evaluation of any ensemble: one pass over each set, every metric, saved as JSON."""

from .atlas import Atlas, AtlasInput, Changed, HeadEffect, Quality, atlas
from .evaluate import evaluate, evaluate_logits
from .evaluation import (
    Classification,
    Curve,
    Detection,
    Evaluation,
    Figures,
    GalleryItem,
    ModelInfo,
    OodSet,
    Provenance,
    Reliability,
    Selective,
)
from .logits import LabelledLogits, MemberLogits

__all__ = [
    "Atlas", "AtlasInput", "Changed", "Classification", "Curve", "Detection", "Evaluation", "Figures",
    "GalleryItem", "HeadEffect", "LabelledLogits", "MemberLogits", "ModelInfo", "OodSet", "Provenance", "Quality",
    "Reliability", "Selective", "atlas", "evaluate", "evaluate_logits",
]  # fmt: skip
