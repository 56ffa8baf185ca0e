"""SWAG: members drawn from a normal distribution fitted to the weights that training visits near its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Unpack

import torch
from torch import Tensor

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..settings import END, Checked, NotNegative, Range, Whole
from ..training.finetune import finetune
from ..training.loop import TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import joined, shared_parts, to_float32, warn_equal


@dataclass(frozen=True)
class SWAG(Checked):
    """How many points are visited, and how members are drawn around their mean.

    Attributes:
        members: Number of models to draw.
        points: Points of the training that are collected; the recipe trains from one to the next.
        rank: How many of the last points form the low-rank part of the covariance.
        scale: Scale of the covariance; 1 as published: half of the diagonal and half of the low-rank part.
    """

    members: Whole = 3
    points: Annotated[int, Range(2, END - 1)] = 10
    rank: Annotated[int, Range(2, END - 1)] = 10
    scale: NotNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank > self.points:
            raise ConfigError(f"SWAG.rank is {self.rank}, but {self.points} points are collected; lower it")


@trains
def swag(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    settings: SWAG = SWAG(),  # noqa: B008 (frozen)
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Draw members around the mean of the points that a trained model visits in further training at a constant rate.

    The training between two points is a separate fine-tuning with a new optimizer. Parts that the recipe does not
    train are the same in all members and stored once, as in `deep_ensemble`.

    The recipe trains from one point to the next: `schedule="constant"`, tens of steps or a part of an epoch.
    """
    require_single(model, "swag")
    sharing, trunk = shared_parts(model, recipe)
    point = to_float32(model)
    visited = Visited(settings.rank)
    for index in range(settings.points):
        point_recipe = recipe if index == 0 else replace(recipe, reinit_classifier=None)
        point = finetune(point, train, point_recipe, index=index, **run)
        visited.add(point.state_dict())
    line = f"drawn by SWAG around the mean of {settings.points} points, rank {settings.rank}, scale {settings.scale:g}"
    generator = torch.Generator().manual_seed(derive_seed(recipe.seed, "swag"))
    members = [
        Ensemble.from_state(point.config, visited.draw(settings.scale, generator), point.metadata.after(line))
        for _ in range(settings.members)
    ]
    return warn_equal(joined(members, sharing, trunk).to(point.device, model.dtype))


class Visited:
    """Running mean and variance of the visited weights, and deviations of the last points from the running mean."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0
        self.mean: dict[str, Tensor] = {}  # float64 on the CPU, like the sums of squares
        self.squares: dict[str, Tensor] = {}
        self.deviations: list[dict[str, Tensor]] = []
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add a point."""
        self.count += 1
        deviation: dict[str, Tensor] = {}
        for name, tensor in state.items():
            value = tensor.detach().cpu().double()
            before = self.mean.get(name, torch.zeros_like(value))
            self.mean[name] = before + (value - before) / self.count
            self.dtypes[name], deviation[name] = tensor.dtype, (value - self.mean[name]).float()
            squares = self.squares.get(name, torch.zeros_like(value))
            self.squares[name] = squares + (value - before) * (value - self.mean[name])
        self.deviations = [*self.deviations, deviation][-self.rank :]

    def draw(self, scale: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw weights; the covariance is half diagonal and half low-rank, from the last deviations."""
        along = torch.randn(len(self.deviations), generator=generator, dtype=torch.float64)
        along *= math.sqrt(scale / (2 * (len(self.deviations) - 1)))
        weights: dict[str, Tensor] = {}
        for name, mean in self.mean.items():
            noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
            value = mean + noise * (scale / 2 * self.squares[name] / self.count).sqrt()
            for weight, deviation in zip(along.tolist(), self.deviations, strict=True):
                value += weight * deviation[name]
            weights[name] = value.to(self.dtypes[name])
        return weights
