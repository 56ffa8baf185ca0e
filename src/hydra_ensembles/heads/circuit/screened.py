"""Choosing among the few candidates that a gradient finds promising. Approximate, and audited.

The smooth surrogate is the log-odds of a class, for each sample by itself: of the answer (its confidence) and,
where the answer is wrong, of the label. The gradient with respect to a gate on each head predicts the log-odds
without that head; from the predicted log-odds follow smoothed counts of errors and of pairs in the wrong order.
(The gradient of the summed score alone would not do: whether a sample changes sides depends on how far it is
from the edge.) Only the candidates with the best predictions are evaluated.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..head import Head
from .current import CurrentModel
from .samples import IntArray, parts

_SOFTNESS = 0.1  # width of a smoothed step, in standard deviations of the log-odds
_BLOCKS_IN_A_BATCH = 3  # a gradient pass holds the activations of all blocks, so its batches are smaller


def shortlist(current: CurrentModel, candidates: Sequence[Head], size: int) -> list[Head]:
    """The `size` most promising candidates, first layer first."""
    if len(candidates) <= size:
        return list(candidates)
    best = sorted(zip(predicted_values(current, candidates), candidates, strict=True))[:size]
    return sorted(head for _, head in best)


def predicted_values(current: CurrentModel, candidates: Sequence[Head]) -> list[float]:
    """A smooth estimate of the integer of each candidate, from one gradient pass."""
    objective, labels = current.objective, current.samples.labels
    split, total = objective.id_count, objective.samples
    answers = torch.full((total,), -1, device=current.device)
    if objective.score == "acc":
        of_label, of_answer = predicted_log_odds(current, candidates, np.arange(split), labels), None
    elif objective.score == "ood":
        of_label, of_answer = None, predicted_log_odds(current, candidates, np.arange(total), answers)
    else:  # the label's log-odds are the answer's, except where the answer is wrong
        wrong = current.wrong.nonzero()[:, 0]
        numbers = np.concatenate([np.arange(total), wrong.cpu().numpy()])
        both = predicted_log_odds(current, candidates, numbers, torch.cat([answers, labels[wrong]]))
        of_answer, of_label = both[:, :total], both[:, :split].clone()
        of_label[:, wrong] = both[:, total:]
    values = torch.zeros(len(candidates), device=current.device)
    if of_label is not None:
        values += _soft_errors(of_label) * (2 * objective.ood_count if of_answer is not None else 1)
    if of_answer is not None:
        values += _soft_discordance(of_answer, split)
    return [float(value) for value in values.tolist()]


def predicted_log_odds(current: CurrentModel, candidates: Sequence[Head], numbers: IntArray, targets: Tensor) -> Tensor:
    """First-order estimates of log-odds without each of the candidates, `[K, R]`.

    Args:
        current: The model the candidates would be removed from.
        candidates: Heads it still has.
        numbers: `[R]`, sample numbers; a sample may occur more than once.
        targets: `[R]`, the class whose log-odds are meant; -1 for the answer.
    """
    predicted = torch.empty(len(candidates), len(numbers), dtype=torch.float32, device=current.device)
    size = max(1, current.batch_size * _BLOCKS_IN_A_BATCH // current.model.layers)
    groups, rows = current.samples.group_of[numbers], current.samples.row_of[numbers]
    for group in np.unique(groups):
        members = (groups == group).nonzero()[0]
        for part in parts(len(members), size):
            places = torch.from_numpy(members[part]).to(current.device)
            chosen = torch.from_numpy(rows[members[part]]).to(current.device)
            odds, gradients = _gate_gradients(current, int(group), chosen, targets[places])
            columns = [gradients[head.layer][:, current.model.kept[head.layer].index(head.head)] for head in candidates]
            predicted[:, places] = (odds - torch.stack(columns)).float()
    return predicted


def _gate_gradients(current: CurrentModel, group: int, rows: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-odds `[B]` of some samples of a group, and their gradients by layer, `[B, heads]`."""
    model, base = current.model, current.base[group]
    before = model.work.multiply_adds
    with torch.enable_grad():
        x, mask = base.levels[0].index_select(0, rows)[None], base.mask(rows)
        gates = [torch.ones(len(rows), len(kept), device=x.device, requires_grad=True) for kept in model.kept]
        for layer, gate in enumerate(gates):
            x = model.gated_block(layer, x, mask, gate)
        logits = model.logits(x, mask, None if base.ids is None else base.ids[rows]).float()
        target = torch.where(targets < 0, logits.argmax(-1), targets)[:, None]
        odds = logits.gather(1, target)[:, 0] - logits.scatter(1, target, -torch.inf).logsumexp(1)
    forward = model.work.multiply_adds - before
    model.work.add(len(rows) * model.layers, forward)  # the way back, to activations alone, costs as much again
    used = [gate for gate in gates if gate.shape[1]]
    found = dict(zip(map(id, used), torch.autograd.grad(odds.sum(), used), strict=True))
    return odds.detach(), [found.get(id(gate), gate.detach()) for gate in gates]


def _soft_errors(label_odds: Tensor) -> Tensor:
    """Samples whose label is not the answer, each counted by degrees: `[K, n_id]` to `[K]`."""
    return torch.sigmoid(-label_odds / _softness(label_odds)).sum(1)


def _soft_discordance(confidence: Tensor, split: int) -> Tensor:
    """Twice the pairs in the wrong order, each counted by degrees: `[K, n]` to `[K]`."""
    softness = _softness(confidence)
    scaled = confidence / softness
    return torch.stack([2 * torch.sigmoid(one[None, split:] - one[:split, None]).sum() for one in scaled])


def _softness(log_odds: Tensor) -> Tensor:
    """Width of a smoothed step for log-odds `[K, R]`, the same for all candidates."""
    return _SOFTNESS * log_odds.std(1).median().clamp(min=1e-6)
