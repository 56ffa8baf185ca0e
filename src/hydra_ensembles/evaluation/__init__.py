"""Evaluation of any model: one pass over each set, one value per sample and quantity, every number from these."""

from .evaluate import evaluate
from .evaluation import Answers, Evaluation, ModelInfo

__all__ = ["Answers", "Evaluation", "ModelInfo", "evaluate"]
