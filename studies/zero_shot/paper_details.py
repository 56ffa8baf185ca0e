"""The paper's zero-shot numbers set by set (Tables 24 to 27); rows that do not give their own mean are left out."""

from collections.abc import Mapping
from types import MappingProxyType

from .methods import CIRC_AVG, HYDRA, HYDRA_IMAGE, HYDRA_IMAGE_TUNED, HYDRA_MORE, SINGLE, TAYLOR, TEMPERATURE

COLUMNS = ("IN-1K", "C100", "C10", "Food", "SUN", "Pet", "DTD", "EuroSat", "Caltech", "Avg")
TASK_COLUMN: Mapping[str, str] = MappingProxyType(
    {
        "tinyimagenet": "IN-1K",
        "imagenet": "IN-1K",
        "cifar100": "C100",
        "cifar10": "C10",
        "food101": "Food",
        "scene15": "SUN",
        "sun397": "SUN",
        "pets": "Pet",
        "dtd10": "DTD",
        "dtd": "DTD",
        "eurosat": "EuroSat",
        "caltech101": "Caltech",
    }
)
"""The data set of the paper that a task of ours is, or stands for."""

_TASKS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "accuracy": {
            SINGLE: "66.13 75.59 93.68 82.02 68.10 87.27 50.48 40.95 98.62 73.65",
            "BayesVLM": "65.89 71.14 93.75 82.24 67.70 86.97 50.21 41.78 98.62 73.15",
            TAYLOR: "58.92 37.11 64.49 67.18 63.38 82.83 49.31 25.52 97.97 60.75",
            CIRC_AVG: "64.29 71.79 91.75 79.63 65.67 86.21 50.90 38.94 98.05 71.91",
            HYDRA: "66.20 74.87 93.46 80.50 68.65 87.84 53.88 41.94 98.62 74.00",
            HYDRA_MORE: "66.11 74.14 93.31 80.28 68.57 87.54 52.34 45.35 98.62 74.03",
            HYDRA_IMAGE: "64.48 75.70 93.53 78.61 67.25 86.73 51.28 40.06 98.62 72.92",
            HYDRA_IMAGE_TUNED: "64.25 75.71 93.25 79.89 66.44 87.14 50.64 45.16 98.46 73.44",
        },
        "brier": {
            SINGLE: "0.47 0.34 0.10 0.26 0.45 0.19 0.67 0.76 0.02 0.36",
            TEMPERATURE: "0.46 0.33 0.10 0.26 0.44 0.19 0.64 0.71 0.02 0.35",
            "BayesVLM": "0.47 0.39 0.09 0.25 0.45 0.19 0.66 0.73 0.02 0.36",
            TAYLOR: "0.57 0.82 0.47 0.46 0.51 0.25 0.70 0.96 0.04 0.53",
            HYDRA: "0.46 0.35 0.10 0.28 0.44 0.18 0.64 0.71 0.05 0.36",
        },
        "nll": {
            TEMPERATURE: "1.31 0.85 0.20 0.63 1.07 0.52 1.79 1.66 0.03 0.90",
            "BayesVLM": "1.35 1.07 0.20 0.62 1.10 0.54 1.89 1.73 0.03 0.95",
            TAYLOR: "1.82 3.38 1.10 1.33 1.36 0.70 2.18 2.85 0.08 1.65",
            HYDRA: "1.36 0.94 0.22 0.70 1.08 0.42 1.80 1.78 0.10 0.93",
            HYDRA_MORE: "1.37 0.96 0.22 0.72 1.09 0.43 1.84 1.74 0.11 0.94",
            HYDRA_IMAGE: "1.47 0.86 0.20 0.78 1.16 0.60 2.01 1.87 0.07 1.00",
            HYDRA_IMAGE_TUNED: "1.47 0.85 0.21 0.71 1.17 0.59 2.01 1.53 0.05 0.95",
        },
        "ece": {
            SINGLE: "10.00 7.18 1.65 4.00 9.88 1.73 18.21 23.93 1.52 8.68",
            TEMPERATURE: "1.65 0.85 1.04 3.12 1.07 3.92 6.78 15.49 2.38 4.03",
            "BayesVLM": "5.43 5.28 0.85 0.84 5.87 1.79 13.88 18.98 1.83 6.08",
            "ViLU": "52.20 3.40 0.50 1.00 6.60 6.60 4.00 10.00 1.20 9.50",
            HYDRA: "1.82 2.34 1.31 1.68 1.89 2.41 6.58 7.73 5.65 3.49",
            HYDRA_MORE: "1.83 2.87 1.70 2.79 1.32 2.79 6.80 5.57 5.30 3.44",
            HYDRA_IMAGE: "6.98 3.32 0.70 0.93 6.46 1.62 13.78 20.76 1.37 6.21",
            HYDRA_IMAGE_TUNED: "6.51 2.67 0.95 0.90 6.78 2.07 14.72 11.74 1.56 5.32",
        },
        "aece": {
            SINGLE: "10.00 7.10 1.53 3.99 9.87 1.79 18.21 23.93 0.66 8.57",
            TEMPERATURE: "1.60 0.76 1.04 3.12 1.19 3.87 6.74 15.25 0.65 3.80",
            "BayesVLM": "5.42 5.26 0.78 0.72 5.86 1.01 13.88 18.97 0.65 5.84",
            "ViLU": "49.40 2.60 0.20 0.90 6.50 5.50 3.90 9.30 1.40 8.86",
            TAYLOR: "13.58 23.95 9.80 11.03 12.03 2.98 18.40 30.28 1.00 13.67",
            CIRC_AVG: "4.13 1.60 0.88 2.17 4.55 2.89 7.40 9.51 3.88 4.11",
            HYDRA: "1.76 2.44 1.59 1.63 1.60 2.31 6.23 7.74 4.86 3.35",
        },
    }
)


def paper_task_row(metric: str, method: str) -> dict[str, float] | None:
    """A row of Table 24 or 27 by column, shares as fractions; None where the paper has no such row."""
    text = _TASKS[metric].get(method)
    if text is None:
        return None
    whole = 1.0 if metric in ("brier", "nll") else 100.0
    return {column: float(part) / whole for column, part in zip(COLUMNS, text.split(), strict=True)}


_SETS: Mapping[str, Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "ImageNet-1K": {
            "dtd10": {
                SINGLE: "73.88 75.35 26.79",
                "BayesVLM": "74.51 75.80 27.69",
                "ViLU": "77.87 66.55 29.58",
                TAYLOR: "70.80 76.68 21.06",
                CIRC_AVG: "76.42 75.20 30.66",
                HYDRA: "76.69 77.49 32.71",
            },
        },
        "CIFAR-100": {
            "cifar10": {
                SINGLE: "78.06 62.80 76.40",
                "BayesVLM": "76.54 64.74 74.74",
                "ViLU": "76.17 70.49 74.66",
                TAYLOR: "59.14 92.39 60.57",
                CIRC_AVG: "78.07 52.77 72.78",
                HYDRA: "79.24 53.48 74.92",
            },
            "tinyimagenet": {
                SINGLE: "78.10 58.38 67.01",
                "BayesVLM": "76.39 61.34 64.23",
                "ViLU": "76.82 65.37 65.24",
                TAYLOR: "59.38 81.42 47.18",
                CIRC_AVG: "79.61 58.57 68.05",
                HYDRA: "80.32 57.37 68.32",
            },
            "mnist": {
                SINGLE: "97.03 14.16 98.84",
                "BayesVLM": "87.55 40.53 97.29",
                "ViLU": "92.23 25.03 95.83",
                TAYLOR: "35.87 86.68 82.28",
                CIRC_AVG: "85.43 29.92 95.51",
                HYDRA: "82.80 37.34 94.64",
            },
        },
    }
)


def paper_set_numbers(column: str, method: str) -> dict[str, float]:
    """Numbers of Table 25 or 26 on sets that we have as well, as `SET.metric`; DTD10 stands for Texture."""
    found = {}
    for name, rows in _SETS.get(column, {}).items():
        if method in rows:
            for metric, part in zip(("auroc", "fpr95", "aupr"), rows[method].split(), strict=True):
                found[f"{name}.{metric}"] = float(part) / 100
    return found
