"""Circuits over both towers of a dual encoder.

A head of the text tower changes the class embeddings only: its candidates run the text tower on the prompts, and
multiply with the image embeddings there are. A head of the image tower meets the class embeddings there are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..heads.masking import masked, working_copy
from ..heads.ranking import Head
from ..model.clip import DualEncoder, average_templates, prompts_of
from ..model.ensemble import Ensemble
from ..model.stem_readout import compose
from .cache import CachedTower
from .scores import Answers, IntArray, Result, SampleGroup, Samples, parts
from .search import Exact, run_all, untowered
from .working_model import Work

_ROWS = 1 << 13  # samples whose logits are held at once


@dataclass(frozen=True, eq=False)
class Texts:
    """What class embeddings are made of."""

    tower: Ensemble  # a private copy; it answers with embeddings, its projection being its classifier
    prompts: Samples  # every class in every template, one class after another, without labels
    templates: int  # prompts of each class
    scale: Tensor  # [1], what cosines are multiplied with

    def classes(self, embeddings: Tensor) -> Tensor:
        """Scaled class embeddings `[C, e]` out of those of all prompts, `[P, e]`."""
        return average_templates(F.normalize(embeddings, dim=-1)[None], self.templates)[0] * self.scale


def read_texts(
    dual: DualEncoder, names: Sequence[str], templates: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Texts:
    """A copy of the text tower in another dtype and place, with its projection as classifier, and the prompts."""
    tower = dual.text
    if tower.config.readout.cosine is not None:
        raise ConfigError("the text tower classifies by class embeddings; use the text tower as it was converted")
    ids, *others = tower.unpack(tower.prepare(prompts_of(names, templates)), None, None)
    mask, segments = (None if part is None else part.to(device) for part in others)
    group = SampleGroup(np.arange(len(ids)), (ids.to(device), mask, segments))
    labels = torch.full((len(group),), -1, device=device)
    prompts = Samples((group,), labels, id_count=0, origin=np.zeros((len(group), 2), np.int64), fingerprint="")
    projection = compose(tower.readout.classifier, dual.projections.text)
    if projection is not None:
        width, biased = projection.weight.shape[1], projection.bias is not None
        readout = replace(tower.config.readout, num_classes=width, bias=biased)
        prefix = "readout.classifier."
        state = {name: tensor for name, tensor in tower.state_dict().items() if not name.startswith(prefix)}
        state |= {prefix + name: tensor for name, tensor in projection.state_dict().items()}
        tower = Ensemble.from_state(replace(tower.config, readout=readout), state)
    scale = dual.logit_scale.detach().to(device, dtype).exp()
    return Texts(working_copy(tower, dtype, device), prompts, len(templates), scale)


def use_classes(classifier: Ensemble, classes: Tensor) -> None:
    """Give a zero-shot classifier other class embeddings, `[C, e]`."""
    embeddings = classifier.readout.class_embeddings
    assert embeddings is not None
    embeddings.weight = nn.Parameter(classes[None], requires_grad=False)


def of_tower(heads: Sequence[Head], text: bool) -> list[Head]:
    """The heads of the text tower, or of the other one."""
    return [head for head in heads if (head.tower == "text") == text]


@contextmanager
def both_without(model: Ensemble, texts: Texts, batch_size: int, work: Work, heads: Sequence[Head]) -> Iterator[None]:
    """Both towers without these heads, and the class embeddings computed anew, within a `with` block: for `Naive`."""
    of_image, of_text = of_tower(heads, text=False), of_tower(heads, text=True)
    with masked(model, untowered(of_image)), masked(texts.tower, untowered(of_text)):
        embedded = run_all(texts.tower, texts.prompts, batch_size, work)
        use_classes(model, texts.classes(torch.cat([embeddings for _, embeddings in embedded])))
        yield


class JointExact:
    """The choices of `Naive` over both towers, by branch and bound in the image tower and in full in the text tower.

    `tower` is the text tower with all heads chosen so far taken out, and its activations on the prompts.
    """

    def __init__(self, images: Exact, texts: Texts, tower: CachedTower) -> None:
        self.images, self.texts, self.tower = images, texts, tower
        self._classes: dict[Head, Tensor] = {}  # [C, e], that text candidates would leave behind
        self._embeddings: list[Tensor] = []  # [g, e] of length one, of all images, by group
        self._use_own_classes()

    @property
    def result(self) -> Result:
        """The result of the model as it is."""
        return self.images.result

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Result | None = None) -> Result:
        """The candidate whose removal leaves the best score; `known` is one whose result is known already."""
        texts = of_tower(candidates, text=True)
        if texts:
            own = [head for head in texts if head in self.tower.own]
            for layer in sorted({head.layer for head in own if head not in self._classes}):
                self._run_prompts([head for head in own if head.layer == layer and head not in self._classes])
            best = self.images.ranks.smallest(min((self._judge(head) for head in own), default=None))
            known = best if known is None else min(best, known)
        return self.images.choose(of_tower(candidates, text=False), known)

    def remove(self, head: Head) -> None:
        """Take a head out for good; the tower it does not lie in is not run."""
        if head.tower == "text":
            self.tower.remove(head)
            self._classes.clear()
            self._use_own_classes()
        else:
            self.images.remove(head)
            self._embeddings.clear()

    @torch.no_grad()
    def _use_own_classes(self) -> None:
        """Classify by the class embeddings of the text tower as it is."""
        self._own = self.tower.model.classify(torch.cat(self.tower.features))  # [prompts, e]
        use_classes(self.images.tower.model.ensemble, self.texts.classes(self._own))
        self.images.answer()

    def _run_prompts(self, heads: Sequence[Head]) -> None:
        """The class embeddings that are left without each of some heads of one layer."""
        count, index = len(self.tower.samples.labels), self.tower.index(heads)  # ascending, as the candidates are
        table = self._own.new_empty(len(heads), *self._own.shape)  # [heads, prompts, e]

        def record(candidates: IntArray, numbers: IntArray, embeddings: Tensor) -> None:
            rows, columns = map(torch.from_numpy, (np.searchsorted(index, candidates), numbers))
            table[rows.to(table.device), columns.to(table.device)] = embeddings

        self.tower.run(np.repeat(index, count), np.tile(np.arange(count), len(heads)), record)
        self._classes |= {head: self.texts.classes(one) for head, one in zip(heads, table, strict=True)}

    def _judge(self, head: Head) -> Result:
        """The result without a head of the text tower, on all samples."""
        ensemble, samples = self.images.tower.model.ensemble, self.images.tower.samples
        if not self._embeddings:
            self._embeddings = [ensemble.readout.embedding(one[None])[0] for one in self.images.tower.features]
        bias = ensemble.readout.class_embeddings.bias  # type: ignore[union-attr]
        return Answers(samples, self.images.objective, [head], ensemble.dtype).result(
            (group.numbers[rows], embeddings[rows] @ self._classes[head].T + (0 if bias is None else bias[0]))  # [B, C]
            for embeddings, group in zip(self._embeddings, samples.groups, strict=True)
            for rows in parts(len(group), _ROWS)
        )
