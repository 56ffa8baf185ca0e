"""The paper's own numbers, read off its Tables 1, 2 and 15 to 17 (M = 3, maximum softmax probability).

Near and far of BatchEnsemble and LoRA Ensembles on ImageNet-1K are those of Tables 21 and 22: Table 15 mixes them up.
"""

from collections.abc import Mapping
from types import MappingProxyType

Column = str  # "ImageNet-1K", "CIFAR-100", "SST-2"

COLUMN_OF: Mapping[str, Column] = MappingProxyType(
    {"vision-cifar10": "CIFAR-100", "vision-tinyimagenet": "ImageNet-1K", "text-sst2": "SST-2"}
)
"""The column of the paper that each study stands for: few classes and little data, many classes, text."""

_METRICS = ("accuracy", "brier", "nll", "ece", "aece", "all.auroc", "all.fpr95", "all.aupr")
_GROUPS = ("near.auroc", "near.fpr95", "near.aupr", "far.auroc", "far.fpr95", "far.aupr")
_SHARES = ("accuracy", "auroc", "fpr95", "aupr")  # printed in percent


def _row(main: str, groups: str) -> dict[str, float]:
    numbers = zip((*_METRICS, *_GROUPS), map(float, f"{main} {groups}".split()), strict=True)
    return {metric: value / 100 if metric.rpartition(".")[2] in _SHARES else value for metric, value in numbers}


PAPER: Mapping[Column, Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "ImageNet-1K": {
            "Single": _row("80.67 0.27 0.71 0.01 0.01 84.40 50.25 60.91", "77.96 63.08 55.29 90.84 37.42 66.53"),
            "Deep Ensembles": _row(
                "82.19 0.25 0.65 0.01 0.01 85.48 46.93 62.76", "78.77 61.70 56.15 92.20 32.17 69.38"
            ),
            "MC Dropout": _row("80.3 0.28 0.73 0.02 0.02 83.7 51.44 58.9", "77.13 64.46 53.75 90.27 38.42 64.06"),
            "Packed Ensembles": _row(
                "79.23 0.29 0.78 0.01 0.01 83.26 51.65 58.17", "76.30 65.59 52.60 90.21 37.70 63.74"
            ),
            "MIMO": _row("80.59 0.27 0.72 0.01 0.01 83.63 52.64 59.14", "78.06 62.85 55.67 89.21 42.44 62.61"),
            "BatchEnsemble": _row("80.53 0.27 0.72 0.01 0.01 84.34 50.38 60.71", "78.00 62.98 55.20 90.69 37.79 66.22"),
            "LoRA Ensembles": _row(
                "80.68 0.27 0.71 0.01 0.01 84.24 50.59 60.35", "77.93 63.20 55.08 90.54 37.99 65.61"
            ),
            "OBA": _row("78.52 0.30 0.85 0.03 0.03 82.61 54.90 54.89", "76.81 67.43 52.69 88.42 42.37 57.09"),
            "Taylor": _row("80.68 0.28 0.79 0.02 0.02 84.38 54.51 59.46", "79.83 65.10 59.22 88.93 43.92 59.71"),
            "CircAvg": _row("80.22 0.28 0.77 0.02 0.02 85.71 50.23 62.41", "81.00 62.00 61.33 90.43 38.46 63.49"),
            "Hydra (Taylor)": _row(
                "81.20 0.26 0.75 0.01 0.01 85.36 50.50 60.75", "80.53 62.31 59.85 90.18 38.70 61.64"
            ),
            "Hydra (Circ)": _row("80.88 0.27 0.74 0.01 0.01 86.29 47.62 63.15", "81.39 60.10 61.45 91.19 35.14 64.85"),
        },
        "CIFAR-100": {
            "Single": _row("92.15 0.11 0.25 0.007 0.005 85.46 40.27 93.55", "89.63 37.96 89.71 84.41 40.85 94.51"),
            "Deep Ensembles": _row(
                "93.52 0.09 0.22 0.01 0.01 86.08 38.67 94.26", "90.88 34.73 91.09 84.88 39.65 95.06"
            ),
            "MC Dropout": _row("92.04 0.11 0.25 0.01 0.01 84.74 42.53 93.12", "88.88 41.03 88.97 83.71 42.91 94.16"),
            "Packed Ensembles": _row(
                "90.63 0.13 0.31 0.01 0.008 86.99 38.54 93.48", "88.07 40.13 87.36 86.72 38.14 95.01"
            ),
            "MIMO": _row("92.62 0.10 0.23 0.009 0.008 88.08 37.00 95.15", "91.58 34.67 92.24 87.21 37.58 95.87"),
            "BatchEnsemble": _row(
                "92.19 0.11 0.26 0.008 0.006 86.27 39.66 93.66", "89.35 39.14 89.39 85.50 39.79 94.72"
            ),
            "LoRA Ensembles": _row(
                "92.14 0.11 0.26 0.007 0.006 85.77 40.18 93.53", "89.47 38.56 89.52 84.85 40.58 94.53"
            ),
            "OBA": _row("91.88 0.11 0.26 0.007 0.005 85.85 40.48 93.41", "88.86 40.53 88.72 85.10 40.47 94.58"),
            "Taylor": _row("91.59 0.12 0.31 0.01 0.01 88.79 40.35 95.03", "91.47 33.33 91.98 88.12 42.10 95.79"),
            "CircAvg": _row("91.67 0.12 0.30 0.01 0.01 89.77 37.79 95.21", "91.47 34.33 91.91 89.34 38.65 96.04"),
            "Hydra (Taylor)": _row(
                "92.00 0.11 0.28 0.008 0.007 88.89 39.57 95.46", "91.96 33.11 92.51 88.13 41.19 96.20"
            ),
            "Hydra (Circ)": _row(
                "92.11 0.12 0.28 0.008 0.006 89.43 36.44 95.17", "91.62 32.92 91.84 88.89 37.32 96.00"
            ),
        },
        "SST-2": {
            "Single": _row("92.55 0.12 0.27 0.05 0.04 70.16 70.62 81.93", "59.45 88.13 99.08 74.45 63.62 75.07"),
            "Deep Ensembles (classifiers)": _row(
                "93 0.11 0.24 0.04 0.04 74.81 62.69 84.9", "61.42 85.89 99.16 80.16 53.41 79.20"
            ),
            "MC Dropout": _row("92.55 0.13 0.31 0.05 0.04 72.23 67.36 81.96", "62.31 87.21 99.19 76.20 59.42 75.07"),
            "LoRA Ensembles": _row("92.89 0.12 0.28 0.05 0.04 70.83 68.7 82.27", "59.83 86.12 99.08 75.23 61.74 75.55"),
            "Taylor": _row("92.43 0.13 0.35 0.06 0.06 70.95 68.57 82.11", "58.64 90.54 99.07 75.88 59.79 75.32"),
            "CircAvg": _row("92.78 0.13 0.33 0.05 0.05 75.04 56.22 84.18", "63.26 75.23 99.16 79.76 48.62 78.19"),
            "Hydra (Taylor)": _row("93 0.12 0.29 0.05 0.04 71.85 62.59 82.44", "60.14 80.33 99.08 76.54 55.50 75.79"),
            "Hydra (Circ)": _row("92.55 0.12 0.24 0.04 0.04 77.6 55.06 84.16", "70.97 69.38 99.37 80.25 49.33 78.07"),
        },
    }
)
"""By column, method and metric; shares as fractions."""

NOT_TESTABLE: tuple[tuple[str, str], ...] = (
    ("Packed Ensembles, MIMO, BatchEnsemble, LoRA Ensembles, OBA (Tables 1, 2)", "these baselines are not built yet"),
    ("Deep Ensembles of independently pretrained models (Table 1)", "one pretraining of each backbone is to be had"),
    ("Places365, SVHN, iNaturalist, NINCO, SSB-Hard (Tables 21 to 23)", "the sets are not to be had here"),
    ("Corruptions of ImageNet-C (Tables 13, 14)", "ImageNet is not to be had here"),
)
"""Claims of the paper that this data and these models cannot test, and why."""
