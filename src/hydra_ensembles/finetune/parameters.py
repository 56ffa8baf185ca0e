"""The copy that trains: which of its parameters move, its dropout, its optimizer."""

from collections.abc import Container, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..model.config import EnsembleConfig
from ..model.ensemble import Ensemble
from ..model.members import place_of
from .recipe import Recipe

RATE_FACTOR = "rate_factor"  # of a group of parameters: its share of the learning rate; 1 where it is not given
_CLASSIFIERS = ("readout.classifier.", "readout.distillation_classifier.")


def training_copy(start: Ensemble, recipe: Recipe, device: torch.device) -> Ensemble:
    """A copy of the ensemble ready to train: in float32 (or float64), on `device`, frozen where the recipe says."""
    if not start.num_classes:
        raise ConfigError("fine-tuning needs a classifier, but this ensemble has none (num_classes is 0)")
    if recipe.last_blocks is not None and recipe.last_blocks > start.num_layers:
        raise ConfigError(f"Recipe.last_blocks is {recipe.last_blocks}, but the model has {start.num_layers} blocks")
    if start.config.readout.cosine is not None and (recipe.reinit_classifier or recipe.classifier_rate != 1.0):
        raise ConfigError(
            f"Recipe.reinit_classifier is {recipe.reinit_classifier!r} and classifier_rate {recipe.classifier_rate}, "
            "but this ensemble has class embeddings for a classifier (zero_shot made it); leave both at None and 1.0"
        )
    state = {name: tensor.to(device, training_dtype(tensor)) for name, tensor in start.state_dict().items()}
    model = Ensemble.from_state(with_dropout(start.config, recipe.dropout), state)
    if recipe.reinit_classifier == "zeros":
        for classifier in (model.readout.classifier, model.readout.distillation_classifier):
            for parameter in () if classifier is None else classifier.parameters():
                nn.init.zeros_(parameter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, recipe, start.num_layers))
    return model


def is_trained(name: str, recipe: Recipe, layers: int) -> bool:
    """Whether the recipe trains the parameter of this name in a model with `layers` blocks."""
    group, layer = place_of(name)
    if group not in recipe.train_groups:
        return False
    if recipe.last_blocks is None:
        return True
    return group != "stem" and (layer is None or layer >= layers - recipe.last_blocks)


def trained_parameters(model: Ensemble) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(model: Ensemble, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters; its learning rate is set before every update."""
    trained = trained_parameters(model)
    return optimizer_over(
        trained, recipe, {name: recipe.classifier_rate for name in trained if name.startswith(_CLASSIFIERS)}
    )


def optimizer_over(
    trained: Mapping[str, nn.Parameter], recipe: Recipe, shares: Mapping[str, float], spared: Container[str] = ()
) -> torch.optim.Optimizer:
    """The recipe's optimizer over parameters by name.

    Args:
        trained: The parameters.
        recipe: How to train them.
        shares: Learning rates over the recipe's, where they are not 1.
        spared: Parameters without weight decay, besides those that the recipe spares.
    """
    found: dict[tuple[float, float], list[nn.Parameter]] = {}  # by share of the rate, and weight decay
    for name, parameter in trained.items():
        free = name in spared or (recipe.no_decay_on_bias_and_norm and is_bias_or_norm(name))
        found.setdefault((shares.get(name, 1.0), 0.0 if free else recipe.weight_decay), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay, RATE_FACTOR: share}
        for (share, decay), parameters in found.items()
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas)


def is_bias_or_norm(name: str) -> bool:
    """Whether a parameter is a bias, or the weight of a norm, by its name."""
    *modules, leaf = name.split(".")
    return leaf.endswith("bias") or "norm" in modules[-1]


def training_dtype(tensor: Tensor) -> torch.dtype:
    """Half precision is too coarse for small updates: such weights train in float32."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def with_dropout(config: EnsembleConfig, rate: float | None) -> EnsembleConfig:
    """The configuration with a dropout rate as `Recipe.dropout` means it."""
    if rate is None:
        return config
    encoder = replace(config.encoder, projection_dropout=rate, activation_dropout=rate, output_dropout=rate)
    if rate > 0.0:
        return replace(config, encoder=encoder)
    return replace(
        config,
        stem=replace(config.stem, dropout=0.0),
        encoder=replace(encoder, attention_dropout=0.0, drop_path=()),
        readout=replace(config.readout, dropout=0.0, hidden_dropout=0.0),
    )
