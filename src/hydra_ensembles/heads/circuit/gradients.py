"""What the log-odds of every sample would be without each head, to first order, from one gradient pass."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..head import Head
from .current import CurrentModel
from .memory import gradient_batch_size
from .samples import IntArray, parts
from .scores import log_odds
from .smooth import smooth_values


def predicted_values(current: CurrentModel, candidates: Sequence[Head]) -> list[float]:
    """Smooth estimates of the integers that candidates would have.

    The surrogate that is differentiated is the log-odds of a class, for each sample by itself: of the answer
    and, where the answer is wrong, of the label. (The gradient of the summed score alone would not do: whether
    a sample changes sides depends on how far it is from the edge.)
    """
    objective, labels = current.objective, current.samples.labels
    split, total = objective.id_count, objective.samples
    answers = torch.full((total,), -1, device=current.device)
    of_label: Tensor | None = None
    of_answer: Tensor | None = None
    if objective.score == "acc":
        of_label = predicted_log_odds(current, candidates, np.arange(split), labels)
    elif objective.score == "ood":
        of_answer = predicted_log_odds(current, candidates, np.arange(total), answers)
    else:  # the label's log-odds are the answer's, except where the answer is wrong
        wrong = current.wrong.nonzero()[:, 0]
        numbers = np.concatenate([np.arange(total), wrong.cpu().numpy()])
        both = predicted_log_odds(current, candidates, numbers, torch.cat([answers, labels[wrong]]))
        of_answer, of_label = both[:, :total], both[:, :split].clone()
        of_label[:, wrong] = both[:, total:]
    return [float(value) for value in smooth_values(objective, of_label, of_answer).tolist()]


def predicted_log_odds(current: CurrentModel, candidates: Sequence[Head], numbers: IntArray, targets: Tensor) -> Tensor:
    """First-order estimates of log-odds without each of the candidates, `[K, R]`.

    Args:
        current: The model the candidates would be removed from.
        candidates: Heads it still has.
        numbers: `[R]`, sample numbers; a sample may occur more than once.
        targets: `[R]`, the class whose log-odds are meant; -1 for the answer.
    """
    predicted = torch.empty(len(candidates), len(numbers), dtype=torch.float32, device=current.device)
    size = gradient_batch_size(current.model.ensemble, current.samples, current.batch_size)
    groups, rows = current.samples.group_of[numbers], current.samples.row_of[numbers]
    for group in np.unique(groups):
        members = (groups == group).nonzero()[0]
        for part in parts(len(members), size):
            places = torch.from_numpy(members[part]).to(current.device)
            chosen = torch.from_numpy(rows[members[part]]).to(current.device)
            odds, gradients = _gate_gradients(current, int(group), chosen, targets[places])
            column = [_column(current, head) for head in candidates]
            predicted[:, places] = odds - gradients[:, column].T
    return predicted


def _column(current: CurrentModel, head: Head) -> int:
    """Where a head is among all heads that are left, layer by layer."""
    kept = current.model.kept
    return sum(len(layer) for layer in kept[: head.layer]) + kept[head.layer].index(head.head)


def _gate_gradients(current: CurrentModel, group: int, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-odds `[B]` of some samples of a group, and their gradients with respect to all gates, `[B, heads]`."""
    model, base = current.model, current.base[group]
    before = model.work.multiply_adds
    with torch.enable_grad():
        x, mask = base.levels[0].index_select(0, rows)[None], base.mask(rows)
        sizes = [len(kept) for kept in model.kept]
        gates = torch.ones(len(rows), sum(sizes), device=x.device, requires_grad=True)  # of each sample by itself
        for layer, gate in enumerate(gates.split(sizes, dim=1)):
            x = model.gated_block(layer, x, mask, gate)
        logits = model.logits(x, mask, None if base.ids is None else base.ids[rows]).float()
        odds = log_odds(logits, torch.where(targets < 0, logits.argmax(-1), targets))
        (gradients,) = torch.autograd.grad(odds.sum(), gates)
    forward = model.work.multiply_adds - before
    model.work.add(len(rows) * model.layers, forward)  # the way back, to activations alone, costs as much again
    return odds.detach(), gradients
