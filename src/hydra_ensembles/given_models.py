"""Models that callers hand over: what is not one is refused, and told how to become one."""

from pathlib import Path

from torch import nn

from .dual_encoder import DualEncoder
from .ensemble import Ensemble
from .errors import ConfigError


def require_ensemble(model: object, caller: str) -> None:
    """Refuse what is not an `Ensemble`; `caller` is the function that takes one."""
    if not isinstance(model, Ensemble):
        raise ConfigError(f"{caller} takes an Ensemble, got {_with_advice(model)}")


def require_model(model: object, caller: str) -> None:
    """Refuse what is neither an `Ensemble` nor a `DualEncoder`."""
    if not isinstance(model, Ensemble | DualEncoder):
        raise ConfigError(f"{caller} takes an Ensemble or a DualEncoder, got {_with_advice(model)}")


def _with_advice(model: object) -> str:
    """The type of something that was given, and what to do about it."""
    advice = "give what he.convert(model) returns"
    if isinstance(model, DualEncoder):
        advice = "make a classifier of it first: he.zero_shot(model, class_names)"
    elif isinstance(model, str | Path):
        advice = f"load it first: he.Ensemble.from_pretrained({str(model)!r})"
    elif hasattr(model, "num_members"):  # a view of an ensemble: MC Dropout, or what `optimize` made
        advice = "give the Ensemble that it was made from"
    elif isinstance(model, nn.Module):
        advice = "convert it first: he.convert(model)"
    return f"{type(model).__name__}; {advice}"
