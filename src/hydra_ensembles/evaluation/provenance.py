"""What a model says about itself, and what machine and libraries measured it."""

import os
import platform
from dataclasses import replace
from importlib import metadata

import torch
from torch import nn

from .._utils import __version__
from ..model.cost import Description
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..optimize.optimized import OptimizedEnsemble
from .results import ModelInfo, Provenance

_LIBRARIES = ("torch", "numpy", "scikit-learn")


def describe_model(model: object, members: int, classes: int, calibration: Calibration | None) -> ModelInfo:
    """What is known of a model: everything of an ensemble, counts and parameters of others."""
    describe = getattr(model, "describe", None)
    description = describe() if callable(describe) else None
    if isinstance(model, OptimizedEnsemble):
        description = model.description
    info = ModelInfo("callable", members, classes, calibration=calibration)
    if isinstance(description, Description):
        info = replace(
            info,
            parameters=description.parameters,
            multiply_adds=description.multiply_adds,
            tokens=description.tokens,
            heads=description.heads,
            heads_per_layer=description.heads_per_layer,
        )
    if isinstance(model, Ensemble | OptimizedEnsemble):
        remembered = model.metadata
        return replace(
            info,
            kind="text" if model.kind == "text" else "image",
            class_names=remembered.labels,
            source=remembered.source,
            history=remembered.history,
        )
    if isinstance(model, nn.Module):
        counted = sum(parameter.numel() for parameter in model.parameters())
        return replace(info, parameters=info.parameters or counted, source=type(model).__qualname__)
    return replace(info, source=str(getattr(model, "__name__", type(model).__qualname__)))


def provenance_of(device: torch.device | None, dtype: str, processes: int = 1) -> Provenance:
    """The libraries and the device of this run."""
    versions = {"hydra_ensembles": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return Provenance(versions, hardware(device), dtype, processes)


def hardware(device: torch.device | None) -> str:
    """A device in words."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device is not None and device.type != "cpu":
        return f"{device.type} ({platform.machine()})"
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"
