"""Tuning the text tower of a dual encoder while the image tower is locked."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import derive_seed, evaluation_mode, torch_seeded
from ..batches import Batches, Inputs, borrowed, require_rereadable
from ..errors import ConfigError, DataError
from ..heads.ranking import model_fingerprint
from ..model.clip import DualEncoder
from ..model.config import output_width
from ..model.ensemble import Ensemble
from .finetune import best_rate, check_choosing
from .loop import BaseLearner, NotFiniteError, RunPlan, RunResult, Runtime, find_runtime, fingerprint
from .recipe import Recipe, is_trained, optimizer_over, training_dtype, with_dropout

TEXTS_AT_ONCE = 256


@torch.no_grad()
def image_features(dual: DualEncoder, batches: Batches) -> Tensor:
    """What the image projection of a dual encoder with one member takes, `[N, d]`, on the encoder's device.

    Args:
        dual: Its image tower runs in evaluation mode and is left as it was.
        batches: Batches of images, alone or first in a pair: what `encode_image` takes.
    """
    return _all_features(dual.image, (_images(batch) for batch in batches))


@torch.no_grad()
def text_features(dual: DualEncoder, texts: list[str]) -> Tensor:
    """What the text projection of a dual encoder with one member takes, `[N, d]`, on the encoder's device."""
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    return _all_features(dual.text, (texts[start : start + TEXTS_AT_ONCE] for start in starts))


def given_features(inputs: Any) -> bool:
    """Whether these are features `[B, d]` rather than what a tower takes."""
    return isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.is_floating_point()


def features_of(tower: Ensemble, inputs: Any, where: str) -> Tensor:
    """Features `[B, d]` of what a tower takes, or the features themselves where they were computed before."""
    if not given_features(inputs):
        return cast(Tensor, tower(tower.prepare(inputs)))[0]  # [1, B, d] to [B, d]
    width = output_width(tower.config)
    if inputs.shape[1] != width:
        raise DataError(
            f"the {tower.kind} features of {where} have shape {list(inputs.shape)}, the {tower.kind} tower gives "
            f"{width} numbers each; compute them with {tower.kind}_features and this dual encoder"
        )
    return cast(Tensor, inputs.to(tower.device, tower.dtype))


def _all_features(tower: Ensemble, batches: Batches) -> Tensor:
    with evaluation_mode(tower):
        parts = [features_of(tower, batch, f"batch {index}") for index, batch in enumerate(batches)]
    if not parts:
        raise DataError(f"there is nothing to compute {tower.kind} features of; check the data")
    return torch.cat(parts)


def _images(batch: Any) -> Any:
    if isinstance(batch, Tensor | Mapping):
        return batch
    return batch[0] if isinstance(batch[0], Tensor | Mapping | list | tuple) else batch


LARGEST_SCALE = 4.605170185988092  # log(100): where open_clip stops the logit scale


def positives(count: int, labels: Tensor | None, device: torch.device) -> Tensor:
    """Which of `count` images and texts belong together, `[N, N]`: the same label, or without labels the same place."""
    if labels is None:
        return torch.eye(count, dtype=torch.bool, device=device)
    return labels[:, None] == labels[None, :]


def contrastive_loss(
    images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Mean of the cross-entropies of every image over all texts and of every text over all images.

    The target of a row is spread evenly over its positives. Where all labels differ, this is CLIP's loss.

    Args:
        images: Embeddings of length one, `[N, e]`.
        texts: Likewise, `[N, e]`; text i describes image i.
        logit_scale: Logarithm of the scale of the cosines, one number.
        labels: Class of every pair, `[N]`; pairs of one class are positives of each other. None: each pair alone.
        label_smoothing: Of both cross-entropies.
    """
    logits = logit_scale.exp() * (images @ texts.T)  # [N, N]: images in rows, texts in columns
    target = positives(len(images), labels, images.device).to(logits.dtype)
    target = target / target.sum(1, keepdim=True)  # symmetric, so it serves both directions
    of_images = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    of_texts = F.cross_entropy(logits.T, target.T, label_smoothing=label_smoothing)
    return (of_images + of_texts) / 2


@dataclass(frozen=True)
class PairBatch:
    """Images (or their features), texts and perhaps classes, as many of each; still where the loader put them."""

    images: Any
    texts: Any
    labels: Tensor | None

    def __len__(self) -> int:
        return _count(self.texts)


def read_pairs(raw: Any, name: str, index: int = 0) -> PairBatch:
    """Take `(images, texts, labels)` or `(images, texts)` apart.

    Raises:
        DataError: Something else, or not as many images as texts, or as labels.
    """
    where = f"batch {index} of {name}"
    if not isinstance(raw, list | tuple) or len(raw) not in (2, 3):
        size = f" with {len(raw)} parts" if isinstance(raw, list | tuple) else ""
        raise DataError(
            f"{where} is a {type(raw).__name__}{size}; expected (images, texts, labels), or (images, texts) where "
            "every pair stands alone"
        )
    images, texts = raw[0], raw[1]
    if isinstance(texts, str):
        raise DataError(f"the texts of {where} are one string; give a list of strings, one per image")
    texts = list(texts) if isinstance(texts, tuple) else texts
    counts = {"images": _count(images), "texts": _count(texts)}
    labels = raw[2] if len(raw) == 3 else None
    if labels is not None:
        labels = torch.as_tensor(labels)
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(f"labels in {where} must be whole numbers [B], got {labels.dtype} {list(labels.shape)}")
        counts["labels"] = len(labels)
    if len(set(counts.values())) > 1 or not counts["texts"]:
        raise DataError(f"{where} has {_listed(counts)}; every image needs one text, and one label where there are any")
    return PairBatch(images, texts, labels)


def pair_content(raw: Any, name: str, index: int = 0) -> dict[str, Tensor]:
    """The tensors of a batch by name, for its fingerprint; strings as their bytes, pictures as a hash of theirs."""
    batch = read_pairs(raw, name, index)
    content: dict[str, Tensor] = {} if batch.labels is None else {"labels": batch.labels}
    for side, values in (("images", batch.images), ("texts", batch.texts)):
        if isinstance(values, Tensor):
            content[side] = values
        elif isinstance(values, Mapping):
            content |= {f"{side}.{key}": value for key, value in values.items()}
        else:
            parts = [value if isinstance(value, str) else _described(value) for value in values]
            content[side] = torch.frombuffer(bytearray(json.dumps(parts).encode()), dtype=torch.uint8)
    return content


def _described(picture: Any) -> list[Any]:
    """What tells a PIL image from others; of anything else, which no model reads, its type."""
    if not callable(getattr(picture, "tobytes", None)):
        return [type(picture).__name__]
    size, mode = getattr(picture, "size", None), getattr(picture, "mode", None)
    return [str(size), str(mode), hashlib.sha256(picture.tobytes()).hexdigest()]


def _count(values: Any) -> int:
    if isinstance(values, Mapping):
        return len(next(iter(values.values()))) if values else 0
    return len(values)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


ROWS_AT_ONCE = 1024


@torch.no_grad()
def retrieval(images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None) -> tuple[float, float]:
    """Share of images whose nearest text is of their class, and the mean NLL of all texts of their class.

    Args:
        images: Embeddings of length one, `[N, e]`.
        texts: Likewise.
        logit_scale: Logarithm of the scale of the cosines.
        labels: Class of every pair; None where only the text of the pair itself is right.
    """
    classes = torch.arange(len(images), device=images.device) if labels is None else labels
    right, nll = 0, 0.0
    for rows in torch.arange(len(images), device=images.device).split(ROWS_AT_ONCE):
        log_probs = (logit_scale.exp() * (images[rows] @ texts.T)).double().log_softmax(1)  # [rows, N]
        same = classes[rows, None] == classes[None, :]
        right += int(same.gather(1, log_probs.argmax(1, keepdim=True)).sum())
        nll -= float(log_probs.masked_fill(~same, -math.inf).logsumexp(1).sum())
    if not math.isfinite(nll):
        raise DataError(f"validation has a negative log-likelihood of {nll}; look for bad values in its pairs")
    return right / len(images), nll / len(images)


SCALE = "logit_scale"
TOWER = "text."
_TEXT_PROJECTION, _IMAGE_PROJECTION = "projections.text.", "projections.image."


@dataclass(frozen=True)
class Moving:
    """Which parts learn besides the text tower.

    Attributes:
        image_projection: Whether the image projection learns; the image tower never does.
        projection_rate: Learning rate of image projection and logit scale, over that of the recipe.
    """

    image_projection: bool = False
    projection_rate: float = 1.0


def training_copy(start: DualEncoder, recipe: Recipe, moving: Moving, device: torch.device) -> DualEncoder:
    """A copy ready to train: in float32 (or float64), on `device`, frozen but for what is to learn."""
    layers = start.text.num_layers
    if recipe.last_blocks is not None and recipe.last_blocks > layers:
        raise ConfigError(f"Recipe.last_blocks is {recipe.last_blocks}, but the text tower has {layers} blocks")
    state = {name: tensor.to(device, training_dtype(tensor)) for name, tensor in start.state_dict().items()}
    config = replace(start.config, text=with_dropout(start.config.text, recipe.dropout))
    model = DualEncoder.from_state(config, state, start.image.metadata, start.text.metadata)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_learns(name, recipe, moving, layers))
    return model


def trained_parameters(model: DualEncoder) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(model: DualEncoder, recipe: Recipe, moving: Moving) -> torch.optim.Optimizer:
    """The recipe's optimizer: text side, and image projection and scale at their own rate, with and without decay."""
    trained = trained_parameters(model)
    others = (name for name in trained if not name.startswith((TOWER, _TEXT_PROJECTION)))
    return optimizer_over(trained, recipe, dict.fromkeys(others, moving.projection_rate), spared=(SCALE,))


def _learns(name: str, recipe: Recipe, moving: Moving, layers: int) -> bool:
    if name.startswith(TOWER):
        return is_trained(name.removeprefix(TOWER), recipe, layers)
    if name.startswith(_TEXT_PROJECTION):
        return "readout" in recipe.train_groups
    if name.startswith(_IMAGE_PROJECTION):
        return moving.image_projection
    return name == SCALE


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


@torch.inference_mode(False)
@torch.enable_grad()
def tune_text(
    dual: DualEncoder,
    train: Batches,
    recipe: Recipe,
    *,
    validation: Batches | None = None,
    train_image_projection: bool = False,
    projection_rate: float = 1.0,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    checkpoint_every: int = 500,
) -> DualEncoder:
    """Train a copy of a dual encoder with one member so that its texts meet its images; the input is untouched.

    The image tower is locked: it gets no gradient and ends with the bits it had. The loss is CLIP's, over all pairs of
    an update; pairs of one class are positives of each other. `Recipe.gradient_accumulation` batches, from every
    process that accelerate or torchrun started, count as one large batch: every image is compared with every text of
    all of them. The logit scale (a logarithm, as CLIP has it) is trained and kept between 0 and log(100); the first
    update moves one from outside to the nearer end.

    `Recipe.train_groups` and `last_blocks` speak of the text tower; the text projection belongs to the group
    `readout`. With `validation`, the weights are kept with which the text nearest to an image is most often of its
    class; a grid of learning rates is decided in the same way.

    With `output`, a run that was killed goes on where it was when called again with the same arguments, and ends
    (on a CPU) with the same bits; see `finetune`.

    Args:
        dual: One member, perhaps pruned in either tower. Tune members one by one and fuse them afterwards.
        train: Batches `(images, texts, labels)` that can be read again and again. Images as `encode_image` takes them,
            or features `[B, d]` computed once by `text_tuning.image_features`; texts as `encode_text` takes them,
            or, where the text tower does not learn, features by `text_tuning.text_features`; labels `[B]` or None, or
            left out: then each pair stands alone.
        recipe: How to train.
        validation: Held-out batches of the same kind.
        train_image_projection: Whether the image projection learns, too; for one that is new.
        projection_rate: Learning rate of image projection and logit scale, over that of the recipe.
        output: Folder for checkpoints and the journal of evaluations.
        device: Where to train; None stays on the encoder's device. The result is where its input was.
        progress: Whether to show a progress bar.
        checkpoint_every: Updates between checkpoints; the ends of epochs and evaluations are saved too.

    Raises:
        ConfigError: More than one member, or a recipe that does not fit.
        DataError: Batches that cannot be used, or a loss that is not finite; the last checkpoint stays.
        CheckpointError: A checkpoint in `output` that belongs to another recipe, model or data.
    """
    _check(dual, recipe, train_image_projection, projection_rate, checkpoint_every)
    check_choosing(recipe, validation)
    require_rereadable(train, "train")
    if validation is not None:
        require_rereadable(validation, "validation")
    moving = Moving(train_image_projection, projection_rate)
    identity: dict[str, Any] = {}
    if output is not None:
        seed = derive_seed(recipe.seed, "fingerprint")
        identity = {
            "task": "text tuning",
            "train": fingerprint(train, "train", seed, pair_content),
            "validation": None if validation is None else fingerprint(validation, "validation", seed, pair_content),
            "model": model_fingerprint(dual),
            "image_projection": moving.image_projection,
            "projection_rate": moving.projection_rate,
        }
    with ExitStack() as loaders:
        for source in (train, () if validation is None else validation):
            loaders.enter_context(borrowed(source))
        runtime = find_runtime(device, dual.device)
        shared = runtime.share(train)
        plan = RunPlan(recipe, 0.0, 0, shared, validation, checkpoint_every, identity, progress)
        learner = partial(TextLearner, dual, recipe, moving, runtime)
        result, rate = best_rate(learner, plan, runtime, None if output is None else Path(output))
    return _result(dual, result, rate, recipe, moving)


def _result(start: DualEncoder, result: RunResult, rate: float, recipe: Recipe, moving: Moving) -> DualEncoder:
    """The trained weights in a new dual encoder like the one at the start, in its dtype and on its device."""
    state = {
        name: result.weights[name].to(tensor.device, tensor.dtype) if name in result.weights else tensor
        for name, tensor in start.state_dict().items()
    }
    where = "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
    also = " and the image projection" if moving.image_projection else ""
    line = (
        f"tuned the text side ({', '.join(recipe.train_groups)}{where}){also} to the locked image tower for "
        f"{result.steps} steps: {recipe.optimizer}, learning rate {rate:g}, seed {recipe.seed}"
    )
    if result.best is not None:
        line += f"; validation accuracy {result.best.accuracy:.4f} at step {result.best.step}"
    text = replace(start.text.metadata, history=(*start.text.metadata.history, line))
    return DualEncoder.from_state(start.config, state, start.image.metadata, text)


def _check(
    dual: DualEncoder, recipe: Recipe, train_image_projection: bool, projection_rate: float, checkpoint_every: int
) -> None:
    if not isinstance(dual, DualEncoder):
        raise ConfigError(
            f"tune_text takes a DualEncoder, got a {type(dual).__name__}; finetune is for ensembles with a classifier"
        )
    if dual.num_members > 1:
        raise ConfigError(
            f"this dual encoder has {dual.num_members} members; tune them one by one, "
            "[tune_text(dual.member(index), ...) for each index], and fuse the results"
        )
    if train_image_projection and dual.projections.image is None:
        raise ConfigError("train_image_projection is true, but this dual encoder has no image projection to train")
    if recipe.reinit_classifier is not None or recipe.classifier_rate != 1.0:
        raise ConfigError(
            f"Recipe.reinit_classifier is {recipe.reinit_classifier!r} and classifier_rate {recipe.classifier_rate}, "
            "but a dual encoder has no classifier; leave them None and 1, and see projection_rate"
        )
    if not projection_rate > 0 or checkpoint_every < 1:
        raise ConfigError(
            f"projection_rate must be positive and checkpoint_every at least 1, got {projection_rate} and "
            f"{checkpoint_every}"
        )
