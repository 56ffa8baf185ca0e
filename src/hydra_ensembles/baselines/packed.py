"""Packed-Ensembles: several narrow models trained jointly from scratch, together about as large as one."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Unpack

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..model.config import EnsembleConfig, TextStemConfig
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..settings import Checked, Positive, Whole
from ..training.finetune import finetune
from ..training.loop import TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import fresh, require_trained


@dataclass(frozen=True)
class Packed(Checked):
    """How one model is cut into narrow ones: M members of width alpha · d / M.

    Attributes:
        members: Number of members.
        alpha: Width of all members together, relative to the model's; alpha = members gives a Deep Ensemble.
        heads: Heads of a member; None keeps the width of a head. With 12 heads of a ViT-B and the paper's three members
            and alpha 2 a head would be 42.67 wide: 8 heads keep it at 64.
    """

    members: Whole = 3
    alpha: Positive = 2.0
    heads: Whole | None = None

    def narrow(self, config: EnsembleConfig) -> EnsembleConfig:
        """Configuration of the packed ensemble, from that of a whole model; nothing is shared."""
        encoder = config.encoder
        share = Fraction(self.alpha).limit_denominator(1 << 20) / self.members
        if config.readout.cosine is not None:
            raise ConfigError("Packed-Ensembles learn from scratch; a zero-shot model has nothing to start from")
        stem, readout = config.stem, config.readout
        widths = {"width": encoder.width, "mlp_width": encoder.mlp_width, "map_mlp_width": readout.map_mlp_width}
        sizes = {name: share * width for name, width in widths.items() if width}
        broken = {name: float(size) for name, size in sizes.items() if size.denominator > 1 or size < 1}
        if broken:
            each = f"each of {self.members} members with alpha {self.alpha:g}"
            raise ConfigError(f"{each} would get {broken} of {widths}; choose others, which give whole numbers")
        width = int(sizes["width"])
        heads, remainder = divmod(width, encoder.head_dim) if self.heads is None else (self.heads, width % self.heads)
        if remainder or not heads:
            units = f"heads of width {encoder.head_dim}" if self.heads is None else f"{self.heads} heads"
            fitting = [count for count in range(1, width + 1) if width % count == 0]
            raise ConfigError(f"a member is {width} wide, which {units} do not divide; set heads to one of {fitting}")
        narrow = replace(encoder, width=width, heads=heads, head_dim=width // heads, mlp_width=int(sizes["mlp_width"]))
        if isinstance(stem, TextStemConfig) and not stem.project:
            stem = replace(stem, embedding_width=width)
        readout = replace(readout, map_mlp_width=int(sizes.get("map_mlp_width", 0)))
        return EnsembleConfig(stem, narrow, readout, narrow.all_heads(self.members))


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

    The model gives sizes, classes and preprocessing; the recipe must train all groups, as from scratch.

    Examples:
        >>> packed = he.baselines.packed_ensemble(base, batches, he.Recipe(learning_rate=1e-4, steps=1), progress=False)
        >>> packed.num_members, packed.config.encoder.width
        (3, 96)
    """
    require_single(model, "packed_ensemble")
    config = settings.narrow(model.config)
    line = f"Packed-Ensemble of {settings.members} members, alpha {settings.alpha:g}, fresh weights"
    start = fresh(config, derive_seed(recipe.seed, "packed"), model.metadata.after(line))
    why = "Packed-Ensembles start from fresh weights, which must all train"
    require_trained(recipe, start, start.state_dict(), why)
    return finetune(start.to(model.device, model.dtype), train, recipe, validation, **run)
