"""Choosing the head to remove next: by trying every candidate, or by branch and bound."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..heads.masking import Head, masked, working_copy
from ..model.dual_encoder import DualEncoder, average_templates, prompts_of
from ..model.ensemble import Ensemble
from ..model.stem_readout import compose
from .cache import CachedTower, Work
from .scores import NO_HEAD, CircuitData, IntArray, Objective, Result, SampleGroup, Tally, parts, to_device


@dataclass(eq=False)
class Naive:
    """The reference: runs the whole model on all samples for each candidate; of a dual encoder both towers."""

    model: Ensemble
    samples: CircuitData
    objective: Objective
    work: Work
    batch_size: int
    off: Sequence[Head]  # removed so far
    texts: "Texts | None" = None  # of a dual encoder

    @property
    def result(self) -> Result:
        """The result of the current model."""
        return self.evaluate(NO_HEAD)

    def choose(self, candidates: Sequence[Head]) -> Result:
        """The candidate whose removal leaves the best score."""
        return min(map(self.evaluate, candidates))

    def remove(self, head: Head) -> None:
        """Remove a head permanently."""
        self.off = [*self.off, head]

    @torch.no_grad()
    def evaluate(self, head: Head) -> Result:
        """Evaluate the current model without one more head."""
        off = [*self.off, *([] if head == NO_HEAD else [head])]
        return Tally(self.samples, self.objective, [head], self.model.dtype).result(self.answers(off))

    def answers(self, off: Sequence[Head]) -> Iterator[tuple[IntArray, Tensor]]:
        """Yield sample numbers and logits in batches, for all samples, with the heads in `off` masked."""
        if self.texts is not None:
            of_text, prompts = of_tower(off, text=True), self.texts.prompts
            embedded = run_without(self.texts.tower, of_text, prompts, self.batch_size, self.work)
            use_classes(self.model, self.texts.classes(torch.cat([rows for _, rows in embedded])))
        return run_without(self.model, of_tower(off, text=False), self.samples, self.batch_size, self.work)


def run_without(
    model: Ensemble, off: Sequence[Head], samples: CircuitData, batch_size: int, work: Work
) -> Iterator[tuple[IntArray, Tensor]]:
    """Run the whole model with some heads masked; yield sample numbers and logits in batches, for all samples."""
    with masked(model, [Head(head.layer, head.head) for head in off]):
        for group in samples.groups:
            for rows in parts(len(group), batch_size):
                yield group.numbers[rows], model._forward(*group.take(rows))[0]  # [1, B, C] to [B, C]
    work.blocks += len(samples.labels) * len(model.config.head_counts)


_CHUNKS = 16  # into which the samples of a candidate are divided
_LARGEST_CHUNK = 128
_MIN_AT_ONCE = {"cuda": 16, "cpu": 4}  # minimum number of candidates advanced at once
_PAIRS = {"cuda": 1024, "cpu": 32}  # pairs of candidate and sample that are worth one pass


class Exact:
    """Branch and bound over the candidates.

    All candidates see the samples in the same order, hardest first. The integers of a candidate on the samples seen so
    far are a lower bound of its result. A candidate is dropped once its bound exceeds a complete result.
    """

    def __init__(self, tower: CachedTower, objective: Objective) -> None:
        self.tower, self.objective = tower, objective
        dtype, device = tower.model.ensemble.dtype, tower.model.ensemble.device
        self._current = Tally(tower.samples, objective, [NO_HEAD], dtype)
        self._answers = Tally(tower.samples, objective, tower.candidates, dtype)
        self._chunk = min(-(-objective.samples // _CHUNKS), _LARGEST_CHUNK)
        kind = "cuda" if device.type == "cuda" else "cpu"
        self._together = max(_MIN_AT_ONCE[kind], _PAIRS[kind] // self._chunk)
        self.answer()

    @torch.no_grad()
    def answer(self) -> None:
        """Update the answers to all samples from the cached features of the current model; no block is run."""
        self.result = self._current.result(self.tower.answers())
        self._hardest_first = self.objective.hardest_first(self._current.wrong[0], self._current.confidence[0])

    def remove(self, head: Head) -> None:
        """Remove a head permanently."""
        self.tower.remove(head)
        self.answer()

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Result | None = None) -> Result:
        """The candidate whose removal leaves the best score; `known` is a result that is already complete."""
        self._answers.clear()
        heads = [head for head in candidates if known is None or head != known.head]
        seen = dict.fromkeys(heads, 0)  # number of samples each candidate was evaluated on
        bounds: dict[Head, Result] = {}
        self._advance(seen, bounds, dict.fromkeys(heads, self._chunk))
        while True:
            done = {head for head, count in seen.items() if count == self.objective.samples}
            complete = [bounds[head] for head in heads if head in done]
            waiting = [bounds[head] for head in heads if head not in done]
            best = min(filter(None, (known, *complete)), default=None)
            if best is not None and all(best <= bound for bound in waiting):
                return best
            self._advance(seen, bounds, self._next(sorted(waiting), best))

    def _next(self, waiting: Sequence[Result], best: Result | None) -> dict[Head, int]:
        """Decide which candidates to evaluate next, and on how many more samples; `waiting` are bounds, smallest first.

        The first is completed at once: a good result rules out others early. Then smallest bounds advance in chunks; by
        accuracy, the smallest of them is completed every time.
        """
        if best is None:
            return {bound.head: self.objective.samples for bound in waiting[:1]}
        smallest = [bound for bound in waiting if bound < best][: self._together]
        amounts = {bound.head: self._chunk * max(1, self._together // len(smallest)) for bound in smallest}
        if self.objective.score == "acc":  # with nearly all errors among the first samples, bounds hardly grow
            amounts |= {bound.head: self.objective.samples for bound in smallest[:1]}
        return amounts

    def _advance(self, seen: dict[Head, int], bounds: dict[Head, Result], amounts: Mapping[Head, int]) -> None:
        """Evaluate each candidate on its number of further samples, all in one call."""
        if not amounts:
            return
        numbers = [self._hardest_first[seen[head] :][:amount] for head, amount in amounts.items()]
        index = self.tower.index(list(amounts))
        self.tower.run(np.repeat(index, [len(part) for part in numbers]), np.concatenate(numbers), self._answers.record)
        for part, result in zip(numbers, self._answers.results(index), strict=True):
            seen[result.head] += len(part)
            bounds[result.head] = result


# --- both towers of a dual encoder ---------------------------------------------------------------------------
# Removing a head of the text tower changes only the class embeddings: such a candidate runs the text tower on the
# prompts, and uses the current image embeddings. A candidate of the image tower uses the current class embeddings.


@dataclass(frozen=True, eq=False)
class Texts:
    """The text tower and prompts from which class embeddings are computed."""

    tower: Ensemble  # a private copy; it returns embeddings, since its projection serves as its classifier
    prompts: CircuitData  # every class in every template, grouped by class, without labels
    templates: int  # prompts of each class
    scale: Tensor  # [1], factor of the cosine similarities

    def classes(self, embeddings: Tensor) -> Tensor:
        """Compute scaled class embeddings `[C, e]` from the embeddings of all prompts, `[P, e]`."""
        return average_templates(F.normalize(embeddings, dim=-1)[None], self.templates)[0] * self.scale


def read_texts(dual: DualEncoder, names: Sequence[str], templates: Sequence[str], device: torch.device) -> Texts:
    """Copy the text tower to a device, with its projection as classifier, and tokenize the prompts."""
    tower = dual.text
    ids, *extra = tower.unpack(prompts_of(names, templates))
    mask, segments = (None if tensor is None else tensor.to(device) for tensor in extra)
    group = SampleGroup(np.arange(len(ids)), (ids.to(device), mask, segments))
    labels = torch.full((len(group),), -1, device=device)
    prompts = CircuitData((group,), labels, {"prompts": len(group)})
    projection = compose(tower.readout.classifier, dual.projections.text)
    if projection is not None:
        width, biased = projection.weight.shape[1], projection.bias is not None
        readout = replace(tower.config.readout, num_classes=width, bias=biased)
        prefix = "readout.classifier."
        state = {name: tensor for name, tensor in tower.state_dict().items() if not name.startswith(prefix)}
        state |= {prefix + name: tensor for name, tensor in projection.state_dict().items()}
        tower = Ensemble.from_state(replace(tower.config, readout=readout), state)
    scale = dual.logit_scale.detach().to(device).exp()
    return Texts(working_copy(tower, device), prompts, len(templates), scale)


def use_classes(classifier: Ensemble, classes: Tensor) -> None:
    """Replace the class embeddings of a zero-shot classifier by `[C, e]`."""
    embeddings = classifier.readout.class_embeddings
    assert embeddings is not None
    embeddings.weight = nn.Parameter(classes[None], requires_grad=False)


def of_tower(heads: Sequence[Head], text: bool) -> list[Head]:
    """Return the heads of the text tower, or (`text=False`) all others."""
    return [head for head in heads if (head.tower == "text") == text]


class JointExact:
    """Branch and bound in the image tower; all candidates of `tower`, the pruned text tower, are evaluated in full."""

    def __init__(self, images: Exact, texts: Texts, tower: CachedTower) -> None:
        self.images, self.texts, self.tower = images, texts, tower
        self._classes: dict[Head, Tensor] = {}  # [C, e], class embeddings without each text candidate
        self._use_own_classes()

    @property
    def result(self) -> Result:
        """The result of the current model."""
        return self.images.result

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head]) -> Result:
        """The candidate whose removal leaves the best score."""
        heads = of_tower(candidates, text=True)
        for layer in sorted({head.layer for head in heads if head not in self._classes}):
            self._run_prompts([head for head in heads if head.layer == layer and head not in self._classes])
        best = min(map(self._judge, heads), default=None)
        use_classes(self._classifier, self._current)
        return self.images.choose(of_tower(candidates, text=False), best)

    def remove(self, head: Head) -> None:
        """Remove a head permanently; the other tower is not run."""
        if head.tower == "text":
            self.tower.remove(head)
            self._classes.clear()
            self._use_own_classes()
        else:
            self.images.remove(head)

    @property
    def _classifier(self) -> Ensemble:
        return self.images.tower.model.ensemble

    @torch.no_grad()
    def _use_own_classes(self) -> None:
        """Classify by the class embeddings of the current text tower."""
        self._current = self.texts.classes(self.tower.model.classify(torch.cat(self.tower.features)))  # [C, e]
        use_classes(self._classifier, self._current)
        self.images.answer()

    def _run_prompts(self, heads: Sequence[Head]) -> None:
        """Compute the class embeddings without each of some heads of one layer."""
        count = len(self.tower.samples.labels)
        index = self.tower.index(heads)  # ascending, like the candidates
        table = self._current.new_empty(len(heads), count, self._current.shape[1])  # [heads, prompts, e]

        def record(candidates: IntArray, numbers: IntArray, embedded: Tensor) -> None:
            rows = to_device(np.searchsorted(index, candidates), table.device)
            table[rows, to_device(numbers, table.device)] = embedded

        self.tower.run(np.repeat(index, count), np.tile(np.arange(count), len(heads)), record)
        self._classes |= {head: self.texts.classes(embeddings) for head, embeddings in zip(heads, table, strict=True)}

    def _judge(self, head: Head) -> Result:
        """Evaluate a candidate of the text tower on all samples: current image features, its class embeddings."""
        use_classes(self._classifier, self._classes[head])
        tower = self.images.tower
        return Tally(tower.samples, self.images.objective, [head], self._classifier.dtype).result(tower.answers())


Search = Naive | Exact | JointExact  # has the `result` of the current model, and chooses the next head
