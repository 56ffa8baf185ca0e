"""LoRA-Ensemble: members that differ in low-rank updates of the attention and in their classifiers."""

import math
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..model.config import Sharing
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..settings import Checked, Positive, Whole
from ..training.finetune import CLASSIFIERS, Parametrised, train_parametrised
from ..training.loop import Job, TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import joined, warn_equal

INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class LoRA(Checked):
    """How members of a LoRA-Ensemble differ from the model they come from, and how they are trained.

    The defaults are the paper's: rank 4, alpha 8, three fine-tunings with different seeds. The public code of
    LoRA-Ensemble trains 16 members together, which start further apart: `LoRA(16, rank=8, alpha=None, gain=10,
    training="together")`, with `Recipe(reinit_classifier="random")`.

    Attributes:
        members: Number of members; one is LoRA-single.
        rank: Rank of every update `B A`.
        alpha: Updates are scaled by alpha / rank; None for no scale.
        gain: A starts by Xavier's rule with this gain; None takes Kaiming's, as peft does. B starts at zero.
        training: `"apart"` (one run each, with different seeds) or `"together"` (one run, each batch for all).
    """

    members: Whole = 3
    rank: Whole = 4
    alpha: Positive | None = 8.0
    gain: Positive | None = None
    training: Literal["apart", "together"] = "apart"

    @property
    def scale(self) -> float:
        """Factor of an update `B A`."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


@trains
def lora_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    settings: LoRA = LoRA(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Make members from one model by low-rank updates of its attention; all else except the classifiers is frozen.

    The updates are merged at the end: the result is an ensemble with attention and classifier per member, and an
    ordinary forward pass. Of the recipe's `train_groups`, attention trains only its updates, and the readout only its
    classifiers; the rest is frozen. With `last_blocks`, earlier blocks run once for all members.

    `reinit_classifier="random"` gives every member its own classifier to start from.
    """
    require_single(model, "lora_ensemble")
    if "attention" not in recipe.train_groups:
        raise ConfigError("LoRA updates the attention; Recipe.train_groups needs 'attention'")
    trunk = 0 if recipe.last_blocks is None else max(model.num_layers - recipe.last_blocks, 0)
    sharing = Sharing(stem=True, mlp=True, norms=True, readout=model.config.readout.cosine is not None)
    together = settings.training == "together"
    start = joined([model] * (settings.members if together else 1), sharing, trunk)

    def trained(index: int) -> Ensemble:
        job = Job(recipe, train, validation, settings=settings, index=index, **run)
        seed = derive_seed(recipe.seed, "lora", index)
        parts = "updates of query, key, value, out, classifiers"
        line = f"LoRA of rank {settings.rank}, scale {settings.scale:g}, {settings.training}"
        return train_parametrised(lambda copy: LowRank(copy, settings, recipe, seed), start, job, line, parts)

    if together:
        return warn_equal(trained(0))
    return warn_equal(joined([trained(index) for index in range(settings.members)], sharing, trunk))


class LowRank(Parametrised):
    """An ensemble with an update `scale · B A` on the attention of every member, in the layers that train."""

    def __init__(self, ensemble: Ensemble, settings: LoRA, recipe: Recipe, seed: int) -> None:
        super().__init__(ensemble)
        self.scale = settings.scale
        self.layers: list[int] = []  # updated layers
        config = ensemble.config
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in ensemble.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith(CLASSIFIERS))
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()  # A [M, r, in] and B [M, out, r]
        for layer in range(config.encoder.layers):
            heads = config.heads[0][layer]
            width = config.encoder.width
            inside = len(heads) * config.encoder.head_dim
            projected = config.encoder.projected(heads)
            shared = len(config.encoder.shares(projected)) * config.encoder.head_dim  # of key and value
            if not heads or not recipe.trains(f"encoder.layers.{layer}.attention.qkv", config.encoder.layers):
                continue
            self.layers.append(layer)
            copies = config.copies("attention", layer)
            for projection in (*INPUTS, "out"):
                asked = len(projected) * config.encoder.head_dim
                outputs = {"query": asked, "out": width}.get(projection, shared)
                inputs = inside if projection == "out" else width
                first = torch.empty(copies, settings.rank, inputs)  # [M, r, in]
                for one in first:
                    if settings.gain is None:
                        nn.init.kaiming_uniform_(one, a=math.sqrt(5), generator=generator)
                    else:
                        nn.init.xavier_uniform_(one, settings.gain, generator)
                key = f"{layer}_{projection}"
                self.down[key] = nn.Parameter(first.to(ensemble.device, ensemble.dtype))
                zeros = torch.zeros(copies, outputs, settings.rank, device=ensemble.device, dtype=ensemble.dtype)
                self.up[key] = nn.Parameter(zeros)

    def computed(self) -> dict[str, Tensor]:
        """Attention weights of every member with their updates added."""
        updated: dict[str, Tensor] = {}
        head_dim, grouped = self.ensemble.head_dim, self.ensemble.config.encoder.kv_heads is not None
        projections = {"query": INPUTS[:1], "key_value": INPUTS[1:]} if grouped else {"qkv": INPUTS}
        for layer in self.layers:
            prefix = f"encoder.layers.{layer}.attention."
            for name, parts in projections.items():  # [M, h·d_k, d] each -> [M, h, P, d_k, d]
                rows = [self.update(layer, part).unflatten(1, (-1, head_dim)) for part in parts]
                together = torch.stack(rows, dim=2)
                updated[prefix + name] = self.ensemble.get_parameter(prefix + name) + together.flatten(0, 1)
            columns = self.update(layer, "out").mT.unflatten(1, (-1, head_dim))  # [M, d, h·d_k] -> [M, h, d_k, d]
            updated[prefix + "out"] = self.ensemble.get_parameter(prefix + "out") + columns.flatten(0, 1)
        return updated

    def update(self, layer: int, projection: str) -> Tensor:
        """Update `[M, out, in]` of a weight `[out, in]`, for every member."""
        key = f"{layer}_{projection}"
        return self.scale * (self.up[key] @ self.down[key])
