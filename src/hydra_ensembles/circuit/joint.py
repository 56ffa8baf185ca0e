"""Circuits over both towers of a dual encoder.

Removing a head of the text tower changes only the class embeddings: such a candidate runs the text tower on the
prompts, and uses the current image embeddings. A candidate of the image tower uses the current class embeddings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..heads.masking import working_copy
from ..heads.ranking import Head
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.stem_readout import compose
from ..model.zero_shot import average_templates, prompts_of
from .cache import CachedTower
from .exact import Exact, Naive, Search, run_without
from .scores import CircuitData, IntArray, Result, SampleGroup, Tally, to_device


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


def read_texts(
    dual: DualEncoder, names: Sequence[str], templates: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Texts:
    """Copy the text tower to a dtype and device, with its projection as classifier, and tokenize the prompts."""
    tower = dual.text
    if tower.config.readout.cosine is not None:
        raise ConfigError("the text tower classifies by class embeddings; use the text tower as it was converted")
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
    scale = dual.logit_scale.detach().to(device, dtype).exp()
    return Texts(working_copy(tower, dtype, device), prompts, len(templates), scale)


def use_classes(classifier: Ensemble, classes: Tensor) -> None:
    """Replace the class embeddings of a zero-shot classifier by `[C, e]`."""
    embeddings = classifier.readout.class_embeddings
    assert embeddings is not None
    embeddings.weight = nn.Parameter(classes[None], requires_grad=False)


def of_tower(heads: Sequence[Head], text: bool) -> list[Head]:
    """Return the heads of the text tower, or (`text=False`) all others."""
    return [head for head in heads if (head.tower == "text") == text]


@dataclass(eq=False)
class JointNaive(Naive):
    """The naive method over both towers: the class embeddings are recomputed for each candidate."""

    texts: Texts

    def answers(self, off: Sequence[Head]) -> Iterator[tuple[IntArray, Tensor]]:
        """Yield sample numbers and answers in batches, for all samples, with some heads of both towers masked."""
        of_text = of_tower(off, text=True)
        prompts = self.texts.prompts
        embedded = run_without(self.texts.tower, of_text, prompts, self.batch_size, self.work)
        use_classes(self.model, self.texts.classes(torch.cat([rows for _, rows in embedded])))
        return super().answers(of_tower(off, text=False))


class JointExact(Search):
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
        heads = [head for head in of_tower(candidates, text=True) if head in self.tower.of_rank]
        for layer in sorted({head.layer for head in heads if head not in self._classes}):
            self._run_prompts([head for head in heads if head.layer == layer and head not in self._classes])
        judged: list[Result] = []
        for head in heads:
            judged.append(self._judge(head))
            self.on_progress(len(judged))
        results = self.images.ranks.gather(min(judged, default=None))
        use_classes(self._classifier, self._current)
        best = min(filter(None, results), default=None)
        self.images.on_progress = lambda decided: self.on_progress(len(heads) + decided)
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
