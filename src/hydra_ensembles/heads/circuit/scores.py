"""Scores as integers: errors, and pairs in the wrong order.

Two candidates often differ by a single sample, so they are compared by whole numbers and not by means:

* `acc`: E, the number of wrong in-distribution (ID) samples;
* `ood`: D, twice the number of (ID, OOD) pairs in which the OOD sample is the more confident one, plus the
  number of ties, so that AUROC = 1 - D / (2 · n_id · n_ood);
* `avg`: E · 2 · n_ood + D, which is 2 · n_id · n_ood times the sum of both shortfalls.

Confidence is the maximum softmax probability (MSP), held as its log-odds, log(p / (1 - p)): the same order,
but confident samples do not pile up at 1. Two ways to compute the same logits differ in the last bits, which
must not decide whether two samples tie. So log-odds are rounded to a grid (`quantum`) far above rounding
noise and far below any difference that matters, and logits within 1/256 of a grid step of the largest tie
with it; the first of them is the answer.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .settings import Score

MOST_CONFIDENT = torch.iinfo(torch.int64).max
LEAST_CONFIDENT = torch.iinfo(torch.int64).min
_LARGEST_LOG_ODDS = 2.0**30


def quantum(dtype: torch.dtype) -> float:
    """Grid step of log-odds computed in `dtype`: 2^-30 for float64, 2^-12 for float32, 2^-5 for half precision."""
    return {torch.float64: 2.0**-30, torch.float32: 2.0**-12}.get(dtype, 2.0**-5)


def judge(logits: Tensor, labels: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """What counts about the answers to some samples.

    Args:
        logits: `[B, C]`, C at least 2.
        labels: `[B]`; -1 for OOD samples.
        step: The grid step, from `quantum` of the dtype in which the logits were computed.

    Returns:
        Three tensors `[B]`: whether the answer is wrong, the confidence in grid steps (int64), and whether all
        logits are finite.
    """
    precise = logits.double()
    largest = precise.amax(-1, keepdim=True)
    answer = (precise >= largest - step / 256).int().argmax(-1)  # the first of those that tie
    odds = log_odds(precise, answer).clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    confidence = (odds / step).round().nan_to_num().long()
    return answer != labels, confidence, precise.isfinite().all(-1)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the logit of the label lies above the largest other one, `[B]`, in float64; 0 for OOD samples."""
    precise, known = logits.double(), labels.clamp(min=0)[:, None]
    others = precise.scatter(-1, known, -torch.inf).amax(-1)
    return torch.where(labels < 0, 0.0, precise.gather(-1, known)[:, 0] - others)


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """log(p / (1 - p)) of one class for each row: `[B, C]` and `[B]` to `[B]`."""
    chosen = classes[..., None]
    others = logits.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return logits.gather(-1, chosen)[..., 0] - others


def discordances(id_confidence: Tensor, ood_confidence: Tensor) -> Tensor:
    """D of many candidates at once: `[K, n_id]` and `[K, n_ood]` to `[K]`.

    The same count as `hydra_ensembles.metrics.discordance` gives for one candidate.
    """
    ordered = id_confidence.sort(-1).values
    values = ood_confidence.contiguous()
    less = torch.searchsorted(ordered, values)  # ID samples less confident than each OOD sample
    less_or_equal = torch.searchsorted(ordered, values, right=True)
    return (less + less_or_equal).sum(-1)


@dataclass(frozen=True)
class Objective:
    """The integer to minimise, and the score S it stands for."""

    score: Score
    id_count: int
    ood_count: int

    @property
    def samples(self) -> int:
        """Samples a candidate is evaluated on: ID first, then OOD (none for `acc`)."""
        return self.id_count + self.ood_count

    def count(self, wrong: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """E and D of candidates, from answers `[K, n_id]` and confidences `[K, n]`; D is 0 for `acc`."""
        errors = wrong.sum(-1)
        if self.score == "acc":
            return errors, torch.zeros_like(errors)
        return errors, discordances(confidence[:, : self.id_count], confidence[:, self.id_count :])

    def value(self, errors: int, discordance: int) -> int:
        """The integer to minimise."""
        if self.score == "acc":
            return errors
        return discordance + (2 * self.ood_count * errors if self.score == "avg" else 0)

    def achieved(self, errors: int, discordance: int) -> float:
        """S: accuracy, AUROC, or their mean."""
        accuracy = (self.id_count - errors) / self.id_count
        if self.score == "acc":
            return accuracy
        pairs = 2 * self.id_count * self.ood_count
        auroc = (pairs - discordance) / pairs
        return auroc if self.score == "ood" else (accuracy + auroc) / 2

    def hardest_first(self, wrong: Tensor, confidence: Tensor) -> npt.NDArray[np.int64]:
        """Sample numbers in the order in which a bound grows fastest, judged by one model's answers.

        Samples come first that add most to the integer of that model; among those that add nothing, ID
        samples with little confidence and OOD samples with much.

        Args:
            wrong: `[n_id]`.
            confidence: `[n]`.
        """
        id_confidence, ood_confidence = confidence[: self.id_count], confidence[self.id_count :]
        doubt = torch.cat([-id_confidence, ood_confidence]).cpu().numpy()
        if self.score == "acc":
            added = wrong.long()
        else:
            id_added, ood_added = _discordance_of_each(id_confidence, ood_confidence)
            if self.score == "avg":
                id_added = id_added + 2 * self.ood_count * wrong.long()
            added = torch.cat([id_added, ood_added])
        return np.lexsort((-doubt, -added.cpu().numpy()))


def _discordance_of_each(id_confidence: Tensor, ood_confidence: Tensor) -> tuple[Tensor, Tensor]:
    """How much each ID and each OOD sample adds to D."""
    id_ordered, ood_ordered = id_confidence.sort().values, ood_confidence.sort().values
    of_ood = torch.searchsorted(id_ordered, ood_confidence)
    of_ood = of_ood + torch.searchsorted(id_ordered, ood_confidence, right=True)
    of_id = 2 * len(ood_ordered) - torch.searchsorted(ood_ordered, id_confidence)
    of_id = of_id - torch.searchsorted(ood_ordered, id_confidence, right=True)
    return of_id, of_ood
