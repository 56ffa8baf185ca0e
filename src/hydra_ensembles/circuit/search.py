"""Which head goes next: naively, exactly with bounds, or screened by gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .._distributed import Ranks
from ..heads.masking import masked
from ..heads.ranking import Head
from ..model.ensemble import Ensemble
from .cache import BlockCost, CurrentModel, CurrentTower, GroupActivations, Work, gradient_batch_size
from .scores import (
    NO_HEAD,
    AnswerTable,
    Choice,
    IntArray,
    Objective,
    SampleGroup,
    Samples,
    judge,
    log_odds,
    margins,
    parts,
    quantum,
    require_finite,
    tokens_of,
)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 (ten bits of mantissa) within a `with` block.

    For estimates that are compared with each other. Other devices and other dtypes are not affected.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Naive:
    """Evaluates each candidate from the inputs to the logits, on all samples."""

    def __init__(
        self,
        model: Ensemble,
        samples: Samples,
        objective: Objective,
        ranks: Ranks,
        work: Work,
        batch_size: int,
        off: Sequence[Head] = (),
    ) -> None:
        self.model, self.samples, self.objective = model, samples, objective
        self.ranks, self.work, self.batch_size = ranks, work, batch_size
        self.off = list(off)

    def choose(self, candidates: Sequence[Head]) -> Choice:
        """The candidate whose removal leaves the best score."""
        return self.ranks.smallest(min((self.evaluate(head) for head in self.ranks.share(candidates)), default=None))

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""
        self.off.append(head)

    @torch.no_grad()
    def evaluate(self, head: Head | None) -> Choice:
        """The result with one more head off (None: with none)."""
        off = self.off if head is None else [*self.off, head]
        wrong, confidence, finite = self._empty(torch.bool), self._empty(torch.int64), self._empty(torch.bool)
        with self._switched_off(off):
            for group in self.samples.groups:
                for rows in parts(len(group), self.batch_size):
                    mask, segments = (
                        None if part is None else part[rows] for part in (group.attention_mask, group.token_type_ids)
                    )
                    logits = self.model(group.inputs[rows], mask, segments)[0]  # [1, B, C] -> [B, C]
                    numbers = torch.from_numpy(group.numbers[rows]).to(logits.device)
                    answers = judge(logits, self.samples.labels[numbers], quantum(self.model.dtype))
                    wrong[numbers], confidence[numbers], finite[numbers] = answers
                self.work.add(len(group) * self.model.num_layers, forward_cost(self.model, group))
        require_finite(finite, self.samples, head)
        errors, discordance = self.objective.count(wrong[None, : self.objective.id_count], confidence[None])
        counts = int(errors), int(discordance)
        return Choice(self.objective.value(*counts), NO_HEAD if head is None else head, *counts)

    @contextmanager
    def _switched_off(self, heads: Sequence[Head]) -> Iterator[None]:
        """The model without these heads, within a `with` block."""
        with masked(self.model, [Head(head.layer, head.head) for head in heads]):
            yield

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.objective.samples, dtype=dtype, device=self.model.device)


def forward_cost(model: Ensemble, group: SampleGroup) -> int:
    """Multiply-adds of all blocks for all samples of a group."""
    tokens, read = tokens_of(model, group), model.readout.tokens_read()
    queries = tokens if read is None else len(range(*read.indices(tokens)))
    heads = [len(kept) for kept in model.heads[0]]
    return len(group) * BlockCost(model.config.encoder).forward(heads, tokens, queries)


class Recorder(Protocol):
    """What takes the answers."""

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""


class Sweep:
    """Runs pairs of candidate and sample, each from the latest point at which its activations are known.

    A pair joins the walk in one of two ways: at the block of its candidate, where it branches off the current
    model (whose attention is computed once for all candidates of the layer); or at a later block whose input
    was carried over. From there on it is one more row of the batch.

    Args:
        current: The current model and its activations.
        table: Takes the answers.
    """

    def __init__(self, current: CurrentTower, table: Recorder) -> None:
        self.current, self.table = current, table
        self.model, self.samples = current.model, current.samples
        self.layer_of: IntArray = np.array([head.layer for head in current.candidates], np.int64)
        self.head_of: IntArray = np.array([head.head for head in current.candidates], np.int64)

    def run(self, candidates: IntArray, numbers: IntArray) -> None:
        """Evaluate pairs, given by candidate and sample number, and record the answers."""
        group_of, row_of = self.samples.group_of[numbers], self.samples.row_of[numbers]
        for index in np.unique(group_of):
            chosen = (group_of == index).nonzero()[0]
            chosen = chosen[np.argsort(row_of[chosen], kind="stable")]  # candidates of a sample stay together
            for part in parts(len(chosen), self.current.batch_size):
                pairs = chosen[part]
                self._walk(index, candidates[pairs], numbers[pairs], row_of[pairs])

    def _walk(self, index: int, candidates: IntArray, numbers: IntArray, rows: IntArray) -> None:
        base, carried, last = self.current.base[index], self.current.carried[index], self.model.layers
        known = carried.deepest(candidates, rows)
        branches = known <= self.layer_of[candidates]
        joins = np.where(branches, self.layer_of[candidates] + 1, known)  # level at which a pair joins
        order = np.lexsort((self.head_of[candidates], branches, joins))
        candidates, numbers, rows = candidates[order], numbers[order], rows[order]
        branches, joins = branches[order], joins[order]
        device_rows = torch.from_numpy(rows).to(base.levels[0].device, non_blocking=True)
        mask = base.mask(device_rows)

        x: Tensor | None = None
        active = 0  # pairs that have joined; they come first
        for level in range(int(joins[0]), last + 1):
            pieces: list[Tensor] = []
            if x is not None:
                pieces.append(self.model.block(level - 1, x, None if mask is None else mask[:active]))
            joined = int(np.searchsorted(joins, level, side="right"))
            resumed = active + int(np.count_nonzero(~branches[active:joined]))
            if resumed > active:
                pieces.append(carried.load(level, candidates[active:resumed], rows[active:resumed]))
            if joined > resumed:
                pieces.append(self._branch(base, level - 1, candidates[resumed:joined], rows[resumed:joined]))
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            if level < last:
                carried.save(level, candidates[:active], rows[:active], x[:, :active])
                carried.save(level, candidates[resumed:joined], rows[resumed:joined], x[:, resumed:joined])
            active = joined
        assert x is not None
        ids = None if base.ids is None else base.ids.index_select(0, device_rows)
        self.table.record(candidates, numbers, self.model.logits(x, mask, ids))

    def _branch(self, base: GroupActivations, layer: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Outputs of a block for pairs of this layer, sorted by head, each without its head: `[1, P, T', d]`."""
        distinct, inverse = np.unique(rows, return_inverse=True)
        heads, starts = np.unique(self.head_of[candidates], return_index=True)
        ends = [*starts[1:], len(candidates)]
        runs = [(int(head), slice(int(a), int(b))) for head, a, b in zip(heads, starts, ends, strict=True)]
        inputs, inputs_of = (
            torch.from_numpy(index).to(base.levels[0].device, non_blocking=True) for index in (distinct, inverse)
        )
        return self.model.without_heads(layer, base.at(layer, inputs), base.mask(inputs), inputs_of, runs)


_CHUNKS = 16  # parts in which a candidate is evaluated
_LARGEST_CHUNK = 128
_TOGETHER = {"cuda": 16, "cpu": 4}  # candidates advanced at once, at least
_PAIRS = {"cuda": 1024, "cpu": 32}  # pairs of candidate and sample that are worth a sweep
_TRUST = 0.9  # share of the current model's integer from which on the samples seen say how a candidate will do


@dataclass
class _Progress:
    """How far a candidate has come in the current step."""

    evaluated: int = 0
    errors: int = 0
    discordance: int = 0


class Exact:
    """Branch and bound over the candidates of this rank, in step with the other ranks.

    Args:
        current: The model with all heads chosen so far taken out.
        ranks: The processes the candidates are spread over.
    """

    def __init__(self, current: CurrentModel, ranks: Ranks) -> None:
        self.current, self.ranks = current, ranks
        self.objective = current.objective
        self.chunk = min(-(-self.objective.samples // _CHUNKS), _LARGEST_CHUNK)
        kind = "cuda" if current.device.type == "cuda" else "cpu"
        self.together = max(_TOGETHER[kind], _PAIRS[kind] // self.chunk)
        self.table = AnswerTable(current.candidates, current.samples, self.objective, current.model.ensemble.dtype)
        self.sweep = Sweep(current, self.table)

    @property
    def result(self) -> Choice:
        """The result of the model as it is."""
        return self.current.choice

    def remove(self, head: Head) -> None:
        """Take a head out for good."""
        self.current.remove(head)

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Choice | None = None) -> Choice:
        """The candidate whose removal leaves the best score.

        Args:
            candidates: The heads to choose from.
            known: One of them with its result, where that is known already.
        """
        self.table.clear()
        unknown = [head for head in candidates if known is None or head != known.head]
        progress = {head: _Progress() for head in unknown if head in self.current.own}
        self._advance(progress, dict.fromkeys(progress, self.chunk))
        while True:
            complete = [self._so_far(head, one) for head, one in progress.items() if self._is_complete(one)]
            waiting = [self._so_far(head, one) for head, one in progress.items() if not self._is_complete(one)]
            everywhere = self.ranks.gather((min(complete, default=None), min(waiting, default=None)))
            best = min((one for one in (known, *(one for one, _ in everywhere)) if one is not None), default=None)
            if best is not None and not any(bound is not None and bound < best for _, bound in everywhere):
                return best
            self._advance(progress, self._next(progress, sorted(waiting), best))

    def _next(
        self, progress: Mapping[Head, _Progress], waiting: Sequence[Choice], best: Choice | None
    ) -> dict[Head, int]:
        """How many more samples to evaluate for which candidates.

        Those with the smallest bounds go on by a chunk. And the one that looks best by its excess over the
        current model on the same samples is evaluated to the end where it promises to be the best so far: a
        good result early ends the others early.
        """
        open_ = [bound for bound in waiting if best is None or bound < best]
        if not open_:
            return {}
        current, amounts = self.current.choice.value, {}
        on_hardest = self.current.value_on_hardest(self.chunk)
        outlooks = []
        for bound in open_:
            seen = on_hardest[progress[bound.head].evaluated]
            if seen >= _TRUST * current:
                outlooks.append((current + bound.value - seen, bound.head))
        if best is not None or not outlooks:
            smallest = open_[: self.together]
            amounts = {bound.head: self.chunk * max(1, self.together // len(smallest)) for bound in smallest}
        if outlooks and (best is None or min(outlooks)[0] < best.value):
            amounts[min(outlooks)[1]] = self.objective.samples
        return amounts

    def _advance(self, progress: Mapping[Head, _Progress], amounts: Mapping[Head, int]) -> None:
        """Evaluate candidates on that many more samples each, in one sweep."""
        if not amounts:
            return
        order = self.current.hardest_first
        numbers = [order[progress[head].evaluated :][:amount] for head, amount in amounts.items()]
        indices = np.array([self.current.index_of[head] for head in amounts], np.int64)
        self.sweep.run(np.repeat(indices, [len(one) for one in numbers]), np.concatenate(numbers))
        for head, one, counts in zip(amounts, numbers, self.table.counts(indices), strict=True):
            state = progress[head]
            state.evaluated += len(one)
            state.errors, state.discordance = counts

    def _so_far(self, head: Head, one: _Progress) -> Choice:
        return Choice(self.objective.value(one.errors, one.discordance), head, one.errors, one.discordance)

    def _is_complete(self, one: _Progress) -> bool:
        return one.evaluated == self.objective.samples


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


AFRESH = 8  # steps after which all that is remembered is forgotten; a resumed run repeats at most as many
PREDICT_EVERY = 2  # steps after which a gradient corrects what is remembered
_HARD = 0.5  # share of the samples, hardest first, on which a candidate is measured or predicted again
_ROUNDS = 3  # in which the candidates of a step are measured, at most


class FastErrors:
    """Chooses by errors alone: branch and bound over all candidates in fast products.

    Args:
        exact: Branch and bound on the model with all heads chosen so far taken out.
    """

    def __init__(self, exact: Exact) -> None:
        self.exact = exact

    def choose(self, candidates: Sequence[Head]) -> Head:
        """The candidate with the fewest errors, as far as fast products tell."""
        with fast_products(self.exact.current.device):
            return self.exact.choose(candidates).head


class Screen:
    """Estimates all candidates and measures the most promising ones.

    Args:
        exact: What knows the model with all heads chosen so far taken out.
        size: Candidates to measure in a step, at most; twice as many where nothing is remembered.
        step: Greedy steps taken so far; a multiple of `AFRESH`.
    """

    def __init__(self, exact: Exact, size: int, step: int) -> None:
        self.current, self.ranks = exact.current, exact.ranks
        self.size, self.step = size, step
        self.effects = Effects(self.current)
        self.sweep = Sweep(self.current, self.effects)

    def choose(self, candidates: Sequence[Head]) -> Head:
        """The best of the promising candidates, as far as the estimates go."""
        afresh, predict = self.step % AFRESH == 0, self.step % PREDICT_EVERY == 0
        self.step += 1
        size = min(len(candidates), 2 * self.size if afresh else self.size)
        with torch.no_grad(), fast_products(self.current.device):
            if afresh:
                self.effects.forget()
            if predict:
                predict_effects(self.effects, candidates, self._hardest(1.0 if afresh else _HARD))
            return self._first_measured(candidates, most=size, least=size if afresh else 1)

    def _ordered(self, candidates: Sequence[Head]) -> list[Head]:
        """Candidates by estimate, best first; the same on all ranks."""
        return self.ranks.from_first(self.effects.best_first(candidates))

    def _first_measured(self, candidates: Sequence[Head], most: int, least: int) -> Head:
        """The first candidate that is ahead of all others and was measured in this step."""
        half, whole = self._hardest(_HARD), self._hardest(1.0)
        together = self.size if least == most else math.ceil(self.size / _ROUNDS)
        measured: set[Head] = set()  # on the harder half
        finished: set[Head] = set()  # on all samples
        while True:
            ordered = self._ordered(candidates)
            if len(measured) < least or (ordered[0] not in measured and len(measured) < most):
                promising = [head for head in ordered if head not in measured]
                chosen = promising[: min(together, most - len(measured))]
                self._measure(chosen, half)
                measured.update(chosen)
                continue
            best = next(head for head in ordered if head in measured)
            if best in finished:
                return best
            self._measure([best], whole[len(half) :])
            finished.add(best)

    def _measure(self, heads: Sequence[Head], numbers: IntArray) -> None:
        """Run candidates on some samples, each on one of the ranks, and tell all ranks."""
        rows = [self.current.index_of[head] for head in heads]
        own = self.ranks.share(rows)
        if own:
            self.sweep.run(np.repeat(np.array(own, np.int64), len(numbers)), np.tile(numbers, len(own)))
        if self.ranks.size > 1:
            for theirs, known in self.ranks.gather((own, self.effects.read(own))):
                self.effects.write(theirs, known)

    def _hardest(self, share: float) -> IntArray:
        """Numbers of a share of the samples, the hardest ones."""
        return self.current.hardest_first[: math.ceil(share * self.current.objective.samples)]
