"""The paper's own zero-shot numbers (OpenCLIP ViT-B/32), read off its Tables 3, 24 to 28."""

from collections.abc import Mapping
from types import MappingProxyType

from .methods import (
    CIRC_AVG,
    HYDRA,
    HYDRA_IMAGE,
    HYDRA_IMAGE_TUNED,
    HYDRA_MORE,
    HYDRA_TEMPERATURE,
    SINGLE,
    TAYLOR,
    TEMPERATURE,
)

Numbers = Mapping[str, float]
_CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
_DETECTION = tuple(f"{group}.{metric}" for group in ("near", "far", "all") for metric in ("auroc", "fpr95", "aupr"))
_PERCENT = ("accuracy", "ece", "aece", "auroc", "fpr95", "aupr")


def _row(names: tuple[str, ...], text: str) -> dict[str, float]:
    """Numbers by name; a dash stands for one that the paper does not give."""
    found = {name: float(part) for name, part in zip(names, text.split(), strict=True) if part != "-"}
    return {name: value / 100 if name.rpartition(".")[2] in _PERCENT else value for name, value in found.items()}


def _classified(text: str) -> dict[str, float]:
    return _row(_CLASSIFICATION, text)


def _detected(text: str) -> dict[str, float]:
    return _row(_DETECTION, text)


AVERAGE: Mapping[str, Numbers] = MappingProxyType(
    {
        SINGLE: _classified("73.65 0.36 0.98 8.68 8.57"),
        TEMPERATURE: _classified("73.65 0.36 0.90 4.03 3.80"),
        "BayesVLM": _classified("73.15 0.36 0.95 6.08 5.84"),
        "ViLU": _classified("- - - 9.50 8.86"),
        TAYLOR: _classified("60.75 0.53 1.65 13.76 13.67"),
        CIRC_AVG: _classified("71.91 0.38 0.99 4.00 4.11"),
        HYDRA: _classified("74.00 0.36 0.93 3.49 3.35"),
        HYDRA_TEMPERATURE: _classified("- - 0.90 - -"),
        HYDRA_MORE: _classified("74.03 - 0.94 3.44 -"),
        HYDRA_IMAGE: _classified("72.92 - 1.00 6.21 -"),
        HYDRA_IMAGE_TUNED: _classified("73.44 - 0.95 5.32 -"),
    }
)
"""Classification, mean over the paper's nine data sets (Tables 3, 24, 27; the text of E.3.1)."""

DETECTED: Mapping[str, Mapping[str, Numbers]] = MappingProxyType(
    {
        "ImageNet-1K": {
            SINGLE: _detected("66.37 80.12 41.79 75.15 70.30 33.69 70.76 75.20 37.73"),
            TEMPERATURE: _detected("- - - - - - 70.76 75.20 37.73"),
            "BayesVLM": _detected("66.93 79.59 42.15 76.75 69.72 36.03 71.84 74.65 39.08"),
            "ViLU": _detected("70.29 79.41 45.40 80.48 63.77 42.24 75.38 71.59 43.81"),
            TAYLOR: _detected("64.21 81.97 40.07 70.68 76.85 27.22 67.44 79.41 33.64"),
            CIRC_AVG: _detected("70.99 76.13 46.95 82.78 60.39 48.34 76.88 68.26 47.64"),
            HYDRA: _detected("70.90 75.54 46.90 82.75 60.57 48.81 76.82 68.05 47.85"),
            HYDRA_MORE: _detected("70.93 75.31 46.86 82.71 60.68 48.52 76.82 67.99 47.69"),
            HYDRA_IMAGE: _detected("66.61 80.52 41.90 78.43 63.68 37.49 72.51 72.10 39.69"),
            HYDRA_IMAGE_TUNED: _detected("65.83 81.10 41.37 78.31 66.59 38.88 72.07 73.84 40.12"),
        },
        "CIFAR-100": {
            SINGLE: _detected("78.08 60.59 71.70 83.99 46.63 86.67 82.01 51.28 81.67"),
            "BayesVLM": _detected("76.47 63.04 69.48 82.21 49.28 85.21 80.29 53.86 79.96"),
            "ViLU": _detected("76.50 67.93 69.95 78.84 58.36 89.17 78.05 61.54 82.76"),
            TAYLOR: _detected("59.26 86.91 53.87 48.00 83.59 67.38 51.75 84.69 62.87"),
            CIRC_AVG: _detected("78.84 55.67 70.41 85.51 41.10 83.28 83.28 45.95 82.00"),
            HYDRA: _detected("79.78 55.42 71.62 82.64 44.66 84.89 81.68 48.24 80.46"),
            HYDRA_MORE: _detected("78.79 56.67 70.59 82.56 45.09 84.52 81.30 48.95 79.88"),
            HYDRA_IMAGE: _detected("77.00 63.15 70.91 83.58 48.83 86.92 81.38 53.60 81.58"),
            HYDRA_IMAGE_TUNED: _detected("78.15 60.76 71.64 83.67 46.76 86.48 81.82 51.42 81.53"),
        },
    }
)
"""OOD detection with the maximum softmax probability (Tables 25, 26, 28), by ID data set."""

COLUMN_OF: Mapping[str, str] = MappingProxyType(
    {"tinyimagenet": "ImageNet-1K", "imagenet": "ImageNet-1K", "cifar100": "CIFAR-100"}
)
"""The ID set of the paper that a task of ours stands for."""

NOT_TESTABLE: tuple[tuple[str, str], ...] = (
    ("Hydra (Circ) against BayesVLM and ViLU (Tables 3, 24 to 26)", "these baselines are not built yet"),
    ("Levels of any number in Tables 24 to 28", "no CLIP checkpoint is to be had here; the model is another"),
    ("ImageNet-1K, Food101, SUN397 (Table 24)", "the sets are not to be had here; `--suite paper` runs them"),
    ("SSB-Hard, NINCO, iNaturalist, SVHN, Places365 (Tables 25, 26)", "the sets are not to be had here"),
    ("Fine-tuning on 60 M pairs of LAION-400M (D.3)", "22,000 images with captions of class names stand for them"),
)
"""What this data and this model cannot test, and why."""
