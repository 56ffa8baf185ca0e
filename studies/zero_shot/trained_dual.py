"""The dual encoder of docs/results.md: a locked DINOv2 beside MiniLM, trained on images and captions of class names."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hydra_ensembles._utils import derive_seed
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.training.recipe import Recipe

from ..image_samples import ImageSamples
from ..seed_folder import SeedFolder
from ..splits import Samples
from ..store import Store
from .dual_model import untrained_dual
from .pairs import TrainImages, read_train_images, train_dual
from .recipe import ZeroShotRecipe

_SEEDS = 1 << 31
NAME = "DINOv2 ViT-S/14 + MiniLM-L6"
DESCRIPTION = (
    "This model is no CLIP: no CLIP checkpoint could be had. Its image tower is DINOv2 ViT-S/14, locked, at "
    "{size}x{size} pixels; its text tower is MiniLM-L6. {learned} on captions written from 210 class names "
    "(TinyImageNet-200 and CIFAR-10), {images} images in all, where CLIP learned from billions of pairs. It answers "
    "for other classes as far as its text tower carries over from those names, and is far weaker than CLIP. "
    "Differences between methods on this one model can be held against the paper's; levels cannot."
)
PAIRS = 22_000  # images of the training sets


class TrainedDual:
    """Trains the dual encoder of each seed, and the text sides of its pruned members, on the pairs of a store."""

    name = NAME
    trains_text = True

    def __init__(self, store: Store, recipe: ZeroShotRecipe, device: torch.device) -> None:
        self.store, self.recipe, self.device = store, recipe, device
        frozen = recipe.dual is not None and recipe.dual.train_groups == ("readout",)
        self.description = DESCRIPTION.format(
            size=recipe.input_size,
            learned="Only the projections of both towers were trained,"
            if frozen
            else "Text side and projections learned",
            images=f"{recipe.counts.pairs or PAIRS:,}",
        )

    def dual(self, seed: int, folder: SeedFolder, device: torch.device) -> DualEncoder:
        """The trained model of one seed."""
        start = self.untrained(seed).to(device)
        training = self._training(self.recipe.dual, "dual", seed)

        def make() -> dict[str, Tensor]:
            trained = train_dual(
                start,
                training,
                self._images,
                projection_rate=self.recipe.projection_rate,
                views=self.recipe.views,
                folder=folder.path / "training" / "dual",
            )
            return trained.state_dict()

        return _with_state(start, folder.tensors("dual", make, device))

    def tuned(self, member: DualEncoder, name: str, seed: int, folder: SeedFolder) -> DualEncoder:
        """A pruned member whose text side met the pruned image tower."""
        training = self._training(self.recipe.tune, "tune", seed)

        def make() -> dict[str, Tensor]:
            trained = train_dual(
                member,
                training,
                self._images,
                train_image_projection=False,
                views=1,
                folder=folder.path / "training" / name,
            )
            return trained.state_dict()

        return _with_state(member, folder.tensors(f"tuned/{name}", make, member.device))

    def samples(self, images: ImageDataset, device: torch.device) -> Samples:
        """Images on the device, made into inputs there."""
        return ImageSamples.read(images, self.recipe.input_size, device)

    def untrained(self, seed: int) -> DualEncoder:
        """Both towers before training, and the projections this seed draws."""
        return untrained_dual(self.store, self.recipe.input_size, seed)

    @cached_property
    def _images(self) -> tuple[TrainImages, ...]:
        return read_train_images(self.store, self.recipe.input_size, self.device, self.recipe.counts.pairs)

    def _training(self, training: Recipe | None, what: str, seed: int) -> Recipe:
        if training is None:
            raise ConfigError(f"recipe {self.recipe.name!r} says nothing of the training {what!r}")
        return replace(training, seed=derive_seed(seed, what) % _SEEDS)


def _with_state(like: DualEncoder, state: dict[str, Tensor]) -> DualEncoder:
    return DualEncoder.from_state(like.config, state, like.image.metadata, like.text.metadata)
