"""Algorithm 1 as the paper writes it: run the whole model for every candidate. The reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..._distributed import Ranks
from ...errors import DataError
from ...model.ensemble import Ensemble
from ..head import Head
from ..mask import masked
from .choice import NO_HEAD, Choice
from .samples import SampleGroup, Samples, parts, tokens_of
from .scores import Objective, judge, quantum
from .work import BlockCost, Work


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


def require_finite(finite: Tensor, samples: Samples, head: Head | None) -> None:
    """Raise where a sample `[n]` has logits that are not finite, naming its batch."""
    if not finite.all():
        first = int((~finite).nonzero()[0, 0])
        state = "" if head is None else f" with head {head} switched off"
        raise DataError(
            f"{samples.batch_of(first)} gives logits that are NaN or infinite{state}; check its inputs, the weights "
            "of the model, or evaluate in a wider dtype"
        )
