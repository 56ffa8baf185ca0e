"""MIMO: one network that takes several images at once and classifies each; at inference all are the same."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, Unpack, cast

import torch
from torch import Tensor

from .._utils import derive_seed
from ..batches import Batches, Inputs, move
from ..errors import ConfigError
from ..model.config import PatchStemConfig, Sharing
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata
from ..settings import END, Checked, Range, Share, Whole
from ..training.finetune import EnsembleLearner, train_classifier, trained_metadata
from ..training.loop import Job, TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import fresh, joined, warn_equal

PATCH = "stem.patch"


@dataclass(frozen=True)
class MIMO(Checked):
    """How a MIMO network is trained; the defaults are the paper's.

    Attributes:
        members: Number of images at once, and of classifiers.
        rho: Share of the examples in which all members see the same image.
        batch_repeat: How often each image of a batch is repeated; the batch grows accordingly.
        start: `"pretrained"` gives every member the model's own patch kernel divided by M (so that it starts as the
            model, if all images are the same); `"scratch"` draws all weights.
    """

    members: Annotated[int, Range(2, END - 1)] = 3
    rho: Share = 0.5
    batch_repeat: Whole = 4
    start: Literal["pretrained", "scratch"] = "pretrained"


@trains
def mimo(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    settings: MIMO = MIMO(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """One network with several answers at the price of one: M patch kernels in training, M classifiers.

    At inference all members see the same image, so the kernels are summed: the result shares everything but the
    classifiers. It needs spare width, and longer training than other methods.

    The groups of the recipe should include the stem, where members learn to tell their images apart; from scratch all.
    """
    require_single(model, "mimo")
    start = wide(model, settings, recipe.seed)
    job = Job(recipe, train, validation, settings=settings, **run)
    result = train_classifier(partial(MimoLearner, model, start, settings, recipe), start, job)
    how = f"rho {settings.rho:g}, batch repeat {settings.batch_repeat}"
    line = f"MIMO of {settings.members} from {settings.start}, {how}: {result.described(recipe)}"
    return warn_equal(summed(start, result.state_like(start), model, trained_metadata(start, job.train, result, line)))


def wide(model: Ensemble, settings: MIMO, seed: int) -> Ensemble:
    """The network to train: it takes images concatenated along the channels, `[B, M·channels, H, W]`."""
    stem = model.config.stem
    if not isinstance(stem, PatchStemConfig):
        raise ConfigError("MIMO puts images together in their channels; texts have none, so it takes image models")
    if model.config.readout.cosine is not None:
        raise ConfigError("MIMO learns a classifier for each image; a zero-shot model has class embeddings instead")
    members = settings.members
    many = joined([model] * members, Sharing(stem=True, attention=True, mlp=True, norms=True))
    config = replace(many.config, stem=replace(stem, channels=members * stem.channels))
    if settings.start == "scratch":
        scratch = fresh(config, derive_seed(seed, "mimo"), many.metadata.after("fresh weights"))
        return scratch.to(model.device, model.dtype)
    state = many.state_dict()
    state[PATCH] = state[PATCH].repeat(1, 1, members, 1, 1) / members  # [1, d, M·channels, h, w]
    return Ensemble.from_state(config, state, many.metadata)


def summed(start: Ensemble, state: dict[str, Tensor], model: Ensemble, metadata: Metadata) -> Ensemble:
    """The network for inference: the patch kernels are summed, because all members see the same image."""
    kernels = state[PATCH].unflatten(2, (start.num_members, -1))  # [1, d, M, channels, h, w]
    config = replace(start.config, stem=model.config.stem)
    return Ensemble.from_state(config, {**state, PATCH: kernels.sum(2)}, metadata)


class MimoLearner(EnsembleLearner):
    """Trains a wide network: every member sees its own image, or, in a share of the examples, all see the same."""

    def __init__(self, single: Ensemble, start: Ensemble, settings: MIMO, recipe: Recipe, device: torch.device) -> None:
        super().__init__(start, recipe, device, index=0)
        self.single, self.settings, self.dtype = single, settings, next(iter(self.trained.values())).dtype

    def prepared(self, inputs: Inputs) -> Inputs:
        """Repeat the images for every member."""
        return self._images(inputs).repeat(1, self.settings.members, 1, 1)

    def training_batch(self, inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]:
        """Repeat every image `batch_repeat` times and shuffle separately for each member, except a share `rho`."""
        images = self._images(inputs)
        order = torch.arange(len(labels)).repeat(self.settings.batch_repeat)
        order = order[torch.randperm(len(order))]
        apart = int(len(order) * (1.0 - self.settings.rho))
        rows = [torch.cat([order[torch.randperm(apart)], order[apart:]]) for _ in range(self.settings.members)]
        shown = torch.cat([images[row.to(images.device)] for row in rows], dim=1)  # [B', M·channels, H, W]
        return shown, torch.stack([labels.cpu()[row] for row in rows])

    def _images(self, inputs: Inputs) -> Tensor:
        """Images `[B, channels, H, W]`, checked like inputs of the single model."""
        return cast(Tensor, move(self.single.unpack(inputs)[0], self.device, self.dtype))
