"""A text side that learns, moved by one update at a time.

The loss of a pair depends on all other pairs, so an update over several batches, or several processes, is computed in
two steps. First all embeddings of the update are made and the loss of all of them together gives the gradient of
every embedding. Then each batch runs again, with the same dropout, and sends the gradients of its embeddings through
the tower. What comes out is the gradient of one large batch; memory is that of a small one.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import derive_seed, torch_seeded
from ..batches import Batches, Inputs
from ..errors import DataError
from ..finetune.base_learner import BaseLearner, NotFiniteError
from ..finetune.recipe import Recipe
from ..finetune.runtime import Runtime
from ..model.clip import DualEncoder
from .features import features_of, given_features
from .loss import LARGEST_SCALE, contrastive_loss
from .pair_batches import PairBatch, read_pairs
from .parameters import TOWER, Moving, make_optimizer, trained_parameters, training_copy
from .retrieval import retrieval

Embeddings = tuple[Tensor, Tensor]  # of images and of texts, [B, e] each, of length one


class TextLearner(BaseLearner[PairBatch]):
    """A copy of a dual encoder whose text side is in training."""

    def __init__(self, start: DualEncoder, recipe: Recipe, moving: Moving, runtime: Runtime) -> None:
        self.model = training_copy(start, recipe, moving, runtime.device)
        trained = trained_parameters(self.model)
        super().__init__(trained, make_optimizer(self.model, recipe, moving), recipe, runtime)
        self.tower_learns = any(name.startswith(TOWER) for name in trained)

    def begin(self) -> None:
        """Get ready to train, after the weights are in place; a tower that does not learn stays in evaluation mode."""
        self.model.eval()
        self.model.text.train(self.tower_learns)

    def read(self, raw: Any, index: int) -> PairBatch:
        """Images, texts and perhaps labels."""
        return read_pairs(raw, "train", index)

    def update(self, group: list[PairBatch], rate: float, seed: int) -> float:
        """One step on the pairs of all batches of all processes together."""
        self.set_rate(rate)
        sides = [self._inputs(batch, index) for index, batch in enumerate(group)]
        seeds = [derive_seed(seed, index, self.runtime.rank) for index in range(len(group))]
        with torch.set_grad_enabled(len(group) == 1):  # one batch is run once, with its gradients
            found = [self._embed(*side, one) for side, one in zip(sides, seeds, strict=True)]
        loss, gradients = self._loss(found, self._agreed_labels(group))
        for index, gradient in enumerate(gradients):
            again = found[0] if len(group) == 1 else self._embed(*sides[index], seeds[index])
            pairs = [(one, to) for one, to in zip(again, gradient, strict=True) if one.requires_grad]
            if pairs:
                torch.autograd.backward([one for one, _ in pairs], [to for _, to in pairs])
        self._exchange()
        self.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0.0, LARGEST_SCALE)
        return loss

    def measure(self, validation: Batches) -> tuple[float, float]:
        """How often the text nearest to an image is of its class, and the NLL of that, over the whole data."""
        self.model.eval()
        found, labels = [], []
        with torch.no_grad():
            for index, raw in enumerate(validation):
                batch = read_pairs(raw, "validation", index)
                found.append(self._embed(*self._inputs(batch, index, "validation"), seed=0))
                labels.append(batch)
            self.begin()
            if not found:
                raise DataError("validation has no batches; check the loader, or that it was not consumed before")
            images, texts = (torch.cat(side) for side in zip(*found, strict=True))
            classes = _labels_of(labels)
            classes = None if classes is None else classes.to(images.device)
            return retrieval(images, texts, self.model.logit_scale, classes)

    def _inputs(self, batch: PairBatch, index: int, name: str = "train") -> tuple[Tensor, Inputs]:
        """Features of the images `[B, d]` and prepared texts, or their features where the tower does not learn."""
        where = f"batch {index} of {name}"
        given = given_features(batch.texts)
        if given and self.tower_learns:
            raise DataError(
                f"the texts of {where} are features, but the text tower is to learn; give texts, or train the "
                "projections alone: Recipe(train_groups=('readout',))"
            )
        with torch.no_grad(), self._autocast():
            images = features_of(self.model.image, batch.images, where)
            texts = features_of(self.model.text, batch.texts, where) if given else None
        return images, self.model.text.prepare(batch.texts) if texts is None else texts

    def _embed(self, images: Tensor, texts: Inputs, seed: int) -> Embeddings:
        projections, dtype = self.model.projections, self.model.dtype
        with torch_seeded(seed, self.runtime.device), self._autocast():
            features = images, features_of(self.model.text, texts, "a batch")
            maps = projections.image, projections.text
            sides = [x[None] if one is None else one(x[None]) for x, one in zip(features, maps, strict=True)]
        image, text = (F.normalize(side[0].to(dtype), dim=-1) for side in sides)  # [1, B, e] to [B, e]
        return image, text

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.runtime.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def _loss(self, found: list[Embeddings], labels: Tensor | None) -> tuple[float, list[Embeddings]]:
        """The loss over everything, and the gradients of this process's embeddings, batch by batch."""
        sizes = [len(image) for image, _ in found]
        leaves, start = [], 0
        for side in zip(*found, strict=True):
            parts = self.runtime.gather(torch.cat(side).detach())
            start = sum(len(part) for part in parts[: self.runtime.rank])
            leaves.append(torch.cat(parts).requires_grad_())  # [N, e]
        if labels is not None:
            labels = torch.cat(self.runtime.gather(labels.to(self.runtime.device)))
        loss = contrastive_loss(leaves[0], leaves[1], self.model.logit_scale, labels, self.recipe.label_smoothing)
        value = loss.item()
        if not math.isfinite(value):
            bad = (index for index, pair in enumerate(found) if not all(bool(one.isfinite().all()) for one in pair))
            raise NotFiniteError(f"the loss is {value}", next(bad, 0))
        self.scaler.scale(loss).backward()
        own = slice(start, start + sum(sizes))
        images, texts = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        return value, list(zip(images[own].split(sizes), texts[own].split(sizes), strict=True))

    def _agreed_labels(self, group: list[PairBatch]) -> Tensor | None:
        """Labels of the batches; refused in every process where some of all batches have them and some do not.

        A process that found this out alone would leave the others waiting for it.
        """
        own = torch.tensor([sum(batch.labels is not None for batch in group), len(group)], device=self.runtime.device)
        labelled, batches = self.runtime.total(own).tolist()
        if labelled not in (0, batches):
            raise _some_labels(labelled, batches)
        return _labels_of(group)

    def _exchange(self) -> None:
        """Sum the gradients over all processes; that of the scale is whole in each of them."""
        processes = self.runtime.processes
        if processes == 1:
            return
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        if self.model.logit_scale.grad is not None:
            self.model.logit_scale.grad /= processes
        total = self.runtime.total(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _labels_of(group: list[PairBatch]) -> Tensor | None:
    """Labels of several batches one after another; None where there are none."""
    present = [batch.labels for batch in group if batch.labels is not None]
    if len(present) not in (0, len(group)):
        raise _some_labels(len(present), len(group))
    return torch.cat(present) if present else None


def _some_labels(labelled: int, batches: int) -> DataError:
    return DataError(f"{labelled} of {batches} batches have labels; all must, or none (then every pair stands alone)")
