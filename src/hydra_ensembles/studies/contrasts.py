"""What the controls of a study are away from the methods that they explain, with paired bootstrap intervals."""

from .claims import Replicates
from .methods import DEEP, HYDRA, SINGLE
from .results import StoredStudy
from .rows import DIGITS, Rows

METRICS = ("all.auroc", "accuracy", "ece")
BASES = (SINGLE, DEEP, HYDRA)


def control_contrasts(study: StoredStudy, controls: tuple[str, ...], replicates: Replicates) -> Rows:
    """Control minus method: the mean over seeds and both ends of its interval, each method with its own score.

    Returns:
        `contrasts[control][f"{metric} − {method}"] = [difference, low, high]`.
    """
    return {
        control: {
            f"{metric} − {base}": [
                round(value, DIGITS) for value in replicates.difference(metric, control, base, own_score=True)
            ]
            for metric in METRICS
            for base in BASES
        }
        for control in controls
        if control in study.methods
    }
