"""Hydra (Circ), its trunk and the controls of a study against the methods that matter, by a paired bootstrap."""

from .claims import Replicates
from .methods import DEEP, HYDRA, HYDRA_TRUNK, SINGLE
from .rows import DIGITS, Rows

METRICS = ("all.auroc", "accuracy", "ece")
BASES = (SINGLE, DEEP, HYDRA)


def contrasts(replicates: Replicates, controls: tuple[str, ...]) -> Rows:
    """First minus second method: the mean over seeds and both ends of its interval, each with its own score.

    Returns:
        `contrasts[first][f"{metric} − {second}"] = [difference, low, high]`.
    """
    return {
        first: {
            f"{metric} − {second}": [
                round(value, DIGITS) for value in replicates.difference(metric, first, second, own_score=True)
            ]
            for metric in METRICS
            for second in BASES
            if second != first
        }
        for first in (HYDRA, HYDRA_TRUNK, *controls)
    }
