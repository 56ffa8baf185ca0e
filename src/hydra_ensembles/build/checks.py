"""Everything that can be known to fail before a build starts its long work."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .._utils import derive_seed
from ..batches import Inputs, borrowed, epoch_of, length_of, move, read_batch, require_labels
from ..errors import ConfigError, DataError
from ..model.ensemble import Ensemble
from ..training.recipe import Recipe, is_trained, rate_factor, warmup_updates
from .config import HydraConfig
from .data import BuildData, first_rows
from .start import Start


def require_possible(config: HydraConfig, start: Start, data: BuildData) -> None:
    """Hold config, model and data against each other."""
    _check_sets(config, data)
    base = start.base
    _check_heads(config, start)
    if config.strategy == "taylor":
        _check_calibration_batches(config, data)
    if config.recipe is not None:
        _check_recipe(config.recipe, config, base, data)
    _check_inputs(base, data)


def above_the_trunk(recipe: Recipe, config: HydraConfig, layers: int) -> Recipe:
    """The recipe, kept out of the stem and the layers that all members share."""
    if not config.shared_layers:
        return recipe
    free = layers - config.shared_layers
    return replace(recipe, last_blocks=free if recipe.last_blocks is None else min(free, recipe.last_blocks))


def _check_sets(config: HydraConfig, data: BuildData) -> None:
    """Every set that some stage reads is there."""
    if config.extracts_circuits and (data.ranking is None or data.ood is None):
        raise DataError(
            f'strategy="{config.strategy}" extracts circuits, which needs id= and ood=; '
            'without OOD data use strategy="taylor"'
        )
    if config.strategy == "taylor" and data.train is None and data.ranking is None:
        raise DataError('strategy="taylor" reads labelled batches; give train= or id=')
    if config.recipe is not None and data.train is None:
        raise DataError("the config has a recipe for fine-tuning, which needs train=")
    if config.calibrate and data.validation is None:
        raise DataError("calibration needs held-out data: give id= or validation=, or set calibrate=False")


def _check_heads(config: HydraConfig, start: Start) -> None:
    """There are enough heads for every member to lose a set of its own."""
    layers = start.layers(config)
    free = start.heads(layers)
    where = f" above the first {config.shared_layers} layers" if config.shared_layers else ""
    if config.prune > free:
        raise ConfigError(f"HydraConfig.prune is {config.prune}, but there are {free} heads{where}")
    if config.strategy == "taylor" and config.taylor_scope == "layer" and layers is not None:
        choices = _choices_by_layer(config, [len(start.base.heads[0][layer]) for layer in layers])
    else:
        choices = math.comb(config.pool_size(free) if config.draws_from_pool else free, config.prune)
    if choices < config.members:
        raise ConfigError(
            f"HydraConfig.prune is {config.prune} of {free} heads{where}, which leaves {choices} different choices for "
            f"{config.members} members, so some would be identical; prune another number of heads, make the pool "
            "larger, or ask for fewer members"
        )


def _choices_by_layer(config: HydraConfig, heads: Sequence[int]) -> int:
    each, rest = divmod(config.prune, len(heads))
    if rest:
        raise ConfigError(
            f'HydraConfig.prune is {config.prune}, which taylor_scope="layer" cannot spread evenly over '
            f'{len(heads)} layers; use a multiple of {len(heads)}, or taylor_scope="global"'
        )
    if min(heads) < each:
        raise ConfigError(
            f'HydraConfig.prune is {config.prune}: with taylor_scope="layer" that is {each} heads of each of '
            f'{len(heads)} layers, but one has only {min(heads)}; prune fewer, or use taylor_scope="global"'
        )
    return math.prod(math.comb(count, each) for count in heads)


def _check_calibration_batches(config: HydraConfig, data: BuildData) -> None:
    """Where the source knows its length, seeds must be able to draw different batches."""
    name, source = ("train", data.train) if data.train is not None else ("the ranking half of id", data.ranking)
    assert source is not None  # _check_sets has seen to it
    total = length_of(source)
    needed = config.calibration_batches + (1 if config.members > 1 else 0)
    if total is not None and total < needed:
        reason = ", and more, so that each member is ranked on others" if config.members > 1 else ""
        raise ConfigError(
            f"HydraConfig.calibration_batches is {config.calibration_batches}, but {name} has {total} batches; a "
            f"Taylor ranking draws that many{reason}: lower calibration_batches, or make the batches smaller"
        )


def _check_recipe(recipe: Recipe, config: HydraConfig, base: Ensemble, data: BuildData) -> None:
    """What fine-tuning would complain about only after heads were ranked."""
    if recipe.last_blocks is not None and recipe.last_blocks > base.num_layers:
        raise ConfigError(f"Recipe.last_blocks is {recipe.last_blocks}, but the model has {base.num_layers} blocks")
    if data.validation is None and (len(recipe.grid) > 1 or recipe.patience is not None):
        raise DataError(
            "the recipe chooses between learning rates or stops early, which needs held-out data: give id= or "
            "validation=, or a recipe with one learning_rate and patience=None"
        )
    total = recipe.updates(None if data.train is None else length_of(data.train))
    warmup = warmup_updates(recipe.warmup, total)
    rate_factor(0, total=total, warmup=warmup, schedule=recipe.schedule, floor=recipe.floor)  # raises if too long
    effective = above_the_trunk(recipe, config, base.num_layers)
    if not any(is_trained(name, effective, base.num_layers) for name, _ in base.named_parameters()):
        raise ConfigError(
            f"the recipe trains {list(recipe.train_groups)}, of which nothing is left above the "
            f"{config.shared_layers} shared layers; add groups to Recipe.train_groups, or share fewer layers"
        )


def _check_inputs(base: Ensemble, data: BuildData) -> None:
    """The model can read a sample of every set; a wrong size or a wrong key shows before the long work."""
    for name, held_out in (("id", data.ranking), ("validation", data.validation), ("ood", data.ood)):
        if held_out is not None:
            _try(base, held_out[0][0], name)
    if data.train is None:
        return
    seed = derive_seed(data.seed, "train")
    with borrowed(data.train), epoch_of(data.train, 0, seed, torch.device("cpu")):
        first = next(iter(data.train), None)
    if first is None:
        raise DataError("train has no batches; check the loader")
    inputs, labels = read_batch(first, "train")
    require_labels(labels, base.num_classes, "train")
    _try(base, inputs, "train")


@torch.no_grad()
def _try(base: Ensemble, inputs: Inputs, name: str) -> None:
    try:
        base(move(first_rows(inputs, 1), base.device, base.dtype))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"the model cannot read the first batch of {name}: {error}") from error
