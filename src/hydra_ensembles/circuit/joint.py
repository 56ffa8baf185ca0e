"""Circuits over both towers of a dual encoder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..heads.masking import masked
from ..heads.ranking import Head
from .cache import CurrentModel, CurrentTower, Texts, of_tower, plain, use_classes
from .scores import Choice, IntArray, judge, parts, quantum, require_finite
from .search import Exact, Naive, Sweep, forward_cost

_ROWS = 1 << 13  # samples whose logits are held at once


class JointNaive(Naive):
    """Evaluates each candidate from the inputs and the prompts to the logits."""

    def __init__(self, *arguments: Any, texts: Texts) -> None:
        super().__init__(*arguments)
        self.texts = texts

    @contextmanager
    def _switched_off(self, heads: Sequence[Head]) -> Iterator[None]:
        """Both towers without these heads, the class embeddings computed anew."""
        tower, prompts = self.texts.tower, self.texts.prompts
        with masked(self.model, plain(of_tower(heads, text=False))), masked(tower, plain(of_tower(heads, text=True))):
            embeddings = []
            for group in prompts.groups:
                for rows in parts(len(group), self.batch_size):
                    mask, segments = (
                        None if part is None else part[rows] for part in (group.attention_mask, group.token_type_ids)
                    )
                    embeddings.append(tower(group.inputs[rows], mask, segments)[0])
                self.work.add(len(group) * tower.num_layers, forward_cost(tower, group))
            use_classes(self.model, self.texts.classes(torch.cat(embeddings)))
            yield


class TextCandidates:
    """The class embeddings that each head of the text tower would leave behind.

    Args:
        texts: Prompts, and what makes class embeddings of their embeddings.
        current: The text tower with all heads chosen so far taken out, and its activations on the prompts.
    """

    def __init__(self, texts: Texts, current: CurrentTower) -> None:
        self.texts, self.current = texts, current
        self.sweep = Sweep(current, self)
        self._classes: dict[Head, Tensor] = {}
        self._layer: dict[int, Tensor] = {}

    @torch.no_grad()
    def classes(self) -> Tensor:
        """Scaled class embeddings of the current model, `[C, e]`."""
        embeddings = self.current.model.classify(torch.cat(self.current.features))
        return self.texts.classes(embeddings)

    @torch.no_grad()
    def without(self, heads: Sequence[Head]) -> Iterator[tuple[Head, Tensor]]:
        """Candidates of this rank with the class embeddings `[C, e]` that are left without each of them."""
        own = [head for head in heads if head in self.current.own]
        for layer in sorted({head.layer for head in own if head not in self._classes}):
            self._run([head for head in own if head.layer == layer and head not in self._classes])
        for head in own:
            yield head, self._classes[head]

    def remove(self, head: Head) -> None:
        """Take a head out; what was known of the others is not true any more."""
        self.current.remove(head)
        self._classes.clear()

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in embeddings of pairs of candidate and prompt."""
        for index in np.unique(candidates):
            mine = candidates == index
            rows = torch.from_numpy(numbers[mine]).to(logits.device)
            if index not in self._layer:
                self._layer[index] = logits.new_empty(len(self.current.samples.labels), logits.shape[1])
            self._layer[index][rows] = logits[torch.from_numpy(mine.nonzero()[0]).to(logits.device)]

    def _run(self, heads: Sequence[Head]) -> None:
        """Run the prompts without each of some heads of one layer."""
        prompts = len(self.current.samples.labels)
        indices = np.array([self.current.index_of[head] for head in heads], np.int64)
        self.sweep.run(np.repeat(indices, prompts), np.tile(np.arange(prompts), len(heads)))
        for head, index in zip(heads, indices, strict=True):
            self._classes[head] = self.texts.classes(self._layer.pop(index))


class JointExact:
    """The choices of `JointNaive`, by branch and bound in the image tower and in full in the text tower.

    Args:
        images: Branch and bound over the heads of the image tower.
        texts: The heads of the text tower.
    """

    def __init__(self, images: Exact, texts: TextCandidates) -> None:
        self.images, self.texts = images, texts
        self._embeddings: list[Tensor] = []

    @property
    def current(self) -> CurrentModel:
        """The image tower with the class embeddings, as it is."""
        return self.images.current

    @property
    def result(self) -> Choice:
        """The result of the model as it is."""
        return self.current.choice

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Choice | None = None) -> Choice:
        """The candidate whose removal leaves the best score; `known` is one whose result is known already."""
        texts = of_tower(candidates, text=True)
        if texts:
            found = [self._judge(head, classes) for head, classes in self.texts.without(texts)]
            best = self.images.ranks.smallest(min(found, default=None))
            known = best if known is None else min(best, known)
        return self.images.choose(of_tower(candidates, text=False), known)

    def remove(self, head: Head) -> None:
        """Take a head out for good; the tower it does not lie in is not run."""
        if head.tower == "text":
            self.texts.remove(head)
            use_classes(self.current.model.ensemble, self.texts.classes())
            self.current.answer()
        else:
            self.images.remove(head)
            self._embeddings = []

    def _judge(self, head: Head, classes: Tensor) -> Choice:
        """The result with other class embeddings, on all samples."""
        current, objective = self.current, self.current.objective
        wrong, finite = (torch.empty(objective.samples, dtype=torch.bool, device=current.device) for _ in range(2))
        confidence = torch.empty(objective.samples, dtype=torch.int64, device=current.device)
        bias = current.model.ensemble.readout.class_embeddings.bias  # type: ignore[union-attr]
        for embeddings, group in zip(self._image_embeddings(), current.samples.groups, strict=True):
            for rows in parts(len(group), _ROWS):
                logits = embeddings[rows] @ classes.T
                logits = logits if bias is None else logits + bias[0]
                numbers = torch.from_numpy(group.numbers[rows]).to(current.device)
                answers = judge(logits, current.samples.labels[numbers], quantum(logits.dtype))
                wrong[numbers], confidence[numbers], finite[numbers] = answers
        require_finite(finite, current.samples, head)
        errors, discordance = objective.count(wrong[None, : objective.id_count], confidence[None])
        counts = int(errors), int(discordance)
        return Choice(objective.value(*counts), head, *counts)

    def _image_embeddings(self) -> list[Tensor]:
        """Embeddings of length one `[g, e]` of all samples in the current model, by group."""
        if not self._embeddings:
            readout = self.current.model.ensemble.readout
            self._embeddings = [readout.embedding(features[None])[0] for features in self.current.features]
        return self._embeddings
