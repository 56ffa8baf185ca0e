"""What all candidates answered so far in a greedy step, on the device, with the bounds that follow from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..head import Head
from .naive import require_finite
from .samples import IntArray, Samples
from .scores import LEAST_CONFIDENT, MOST_CONFIDENT, Objective, judge, quantum


class AnswerTable:
    """Answers of K candidates to n samples.

    A sample that was not evaluated yet counts as right, as an ID sample as most confident, as an OOD sample
    as least confident. So the integers of a candidate never shrink as answers come in: they are lower bounds
    of its result, and its result once all samples are in.
    """

    def __init__(self, candidates: Sequence[Head], samples: Samples, objective: Objective, dtype: torch.dtype) -> None:
        self.candidates, self.samples, self.objective = candidates, samples, objective
        self.step = quantum(dtype)
        device, shape = samples.labels.device, (len(candidates), objective.samples)
        self.wrong = torch.empty(len(candidates), objective.id_count, dtype=torch.bool, device=device)
        self.confidence = torch.empty(shape, dtype=torch.int64, device=device)
        self.finite = torch.ones(shape, dtype=torch.bool, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self.wrong.fill_(False)
        self.confidence[:, : self.objective.id_count] = MOST_CONFIDENT
        self.confidence[:, self.objective.id_count :] = LEAST_CONFIDENT

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""
        rows, columns = (
            torch.from_numpy(index).to(logits.device, non_blocking=True) for index in (candidates, numbers)
        )
        wrong, confidence, finite = judge(logits, self.samples.labels[columns], self.step)
        self.confidence[rows, columns] = confidence
        self.finite[rows, columns] = finite
        is_id = numbers < self.objective.id_count
        if not is_id.all():
            chosen = torch.from_numpy(is_id.nonzero()[0]).to(logits.device, non_blocking=True)
            rows, columns, wrong = rows[chosen], columns[chosen], wrong[chosen]
        self.wrong[rows, columns] = wrong

    def counts(self, candidates: IntArray) -> list[tuple[int, int]]:
        """E and D over the answers so far of some candidates; an error if one of them was not finite."""
        rows = torch.from_numpy(candidates).to(self.wrong.device)
        errors, discordance = self.objective.count(self.wrong[rows], self.confidence[rows])
        finite = self.finite[rows].all()
        *pairs, fine = torch.stack([*(errors * _SHIFT + discordance), finite.long()]).tolist()  # one transfer
        if not fine:
            self._name_the_culprit(candidates)
        return [divmod(pair, _SHIFT) for pair in pairs]

    def _name_the_culprit(self, candidates: IntArray) -> None:
        for candidate in candidates:
            require_finite(self.finite[candidate], self.samples, self.candidates[candidate])


_SHIFT = 1 << 40
