"""The dual encoder that trains: which of its parameters move, and how fast."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import ConfigError
from ..finetune.parameters import is_trained, optimizer_over, training_dtype, with_dropout
from ..finetune.recipe import Recipe
from ..model.clip import DualEncoder

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
