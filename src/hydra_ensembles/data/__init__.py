"""Data for training and evaluation: loading, subsets, batches, and OOD sets made from ID data."""

from .dataset import (
    BatchLoader,
    Dataset,
    ImageDataset,
    TextDataset,
    TrainTransform,
    batches,
    only_classes,
    split,
    subset,
    without_classes,
)
from .loading import Columns, load
from .synthetic import synthetic_ood

__all__ = [
    "BatchLoader", "Columns", "Dataset", "ImageDataset",
    "TextDataset", "TrainTransform", "batches",
    "load", "only_classes", "split", "subset", "synthetic_ood", "without_classes",
]  # fmt: skip
