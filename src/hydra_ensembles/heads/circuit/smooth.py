"""The integers of candidates counted by degrees: a sample near the edge counts as half on the other side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..head import Head
from .answers import AnswerTable
from .samples import IntArray, Samples
from .scores import Objective, log_odds

_SOFTNESS = 0.1  # width of a smoothed step, in standard deviations of the log-odds


def smooth_values(objective: Objective, of_label: Tensor | None, of_answer: Tensor | None) -> Tensor:
    """Smooth counterparts of the integers to minimise, `[K]`.

    Args:
        objective: What to minimise.
        of_label: `[K, n_id]`, log-odds of the labels; not used for `ood`.
        of_answer: `[K, n]`, log-odds of the answers; not used for `acc`.
    """
    values: Tensor | None = None
    if of_answer is not None and objective.score != "acc":
        split = objective.id_count
        scaled = of_answer / _softness(of_answer)
        pairs = [torch.sigmoid(one[None, split:] - one[:split, None]).sum() for one in scaled]  # over [n_id, n_ood]
        values = 2 * torch.stack(pairs)
    if of_label is not None and objective.score != "ood":
        errors = torch.sigmoid(-of_label / _softness(of_label)).sum(1)
        values = errors if values is None else values + 2 * objective.ood_count * errors
    assert values is not None
    return values


def _softness(odds: Tensor) -> Tensor:
    """Width of a smoothed step for log-odds `[K, R]`, the same for all candidates."""
    return _SOFTNESS * odds.std(1).median().clamp(min=1e-6)


class SmoothTable(AnswerTable):
    """An answer table that also keeps the log-odds of answers and labels."""

    def __init__(self, candidates: Sequence[Head], samples: Samples, objective: Objective, dtype: torch.dtype) -> None:
        super().__init__(candidates, samples, objective, dtype)
        device = samples.labels.device
        self.of_answer = torch.zeros(len(candidates), objective.samples, device=device)
        self.of_label = torch.zeros(len(candidates), objective.samples, device=device)

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""
        super().record(candidates, numbers, logits)
        rows, columns = (
            torch.from_numpy(index).to(logits.device, non_blocking=True) for index in (candidates, numbers)
        )
        logits = logits.float()
        labels = self.samples.labels[columns].clamp(min=0)  # OOD samples have none, and theirs are not used
        self.of_answer[rows, columns] = log_odds(logits, logits.argmax(-1))
        self.of_label[rows, columns] = log_odds(logits, labels)

    def smooth_values(self, candidates: IntArray) -> list[float]:
        """Smooth values of candidates that were evaluated on all samples; an error if one is not finite."""
        self.counts(candidates)
        rows = torch.from_numpy(candidates).to(self.of_answer.device)
        of_label = self.of_label[rows, : self.objective.id_count]
        return [float(value) for value in smooth_values(self.objective, of_label, self.of_answer[rows]).tolist()]
