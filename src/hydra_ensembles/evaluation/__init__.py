"""Evaluation of any model: one pass over each set, one value per sample and quantity, every number from these."""

from .evaluate import evaluate
from .evaluation import Answers, Classification, Detection, Evaluation, ModelInfo, OodSet, Selective

__all__ = ["Answers", "Classification", "Detection", "Evaluation", "ModelInfo", "OodSet", "Selective", "evaluate"]
