"""Data for tests, studies and training: loading, subsets, batches, near and far suites, corruptions."""

from .corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupted
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
from .loading import Columns, SetRef, Suite, all_suites, load, suite
from .synthetic import synthetic_ood

__all__ = [
    "CORRUPTIONS", "SEVERITIES", "BatchLoader", "Columns", "Dataset", "ImageDataset",
    "SetRef", "Suite", "TextDataset", "TrainTransform", "all_suites", "batches", "corrupt", "corrupted",
    "load", "only_classes", "split", "subset", "suite", "synthetic_ood", "without_classes",
]  # fmt: skip
