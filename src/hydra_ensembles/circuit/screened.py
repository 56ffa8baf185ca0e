"""Choosing the next head approximately: all candidates are estimated, and only the promising ones measured.

Removing a head shifts the confidence of a sample, and the margin of its label, by about as much before as after another
head is removed. So shifts are kept across steps. They are measured, or estimated by a gradient pass.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..heads.ranking import Head
from .cache import CachedTower
from .exact import Exact, Search
from .scores import IntArray, Result, SampleAnswers, grid_step, judge, log_odds_of, parts, require_finite, to_device

RESET_EVERY = 8  # steps after which all shifts are reset; a resumed run repeats fewer than this
_PREDICT_EVERY = 2  # steps between corrections of the shifts by a gradient pass
_HARD_SHARE = 0.5  # share of samples, hardest first, on which candidates are measured or predicted again
_ROUNDS = 3  # maximum number of rounds in which the candidates of a step are measured


@contextmanager
def fast_products(device: torch.device, fast: bool = True) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 (ten bits of mantissa), for estimates; `fast=False` forbids it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(("high" if fast else "highest") if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Screened(Search):
    """Measures only promising candidates; for `acc` it is the exact method with TF32 products.

    `exact` must not cache activations of candidates. At most `size` candidates are measured in a step, twice as many
    after a reset; `step` is the number of greedy steps taken so far, a multiple of `RESET_EVERY` except for `acc`.
    """

    def __init__(self, exact: Exact, size: int, step: int) -> None:
        self.exact, self.size, self.step = exact, size, step
        self.shifts = Shifts(exact)

    @property
    def result(self) -> Result:
        """The result of the current model."""
        return self.exact.result

    def remove(self, head: Head) -> None:
        """Remove a head permanently."""
        self.exact.remove(head)

    def choose(self, candidates: Sequence[Head]) -> Result:
        """The best of the promising candidates; its integers are estimates."""
        reset, predict = self.step % RESET_EVERY == 0, self.step % _PREDICT_EVERY == 0
        self.step += 1
        with torch.no_grad(), fast_products(self.exact.tower.model.ensemble.device):
            if self.exact.objective.score == "acc":  # single errors decide: estimates are too coarse, bounds are cheap
                self.exact.on_progress = self.on_progress
                return self.exact.choose(candidates)
            self.shifts.start_step(reset)
            if predict:
                self.shifts.predict(candidates, self._hardest(1.0 if reset else _HARD_SHARE))
            size = min(len(candidates), 2 * self.size if reset else self.size)
            return self._measure_best(candidates, most=size, least=size if reset else 1)

    def take(self, candidates: Sequence[Head], audited: bool) -> tuple[Result, int | None]:
        """As in `Search`; the result is measured after the removal, not the estimate the head was chosen by."""
        choice, excess = self.choose(candidates), None
        if choice.over:  # only by estimates: let exact measurements decide
            choice = self.exact.choose(candidates)
        if choice.over:
            return choice, None
        if audited:
            measured = self.exact.choose([choice.head])
            excess = measured.value - self.exact.choose(candidates, known=measured).value
        self.remove(choice.head)
        return self.result._replace(head=choice.head), excess

    def _measure_best(self, candidates: Sequence[Head], most: int, least: int) -> Result:
        """Measure `least` to `most` candidates, best estimate first, until a measured one leads; return the best."""
        half, whole = self._hardest(_HARD_SHARE), self._hardest(1.0)
        together = self.size if least == most else math.ceil(self.size / _ROUNDS)
        measured: set[Head] = set()  # on the harder half of the samples
        finished: set[Head] = set()  # on all samples
        while True:
            ordered = self.exact.ranks.gather(self.shifts.estimates(candidates))[0]
            if len(measured) < least or (ordered[0].head not in measured and len(measured) < most):
                promising = [estimate.head for estimate in ordered if estimate.head not in measured]
                chosen = promising[: min(together, most - len(measured))]
                self._measure(chosen, half)
                measured.update(chosen)
                self.on_progress(len(measured) // self.exact.ranks.size)
                continue
            best = next(estimate for estimate in ordered if estimate.head in measured)
            if best.head in finished:
                return best
            if self.exact.objective.most_errors is None:
                self._measure([best.head], whole[len(half) :])
            else:  # the limit on errors is checked without TF32
                with fast_products(self.shifts.device, fast=False):
                    self._measure([best.head], whole)
            finished.add(best.head)

    def _measure(self, heads: Sequence[Head], numbers: IntArray) -> None:
        """Run candidates on some samples, distributed over the ranks, and share the shifts with all ranks."""
        tower, ranks, shifts = self.exact.tower, self.exact.ranks, self.shifts
        index = tower.index(ranks.share(heads))
        if len(index):
            tower.run(np.repeat(index, len(numbers)), np.tile(numbers, len(index)), shifts.record)
        if ranks.size > 1:
            mine = index.tolist()
            for rows, values, finite in ranks.gather((mine, shifts.known[:, mine].cpu(), shifts.finite[mine].cpu())):
                shifts.known[:, rows], shifts.finite[rows] = values.to(shifts.device), finite.to(shifts.device)

    def _hardest(self, share: float) -> IntArray:
        """Return the numbers of the hardest samples, a given share of all."""
        return self.exact.hardest_first[: math.ceil(share * self.exact.objective.samples)]


class Shifts:
    """How much each candidate (a row) changes the confidence and the margin of every sample (a column).

    Added to the answers of the current model, shifts give an estimate of a candidate's integers; for a candidate that
    was just measured on all samples, the exact ones.
    """

    def __init__(self, exact: Exact) -> None:
        self.exact, self.tower, self.objective = exact, exact.tower, exact.objective
        self.step = grid_step(exact.tower.model.ensemble.dtype)
        self.device = exact.current.wrong.device
        shape = len(self.tower.candidates), self.objective.samples
        # [2, K, n] each, of the confidence (in grid steps, integers) and of the margin: now, and as last predicted
        self.known, self.predicted = torch.zeros(2, 2, *shape, dtype=torch.float64, device=self.device)
        self.finite = torch.ones(shape, dtype=torch.bool, device=self.device)
        self._own_margin = torch.zeros(shape[1], dtype=torch.float64, device=self.device)

    def start_step(self, reset: bool) -> None:
        """Read the margins of the current model; with `reset`, reset all measurements and predictions."""
        for numbers, (logits, _) in self.tower.answers():
            columns = to_device(numbers, self.device)
            self._own_margin[columns] = margins(logits, self.tower.samples.labels[columns])
        if reset:
            self.known.zero_()
            self.predicted.zero_()
            self.finite.fill_(True)

    def predict(self, candidates: Sequence[Head], numbers: IntArray) -> None:
        """Predict the shifts of candidates on some samples, and correct the known shifts by the change in prediction.

        The confidence and the margin of the label are differentiated for each sample separately. (The gradient of the
        summed score would not suffice: whether an answer flips depends on the sample's distance from the decision
        boundary.) Where the answer is the label, the gradient of the confidence is used for both.
        """
        columns = to_device(numbers, self.device)
        labels = self.tower.samples.labels[columns]
        repeated: IntArray = np.empty(0, np.int64)  # positions in `numbers` of samples with wrong answers
        if self.objective.score == "avg":
            wrong = self.exact.current.wrong[0].cpu().numpy()
            repeated = (wrong[numbers] & (numbers < self.objective.id_count)).nonzero()[0]
        positions = to_device(repeated, self.device)
        targets = torch.cat([torch.full_like(labels, -1), labels[positions]])
        shifts = gradient_shifts(self.tower, candidates, np.concatenate([numbers, numbers[repeated]]), targets)
        confidence, of_labels = shifts.split([len(numbers), len(repeated)], dim=1)  # [K, S], [K, repeated]
        margin = confidence.clone()
        margin[:, positions] = of_labels
        self.correct(self.tower.index(candidates), numbers, torch.stack([(confidence / self.step).round(), margin]))

    def correct(self, rows: IntArray, numbers: IntArray, values: Tensor) -> None:
        """Store predictions `[2, R, S]`, and change the known shifts by as much as the predictions changed."""
        cells = slice(None), to_device(rows, self.device)[:, None], to_device(numbers, self.device)
        self.known[cells] += values - self.predicted[cells]
        self.predicted[cells] = values

    def record(self, candidates: IntArray, numbers: IntArray, answers: SampleAnswers) -> None:
        """Store the measured answers to P pairs of candidate and sample."""
        logits = answers.logits  # [P, C]
        rows, columns = to_device(candidates, self.device), to_device(numbers, self.device)
        labels = self.tower.samples.labels[columns]
        _, confidence, finite = judge(logits, labels, self.step)
        self.known[0, rows, columns] = (confidence - self.exact.current.confidence[0, columns]).double()
        self.known[1, rows, columns] = (margins(logits, labels) - self._own_margin[columns]).nan_to_num()
        self.finite[rows, columns] = finite

    def estimates(self, candidates: Sequence[Head]) -> list[Result]:
        """Estimate the results of candidates, best first; ties go to the one with the larger margins."""
        index = self.tower.index(candidates)
        rows = to_device(index, self.device)
        confidence = self.exact.current.confidence[0] + self.known[0, rows].long()
        margin = (self._own_margin + self.known[1, rows])[:, : self.objective.id_count]
        softness = 0.1 * margin.std(1).median().clamp(min=1e-6)  # width of the soft threshold
        soft_errors = dict(zip(candidates, torch.sigmoid(-margin / softness).sum(1).tolist(), strict=True))
        for row, head, finite in zip(index, candidates, self.finite[rows].all(1).tolist(), strict=True):
            if not finite:
                require_finite(self.finite[row], self.tower.samples, head)
        results = map(self.objective.result, candidates, self.objective.count(margin < 0, confidence).tolist())
        return sorted(results, key=lambda one: (one.over, one.value, round(soft_errors[one.head], 6), one.head))


def gradient_shifts(tower: CachedTower, candidates: Sequence[Head], numbers: IntArray, targets: Tensor) -> Tensor:
    """First-order estimates of the change in margin or log-odds without each candidate, `[K, R]` in float64.

    `numbers` `[R]` are samples, possibly repeated; `targets` `[R]` is the class whose margin to differentiate, or -1
    for the log-odds of the answer.
    """
    model, samples, device = tower.model, tower.samples, targets.device
    starts = np.cumsum([0, *(len(heads) for heads in model.kept)])
    gates = [int(starts[head.layer]) + model.kept[head.layer].index(head.head) for head in candidates]
    columns = torch.tensor(gates, device=device)
    shifts = torch.empty(len(candidates), len(numbers), dtype=torch.float64, device=device)
    size = max(1, tower.batch_size // (model.layers if device.type == "cuda" else 1))  # autograd keeps all blocks
    groups, rows = samples.group_of[numbers], samples.row_of[numbers]
    for group in np.unique(groups):
        members = (groups == group).nonzero()[0]
        for part in parts(len(members), size):
            positions = to_device(members[part], device)
            chosen = to_device(rows[members[part]], device)
            gradients = _gate_gradients(tower, int(group), chosen, targets[positions])
            shifts[:, positions] = -gradients.double().nan_to_num()[:, columns].T
    return shifts


def _gate_gradients(tower: CachedTower, group: int, rows: Tensor, targets: Tensor) -> Tensor:
    """Gradients with respect to the gates of all heads, `[B, heads]`, for some samples of a group."""
    model = tower.model
    base = tower.base[group]
    before = model.work["multiply_adds"]
    with torch.enable_grad():
        x, context = base.at(0, rows), base.context(rows)
        sizes = [len(heads) for heads in model.kept]
        gates = torch.ones(len(rows), sum(sizes), device=x.device, requires_grad=True)  # one per sample
        for layer, gate in enumerate(gates.split(sizes, dim=1)):
            x = model.block(layer, x, context, gate)
        logits = model.classify(model.pool(x, context.key_mask, base.token_ids(rows))).logits.double()
        numbers = torch.where(targets < 0, log_odds_of(logits, logits.argmax(-1)), margins(logits, targets))
        (gradients,) = torch.autograd.grad(numbers.sum(), gates)
    # the backward pass, to activations only, costs as much as the forward pass
    model.work["layer_evaluations"] += len(rows) * model.layers
    model.work["multiply_adds"] += model.work["multiply_adds"] - before
    return gradients


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Logit of the label minus the largest other logit, `[B]`, in float64; 0 for OOD samples."""
    precise = logits.double()
    classes = labels.clamp(min=0)[:, None]
    others = precise.scatter(-1, classes, -torch.inf).amax(-1)
    return torch.where(labels < 0, 0.0, precise.gather(-1, classes)[:, 0] - others)
