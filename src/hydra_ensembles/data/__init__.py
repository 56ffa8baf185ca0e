"""Data for tests, studies and training: loading, subsets, batches, near and far suites, corruptions."""

from ..preprocessing import to_rgb
from ..training.recipe import RandAugment
from .batching import Batches, BatchLoader, TrainTransform, batches
from .corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupted
from .dataset import Dataset, ImageDataset, TextDataset, keyed_order, only_classes, split, subset, without_classes
from .loading import Columns, load, load_image_folder, load_image_list
from .suites import SUITES, SetRef, Suite, imagenet_validation_split, suite

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "SUITES",
    "BatchLoader",
    "Batches",
    "Columns",
    "Dataset",
    "ImageDataset",
    "RandAugment",
    "SetRef",
    "Suite",
    "TextDataset",
    "TrainTransform",
    "batches",
    "corrupt",
    "corrupted",
    "imagenet_validation_split",
    "keyed_order",
    "load",
    "load_image_folder",
    "load_image_list",
    "only_classes",
    "split",
    "subset",
    "suite",
    "to_rgb",
    "without_classes",
]
