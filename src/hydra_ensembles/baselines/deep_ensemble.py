"""Members that are trained alike and share nothing that trains: Deep Ensembles, Packed-Ensembles."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Unpack

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..model.config import EnsembleConfig, TextStemConfig
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..settings import Checked, Positive, Whole
from ..training.finetune import finetune
from ..training.loop import TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import fresh, joined, shared_parts, warn_equal


@trains
def deep_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    members: int = 3,
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Fine-tune one model several times, each with its own order of the data, dropout and classifier.

    Parts that the recipe does not train are the same in all members and stored once: `train_groups=("readout",)` gives
    an ensemble of classifiers at the price of one model, `last_blocks` members above a common trunk. To combine
    separately pretrained models, use `Ensemble.stack`.

    `reinit_classifier="random"` gives every member its own classifier to start from.
    """
    require_single(model, "deep_ensemble")
    trained = [finetune(model, train, recipe, validation, index=index, **run) for index in range(members)]
    return warn_equal(joined(trained, *shared_parts(model, recipe)).to(model.dtype))


@dataclass(frozen=True)
class Packed(Checked):
    """How one model is cut into narrow ones: M members of width alpha · d / M.

    Attributes:
        members: Number of members.
        alpha: Width of all members together, relative to the model's; alpha = members gives a Deep Ensemble.
    """

    members: Whole = 3
    alpha: Positive = 2.0

    def narrow(self, config: EnsembleConfig) -> EnsembleConfig:
        """Configuration of the packed ensemble, from that of a whole model; nothing is shared.

        Heads keep their width: of the 12 heads of a ViT-B, each of the paper's three members gets 8.
        """
        encoder = config.encoder
        share = Fraction(self.alpha).limit_denominator(1 << 20) / self.members
        if config.readout.cosine is not None:
            raise ConfigError("Packed-Ensembles learn from scratch; a zero-shot model has nothing to start from")
        stem, readout = config.stem, config.readout
        widths = {"width": encoder.width, "mlp_width": encoder.mlp_width, "map_mlp_width": readout.map_mlp_width}
        sizes = {name: share * width for name, width in widths.items()}
        sizes["heads"] = sizes["width"] / encoder.head_dim
        if any(size.denominator > 1 for size in sizes.values()) or sizes["width"] < 1:
            broken = {name: float(size) for name, size in sizes.items()}
            raise ConfigError(f"members of alpha {self.alpha:g} would get {broken}; choose others for whole numbers")
        width, heads = int(sizes["width"]), int(sizes["heads"])
        narrow = replace(encoder, width=width, heads=heads, mlp_width=int(sizes["mlp_width"]))
        if isinstance(stem, TextStemConfig) and not stem.project:
            stem = replace(stem, embedding_width=width)
        readout = replace(readout, map_mlp_width=int(sizes["map_mlp_width"]))
        return EnsembleConfig(stem, narrow, readout, ((),) * self.members)


@trains
def packed_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    settings: Packed = Packed(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Train narrow members together from scratch, with the architecture of a model; its weights cannot be used.

    One group inside a member (gamma 1): members are independent, so this is a Deep Ensemble of narrow models with one
    loss, run in one pass. They differ in their initial weights, which are drawn with the recipe's seed.

    The model gives sizes, classes and preprocessing; the recipe should train all groups, as from scratch.
    """
    require_single(model, "packed_ensemble")
    config = settings.narrow(model.config)
    line = f"Packed-Ensemble of {settings.members} members, alpha {settings.alpha:g}, fresh weights"
    start = fresh(config, derive_seed(recipe.seed, "packed"), model.metadata.after(line))
    return finetune(start.to(model.device, model.dtype), train, recipe, validation, **run)
