"""Settings that several commands have in common; each is a flag, and a line of a YAML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._utils import require_device
from ..errors import ConfigError

AUTOMATIC = "auto"
USUAL_BATCH = 64


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is made where its name alone does not say so.

    Attributes:
        model: Folder, `timm:NAME`, `hf:ID`, or a bare name; see `load_model`.
        weights: Safetensors file for a timm name.
        num_classes: Classes of a timm model with `weights` or `random_weights`.
        labels: Text file with the name of each class, one a line, in the order of the logits.
        model_options: Further arguments of `timm.create_model`, such as `img_size`.
        random_weights: Leave a timm model untrained, to try things out.
        device: `cpu`, `cuda`, ...; `auto` takes a GPU where there is one.
    """

    model: str = ""
    weights: str | None = None
    num_classes: int | None = None
    labels: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    random_weights: bool = False
    device: str = AUTOMATIC

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        if not self.model:
            raise ConfigError("no model was given; name one: a folder, timm:NAME or hf:ID")
        if self.weights is not None and self.random_weights:
            raise ConfigError("weights and random_weights exclude each other; give one of them")
        if self.num_classes is not None and self.num_classes < 2:
            raise ConfigError(f"num_classes must be at least 2, got {self.num_classes}")
        choose_device(self.device)


@dataclass(frozen=True)
class DataSettings:
    """How data are read.

    Attributes:
        root: Folder that the paths of a suite start from.
        columns: Which column of a table holds what: `image`, `text`, `text_pair`, `label`.
        by_position: Take classes of the data as the model's by number, whatever their names.
        limit: At most so many samples of each set, drawn for good.
        batch_size: Samples a batch; 64 if not given.
        workers: Worker processes that read and preprocess.
    """

    root: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    by_position: bool = False
    limit: int | None = None
    batch_size: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("limit", 2), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or else the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == AUTOMATIC:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return require_device(name)
