"""What every head does to every sample, to first order, from one gradient pass."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..head import Head
from .current import CurrentModel
from .effects import Effects
from .memory import gradient_batch_size
from .samples import IntArray, parts
from .scores import log_odds, margins


def predict_effects(effects: Effects, candidates: Sequence[Head], numbers: IntArray) -> None:
    """Predict the effects of candidates on some samples, and correct what is remembered by it.

    What is differentiated is a number for each sample by itself: its confidence, and the margin of its label.
    (The gradient of the summed score alone would not do: whether a sample changes sides depends on how far it
    is from the edge.) Where the answer is the label, one gradient has to serve for both.
    """
    current, score = effects.current, effects.objective.score
    rows = torch.tensor([current.index_of[head] for head in candidates], device=current.device)
    labels = current.samples.labels[torch.from_numpy(numbers).to(current.device)]
    if score == "acc":
        effects.predict(rows, numbers, None, shifts(current, candidates, numbers, labels))
        return
    again: IntArray = np.empty(0, np.int64)  # places in `numbers` of samples with wrong answers
    if score == "avg":
        wrong = np.zeros(effects.objective.samples, bool)
        wrong[: effects.objective.id_count] = current.wrong.cpu().numpy()
        again = wrong[numbers].nonzero()[0]
    places = torch.from_numpy(again).to(current.device)
    targets = torch.cat([torch.full_like(labels, -1), labels[places]])
    found = shifts(current, candidates, np.concatenate([numbers, numbers[again]]), targets)  # [K, S + wrong]
    confidence, margin = found[:, : len(numbers)], found[:, : len(numbers)].clone()
    margin[:, places] = found[:, len(numbers) :]
    effects.predict(rows, numbers, confidence, margin)


def shifts(current: CurrentModel, candidates: Sequence[Head], numbers: IntArray, targets: Tensor) -> Tensor:
    """First-order estimates of how numbers change without each of the candidates, `[K, R]` in float64.

    Args:
        current: The model the candidates would be removed from.
        candidates: Heads it still has.
        numbers: `[R]`, sample numbers; a sample may occur more than once.
        targets: `[R]`, the class whose margin is meant; -1 for the log-odds of the answer.
    """
    starts = np.cumsum([0, *(len(kept) for kept in current.model.kept)])
    columns = torch.tensor(
        [int(starts[head.layer]) + current.model.kept[head.layer].index(head.head) for head in candidates],
        device=current.device,
    )
    found = torch.empty(len(candidates), len(numbers), dtype=torch.float64, device=current.device)
    size = gradient_batch_size(current.model.ensemble, current.samples, current.batch_size)
    groups, rows = current.samples.group_of[numbers], current.samples.row_of[numbers]
    for group in np.unique(groups):
        members = (groups == group).nonzero()[0]
        for part in parts(len(members), size):
            places = torch.from_numpy(members[part]).to(current.device)
            chosen = torch.from_numpy(rows[members[part]]).to(current.device)
            gradients = _gate_gradients(current, int(group), chosen, targets[places])
            found[:, places] = -gradients.double().nan_to_num()[:, columns].T
    return found


def _gate_gradients(current: CurrentModel, group: int, rows: Tensor, targets: Tensor) -> Tensor:
    """Gradients of some samples of a group with respect to the gates of all heads, `[B, heads]`."""
    model, base = current.model, current.base[group]
    before = model.work.multiply_adds
    with torch.enable_grad():
        x, mask = base.levels[0].index_select(0, rows)[None], base.mask(rows)
        sizes = [len(kept) for kept in model.kept]
        gates = torch.ones(len(rows), sum(sizes), device=x.device, requires_grad=True)  # of each sample by itself
        for layer, gate in enumerate(gates.split(sizes, dim=1)):
            x = model.gated_block(layer, x, mask, gate)
        logits = model.logits(x, mask, None if base.ids is None else base.ids[rows]).double()
        numbers = torch.where(targets < 0, log_odds(logits, logits.argmax(-1)), margins(logits, targets))
        (gradients,) = torch.autograd.grad(numbers.sum(), gates)
    forward = model.work.multiply_adds - before
    model.work.add(len(rows) * model.layers, forward)  # the way back, to activations alone, costs as much again
    return gradients
