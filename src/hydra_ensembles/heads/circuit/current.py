"""The model as it is between two greedy steps, with everything that is known about it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..._distributed import Ranks
from ..head import Head
from .base_activations import GroupActivations, embed
from .carried import CarriedActivations
from .choice import NO_HEAD, Choice
from .memory import plan
from .naive import require_finite
from .samples import IntArray, Samples, parts
from .scores import LEAST_CONFIDENT, MOST_CONFIDENT, Objective, judge, margins, quantum
from .working_model import WorkingModel


class CurrentTower:
    """A transformer that loses heads, its activations on all samples, and those carried for candidates.

    Attributes:
        candidates: All heads that may be removed, over the whole run.
        index_of: Their positions in `candidates`.
        own: Those that this rank evaluates.
        base: The activations, by group of samples.
        carried: Activations of candidates, by group of samples.
        features: Pooled features `[g, d]`, by group of samples.
    """

    def __init__(
        self,
        model: WorkingModel,
        samples: Samples,
        candidates: Sequence[Head],
        ranks: Ranks,
        batch_size: int,
        memory_budget: int,
        carry: bool = True,
    ) -> None:
        self.model, self.samples = model, samples
        self.batch_size = batch_size
        self.device, dtype = model.ensemble.device, model.ensemble.dtype
        self.candidates = list(candidates)
        self.index_of = {head: index for index, head in enumerate(candidates)}
        self.own = frozenset(ranks.share(candidates))
        self.features: list[Tensor] = []
        with torch.no_grad():
            self.base = embed(model, samples, batch_size)
            memory = plan(memory_budget, self.base, model.layers)
            self._levels = memory.base_levels
            self._refresh([0] * len(self.base))
        layer_of = np.array([head.layer if head in self.own else -1 for head in candidates], np.int64)
        room = memory.slots if carry else (0,) * len(self.base)
        self.carried = [
            CarriedActivations(layer_of, len(group), model.layers, group.token_shape, slots, dtype, self.device)
            for group, slots in zip(self.base, room, strict=True)
        ]

    @torch.no_grad()
    def remove(self, head: Head) -> None:
        """Take a head out: what was computed below it stays right, the rest is brought up to date."""
        index = self.index_of.get(head)
        self.model.drop(head)
        known = []
        for group, carried in zip(self.base, self.carried, strict=True):
            known.append(head.layer if index is None else self._adopt(group, carried, index, head.layer))
            carried.forget_above(head.layer)
            if index is not None:
                carried.forget_candidate(index)
        self._refresh(known)

    def _refresh(self, known: Sequence[int]) -> None:
        """Bring activations above the known levels of each group, and the features, up to date."""
        self.features = [
            group.recompute(level, self._levels, self.batch_size) for group, level in zip(self.base, known, strict=True)
        ]

    def _adopt(self, group: GroupActivations, carried: CarriedActivations, index: int, layer: int) -> int:
        """Take over what was computed for a candidate that is now the model; the highest level that is right."""
        rows = np.arange(len(group))
        known = layer
        for level in sorted(group.levels):
            if level <= layer:
                continue
            if not carried.holds_all(index, level):
                break
            group.levels[level] = carried.load(level, np.full(len(group), index), rows)[0]
            known = level
        return known


class CurrentModel(CurrentTower):
    """A classifier that loses heads, with its answers on all samples.

    Attributes:
        wrong: `[n_id]`, the model's errors.
        confidence: `[n]`, its confidences.
        margin: `[n]`, how far the labels of its ID samples are ahead of the other classes.
        choice: Its result, with `NO_HEAD` for a head.
        hardest_first: Sample numbers, those first that add most to its integer.
    """

    def __init__(
        self,
        model: WorkingModel,
        samples: Samples,
        objective: Objective,
        candidates: Sequence[Head],
        ranks: Ranks,
        batch_size: int,
        memory_budget: int,
        carry: bool = True,
    ) -> None:
        self.objective = objective
        self._values: dict[int, int] = {}
        super().__init__(model, samples, candidates, ranks, batch_size, memory_budget, carry)

    def value_on_hardest(self, chunk: int) -> dict[int, int]:
        """The integers of the model on its hardest samples alone: on one chunk of them, on two, … on all."""
        if not self._values:
            total, split = self.objective.samples, self.objective.id_count
            counts = [*range(chunk, total, chunk), total]
            place = torch.empty(total, dtype=torch.int64, device=self.device)
            place[torch.from_numpy(self.hardest_first).to(self.device)] = torch.arange(total, device=self.device)
            seen = place[None, :] < torch.tensor(counts, device=self.device)[:, None]  # [chunks, n]
            confidence = torch.where(seen, self.confidence, LEAST_CONFIDENT)
            confidence[:, :split].masked_fill_(~seen[:, :split], MOST_CONFIDENT)
            found = self.objective.count(self.wrong & seen[:, :split], confidence)
            errors, discordance = (column.tolist() for column in found)
            values = (self.objective.value(e, d) for e, d in zip(errors, discordance, strict=True))
            self._values.update(zip(counts, values, strict=True))
        return self._values

    def _refresh(self, known: Sequence[int]) -> None:
        """Bring activations above the known levels of each group, and the answers, up to date."""
        super()._refresh(known)
        self.answer()

    @torch.no_grad()
    def answer(self) -> None:
        """Answer all samples anew from their features; no block is run."""
        total = self.objective.samples
        wrong, finite = (torch.empty(total, dtype=torch.bool, device=self.device) for _ in range(2))
        self.confidence = torch.empty(total, dtype=torch.int64, device=self.device)
        self.margin = torch.empty(total, dtype=torch.float64, device=self.device)
        for features, group in zip(self.features, self.samples.groups, strict=True):
            for rows in parts(len(group), _ROWS):
                logits = self.model.classify(features[rows])
                numbers = torch.from_numpy(group.numbers[rows]).to(self.device)
                labels = self.samples.labels[numbers]
                answers = judge(logits, labels, quantum(self.model.ensemble.dtype))
                self.margin[numbers] = margins(logits, labels)
                wrong[numbers], self.confidence[numbers], finite[numbers] = answers
        require_finite(finite, self.samples, None)
        self.wrong = wrong[: self.objective.id_count]
        counts = self.objective.count(self.wrong[None], self.confidence[None])
        errors, discordance = (int(count) for count in counts)
        self.choice = Choice(self.objective.value(errors, discordance), NO_HEAD, errors, discordance)
        self.hardest_first: IntArray = self.objective.hardest_first(self.wrong, self.confidence)
        self._values.clear()


_ROWS = 1 << 14  # samples whose logits are held at once
