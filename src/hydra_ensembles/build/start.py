"""What a build starts from: a classifier, or a dual encoder with the names of its classes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._utils import require_device
from ..convert.convert import convert
from ..errors import ConfigError
from ..heads.masking import existing_heads, towers_of
from ..heads.ranking import Head
from ..model.clip import DualEncoder, Templates, checked_names, checked_templates, zero_shot
from ..model.ensemble import Ensemble
from ..prune import prune
from .config import HydraConfig


@dataclass(frozen=True, eq=False)
class Start:
    """The model that members are pruned from.

    Attributes:
        base: The classifier; of a dual encoder, the zero-shot ensemble of all its heads.
        dual: The dual encoder, or None. Heads of both its towers are pruned then.
        names: Its classes.
        templates: The sentences that class names stand in.
    """

    base: Ensemble
    dual: DualEncoder | None = None
    names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    @property
    def ranked(self) -> Ensemble | DualEncoder:
        """The model whose heads are ranked."""
        return self.base if self.dual is None else self.dual

    @property
    def circuit_options(self) -> dict[str, Any]:
        """What `extract_circuit` is told beside the data."""
        return {} if self.dual is None else {"class_names": self.names, "templates": self.templates}

    def layers(self, config: HydraConfig) -> range | None:
        """Layers in which members may differ; None for all of both towers."""
        if self.dual is not None:
            if config.shared_layers:
                raise ConfigError(
                    f"HydraConfig.shared_layers is {config.shared_layers}, but layers are numbered within one tower "
                    "and heads of both are pruned; set it to 0, or build from zero_shot(dual, class_names), which "
                    "prunes the image tower alone"
                )
            return None
        if config.shared_layers >= self.base.num_layers:
            raise ConfigError(
                f"HydraConfig.shared_layers is {config.shared_layers}, the model has {self.base.num_layers} layers; "
                "at least the last one must be left for the members to differ"
            )
        return range(config.shared_layers, self.base.num_layers)

    def heads(self, layers: Iterable[int] | None) -> int:
        """Number of heads in these layers."""
        return sum(len(existing_heads(tower.config, layers)) for tower in towers_of(self.ranked).values())

    def pruned(self, heads: Sequence[Head]) -> Ensemble:
        """A member without these heads."""
        if self.dual is None:
            return prune(self.base, heads)
        return zero_shot(prune(self.dual, heads), self.names, self.templates)


def starting_point(
    model: nn.Module,
    config: HydraConfig,
    class_names: Sequence[str] | None,
    templates: Templates,
    device: torch.device | str | None,
) -> Start:
    """The model as an ensemble, or as a dual encoder with its zero-shot ensemble, on the device; one member."""
    place = require_device(device)
    converted = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if converted.num_members != 1:
        raise ConfigError(
            f"build starts from one model, got an ensemble of {converted.num_members} members; take one of them with "
            "ensemble.member(i)"
        )
    if isinstance(converted, Ensemble):
        return Start(_classifier(converted, class_names, place))
    if class_names is None:
        raise ConfigError(
            "build makes ensembles of classifiers, got a DualEncoder; give class_names= to classify images by them"
        )
    if config.strategy == "taylor" or (config.extracts_circuits and config.method == "screened"):
        raise ConfigError(
            f"strategy {config.strategy!r} with method {config.method!r} ranks the heads of one tower; for both use "
            'circuits with method="exact", or build from zero_shot(dual, class_names), which prunes the image tower'
        )
    names, sentences = checked_names(class_names), checked_templates(templates)
    if place is not None and converted.device != place:
        state = {name: tensor.to(place) for name, tensor in converted.state_dict().items()}
        towers = converted.image.metadata, converted.text.metadata
        converted = DualEncoder.from_state(converted.config, state, *towers)
    return Start(zero_shot(converted, names, sentences), converted, names, sentences)


def _classifier(base: Ensemble, class_names: Sequence[str] | None, device: torch.device | None) -> Ensemble:
    """The ensemble on the device; a copy where something had to change."""
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if base.num_classes < 2:
        raise ConfigError(
            f"build starts from a classifier, this model has {base.num_classes} classes; give a model with a "
            "trained classifier (convert(model, num_labels=...) adds one, finetune trains it)"
        )
    if device is None or base.device == device:
        return base
    state = {name: tensor.to(device) for name, tensor in base.state_dict().items()}
    return Ensemble.from_state(base.config, state, base.metadata)
