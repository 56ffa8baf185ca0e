"""What switching each head off does to every sample, as far as it was measured or predicted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..head import Head
from .current import CurrentModel
from .naive import require_finite
from .samples import IntArray
from .scores import judge, margins, quantum


class Effects:
    """Shifts of the margin and the confidence of every sample, one row for each candidate.

    Shifts are remembered from step to step: a head changes a sample by about as much after another head has
    gone. Added to the answers of the current model they give an estimate of the integers of a candidate; of
    one that was just measured on all samples, the integers themselves.

    Args:
        current: The model with all heads chosen so far taken out.
    """

    def __init__(self, current: CurrentModel) -> None:
        self.current, self.objective = current, current.objective
        self.step = quantum(current.model.ensemble.dtype)
        shape = (len(current.candidates), self.objective.samples)
        self.confidence = torch.zeros(shape, dtype=torch.int64, device=current.device)  # in grid steps
        self.margin = torch.zeros(shape, dtype=torch.float64, device=current.device)
        self.finite = torch.ones(shape, dtype=torch.bool, device=current.device)
        self._predicted_confidence = torch.zeros_like(self.confidence)
        self._predicted_margin = torch.zeros_like(self.margin)

    def forget(self) -> None:
        """Forget all measurements and predictions."""
        for known in (self.confidence, self.margin, self._predicted_confidence, self._predicted_margin):
            known.zero_()

    def predict(self, rows: Tensor, numbers: IntArray, confidence: Tensor | None, margin: Tensor) -> None:
        """Take in a prediction: what is remembered changes by as much as the prediction has changed.

        Args:
            rows: `[R]`, the candidates.
            numbers: `[S]`, the samples.
            confidence: `[R, S]`, shifts of log-odds; None where confidence does not count.
            margin: `[R, S]`.
        """
        where = rows[:, None], torch.from_numpy(numbers).to(rows.device)
        if confidence is not None:
            steps = (confidence / self.step).round().long()
            self.confidence[where] += steps - self._predicted_confidence[where]
            self._predicted_confidence[where] = steps
        self.margin[where] += margin - self._predicted_margin[where]
        self._predicted_margin[where] = margin

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""
        rows, columns = (
            torch.from_numpy(index).to(logits.device, non_blocking=True) for index in (candidates, numbers)
        )
        labels = self.current.samples.labels[columns]
        _, confidence, finite = judge(logits, labels, self.step)
        self.confidence[rows, columns] = confidence - self.current.confidence[columns]
        self.margin[rows, columns] = (margins(logits, labels) - self.current.margin[columns]).nan_to_num()
        self.finite[rows, columns] = finite

    def read(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All that is known of some candidates, on the host: what other ranks need to `write` it."""
        return self.confidence[rows].cpu(), self.margin[rows].cpu(), self.finite[rows].cpu()

    def write(self, rows: Sequence[int], known: tuple[Tensor, Tensor, Tensor]) -> None:
        """Take in what another rank has read."""
        for own, theirs in zip((self.confidence, self.margin, self.finite), known, strict=True):
            own[rows] = theirs.to(own.device)

    def best_first(self, candidates: Sequence[Head]) -> list[Head]:
        """Candidates by the integers they are expected to have; ties go to the one with the larger margins.

        Raises:
            DataError: A candidate gave logits that are not finite.
        """
        current, objective = self.current, self.objective
        rows = torch.tensor([current.index_of[head] for head in candidates], device=current.device)
        margin = (current.margin + self.margin[rows])[:, : objective.id_count]
        errors, discordance = objective.count(margin < 0, current.confidence + self.confidence[rows])
        nearly = torch.sigmoid(-margin / _softness(margin)).sum(1)  # errors by degrees
        finite = self.finite[rows].all().expand(len(rows))
        found = torch.stack([errors.double(), discordance.double(), nearly, finite.double()], 1).tolist()
        if not all(row[3] for row in found):
            for head in candidates:
                require_finite(self.finite[current.index_of[head]], current.samples, head)
        keys = [(objective.value(int(e), int(d)), round(soft, 6)) for e, d, soft, _ in found]
        return [head for _, head in sorted(zip(keys, candidates, strict=True))]


def _softness(margin: Tensor) -> Tensor:
    """Over which range an answer near the edge counts by degrees; the same for all candidates."""
    return 0.1 * margin.std(1).median().clamp(min=1e-6)
