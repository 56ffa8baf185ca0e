"""Training the text tower of a dual encoder while the image tower is locked."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import evaluation_mode, with_float64
from ..batches import Batches, read_labels, size_of
from ..errors import ConfigError, DataError
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import dropping
from .loop import Job, Learner, TrainOptions, train_best, trains
from .recipe import Recipe, trainable_state

LARGEST_SCALE = 4.605170185988092  # log(100), open_clip's maximum of the logit scale
ROWS_AT_ONCE = 1024

Pairs = tuple[Any, Any, Tensor | None]  # images (or features), texts, optional classes; on the loader's device


@torch.no_grad()
def image_features(dual: DualEncoder, batches: Batches) -> Tensor:
    """Input of the image projection of a dual encoder with one member, `[N, d]`, on the encoder's device.

    Batches are inputs of `encode_image`, without texts and labels; the tower runs in evaluation mode.
    """
    with dropping(False):
        parts = [features_of(dual.image, images) for images in batches]
    return torch.cat(parts)


def features_of(tower: Ensemble, images: Any) -> Tensor:
    """Features `[B, d]` of a tower's inputs; of features that were computed before, these."""
    if isinstance(images, Tensor) and images.dim() == 2:
        return images.to(tower.device, tower.dtype)
    return cast(Tensor, tower(tower.prepare(images)))[0]  # [1, B, d] to [B, d]


def contrastive_loss(
    images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Mean of two cross-entropies: of every image over all texts, and of every text over all images.

    `images` and `texts` are normalised embeddings `[N, e]` of pairs, `logit_scale` the logarithm of the scale of their
    cosines. Pairs with the same of the `labels` `[N]` are positives of each other, and share the target of a row
    evenly; if all labels differ, or there are none, this is CLIP's loss.
    """
    logits = logit_scale.exp() * (images @ texts.T)  # [N, N]: images in rows, texts in columns
    classes = torch.arange(len(images), device=images.device) if labels is None else labels
    target = (classes[:, None] == classes[None, :]).to(logits.dtype)  # [N, N]: which pairs are positives
    target = target / target.sum(1, keepdim=True)  # symmetric, so it serves both directions
    of_images = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    of_texts = F.cross_entropy(logits.T, target.T, label_smoothing=label_smoothing)
    return (of_images + of_texts) / 2


@torch.no_grad()
def retrieval(images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None) -> tuple[float, float]:
    """Share of images whose nearest text has their class, and mean NLL of all texts of their class."""
    device = with_float64(images.device)
    images, texts, scale = images.to(device), texts.to(device), logit_scale.exp().to(device)
    classes = (torch.arange(len(images)) if labels is None else labels).to(device)
    right, nll = 0, 0.0
    for rows in torch.arange(len(images), device=device).split(ROWS_AT_ONCE):
        log_probs = (scale * (images[rows] @ texts.T)).double().log_softmax(1)  # [rows, N]
        same = classes[rows, None] == classes[None, :]
        right += int(same.gather(1, log_probs.argmax(1, keepdim=True)).sum())
        nll -= float(log_probs.masked_fill(~same, -math.inf).logsumexp(1).sum())
    return right / len(images), nll / len(images)


def read_pairs(raw: Any, name: str, index: int = 0) -> Pairs:
    """Split `(images, texts, labels)` or `(images, texts)`; raise `DataError` if their lengths differ."""
    where = f"batch {index} of {name}"
    if not isinstance(raw, list | tuple) or len(raw) not in (2, 3):
        raise DataError(f"{where} is a {type(raw).__name__}; expected (images, texts, labels), or (images, texts)")
    images, texts, labels = (*raw, None)[:3]
    texts = list(texts) if isinstance(texts, tuple) else texts
    pictures, sentences = (
        len(next(iter(side.values()))) if isinstance(side, Mapping) else len(side) for side in (images, texts)
    )
    if pictures != sentences or not sentences:
        raise DataError(f"{where} has {pictures} images, {sentences} texts; every image needs one text")
    return images, texts, None if labels is None else read_labels(labels, sentences, where)


class TextLearner(Learner[Pairs]):
    """A copy of a dual encoder in training: in float32 (or float64), frozen except for what the recipe trains.

    Groups and blocks of the recipe refer to the text tower; the text projection belongs to `readout`. The image
    projection trains if requested; it and the logit scale have their own rate. The image tower never trains.
    """

    def __init__(
        self, start: DualEncoder, recipe: Recipe, image_projection: bool, projection_rate: float, device: torch.device
    ) -> None:
        config = replace(start.config, text=recipe.with_dropout(start.config.text))
        metadata = start.image.metadata, start.text.metadata
        self.model = DualEncoder.from_state(config, trainable_state(start, device), *metadata)
        rates = {"logit_scale": projection_rate}
        for name, parameter in self.model.named_parameters():
            side, _, inner = name.partition(".")
            if side == "text":
                learns = recipe.trains(inner, start.text.num_layers)
            elif name.startswith("projections.text."):
                learns = "readout" in recipe.train_groups
            else:
                learns = name == "logit_scale" or (image_projection and side == "projections")
                rates[name] = projection_rate
            parameter.requires_grad_(learns)
        super().__init__(self.model, recipe, device, rates)
        scale = self.model.logit_scale.item()  # SigLIP's exceeds log(100): clamping would change probabilities at once
        self.bounds = min(0.0, scale), max(LARGEST_SCALE, scale)
        self.model.eval()
        self.model.text.train(any(name.startswith("text.") for name in self.trained))  # no dropout if frozen

    def read(self, raw: Any, index: int) -> Pairs:
        """Images, texts and optional labels."""
        return read_pairs(raw, "train", index)

    def loss(self, batch: Pairs) -> Tensor:
        """The loss of a batch, compared within itself."""
        images, texts = self._embed(batch)
        labels = None if batch[2] is None else batch[2].to(images.device)
        return contrastive_loss(images, texts, self.model.logit_scale, labels, self.recipe.label_smoothing)

    def size(self, batch: Pairs) -> int:
        """Number of pairs."""
        return size_of(batch[1])

    def update(self, group: list[Pairs], rate: float, seed: int) -> float:
        """One optimizer step; the logit scale stays between 0 and log(100), or its initial value if that is outside."""
        loss = super().update(group, rate, seed)
        with torch.no_grad():
            self.model.logit_scale.clamp_(*self.bounds)
        return loss

    @torch.no_grad()
    def measure(self, validation: Batches) -> tuple[float, float]:
        """How often the text nearest to an image has its class, and the NLL, over the whole data."""
        embeddings, labels = [], []
        with evaluation_mode(self.model):
            for index, raw in enumerate(validation):
                batch = read_pairs(raw, "validation", index)
                embeddings.append(self._embed(batch))
                labels += [] if batch[2] is None else [batch[2]]
        if not embeddings or len(labels) not in (0, len(embeddings)):
            raise DataError(f"{len(labels)} of {len(embeddings)} batches of validation have labels; all must, or none")
        images, texts = (torch.cat(side) for side in zip(*embeddings, strict=True))  # [N, e] each
        return retrieval(images, texts, self.model.logit_scale, torch.cat(labels) if labels else None)

    def _embed(self, batch: Pairs) -> tuple[Tensor, Tensor]:
        """Normalised embeddings of the images and the texts of a batch, `[B, e]` each."""
        projections, dtype = self.model.projections, self.model.dtype
        with self.autocast():
            with torch.no_grad():
                images, prepared = features_of(self.model.image, batch[0]), self.model.text.prepare(batch[1])
            features = images[None], self.model.text(prepared)  # [1, B, d] each
            maps = projections.image, projections.text
            sides = [x if projection is None else projection(x) for x, projection in zip(features, maps, strict=True)]
        image, text = (F.normalize(side[0].to(dtype), dim=-1) for side in sides)  # [1, B, e] to [B, e]
        return image, text


@trains
def tune_text(
    dual: DualEncoder,
    train: Batches,
    recipe: Recipe,
    *,
    validation: Batches | None = None,
    train_image_projection: bool = False,
    projection_rate: float = 1.0,
    **run: Unpack[TrainOptions],
) -> DualEncoder:
    """Train the text tower of a copy of a dual encoder with one member to match its images; the input is not changed.

    The image tower is locked: it gets no gradient and stays the same to the last bit. The loss is CLIP's over the
    pairs of a batch; pairs of one class are positives of each other. The logit scale (a logarithm, as in CLIP) is
    trained and kept between 0 and log(100); one that starts outside, as SigLIP's does, goes no further.

    `Recipe.train_groups` and `last_blocks` refer to the text tower; the text projection belongs to the group
    `readout`. With `validation`, the weights are kept with which the text nearest to an image is most often of its
    class; a grid of learning rates is decided in the same way.

    `dual` has one member, perhaps pruned in either tower; train members one by one and fuse them afterwards. `train`
    and `validation` are batches `(images, texts, labels)` that can be read repeatedly: images as for `encode_image`, or
    features `[B, d]` computed once by `image_features`; texts as for `encode_text`; labels `[B]`, or None or left out:
    then each text belongs only to its own image. With `train_image_projection` the image projection trains, too, for
    one that is new; it and the logit scale have `projection_rate` times the learning rate. `run` as for `finetune`.

    Examples:
        >>> pairs = [(torch.randn(4, 3, 32, 32), ["a cat", "a dog", "a red bus", "a tree"], torch.arange(4))]
        >>> tuned = he.tune_text(dual, pairs, he.Recipe(learning_rate=1e-3, steps=2), progress=False)
        >>> images = torch.randn(2, 3, 32, 32)
        >>> torch.equal(tuned.encode_image(images), dual.encode_image(images))  # the image tower is locked
        True
    """
    if not isinstance(dual, DualEncoder):
        raise ConfigError(f"tune_text takes a DualEncoder, got a {type(dual).__name__}; finetune takes an Ensemble")
    if dual.num_members > 1:
        raise ConfigError(f"got {dual.num_members} members; tune each dual.member(index) and fuse the results")
    if train_image_projection and dual.projections.image is None:
        raise ConfigError("train_image_projection is true, but this dual encoder has no image projection to train")
    settings = {"image_projection": train_image_projection, "projection_rate": projection_rate}
    job = Job(recipe, train, validation, settings=settings, **run)
    recipe.check(dual.text, train, validation)
    result = train_best(partial(TextLearner, dual, recipe, train_image_projection, projection_rate), dual, job)
    also = " and the image projection" if train_image_projection else ""
    line = f"tuned the text side{also} to the locked image tower: {result.described(recipe)}"
    text = replace(dual.text.metadata, history=(*dual.text.metadata.history, line))
    return DualEncoder.from_state(dual.config, result.state_like(dual), dual.image.metadata, text)
