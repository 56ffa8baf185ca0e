"""Load models of either kind, and check which kind a function takes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._utils import unwrapped
from ..checkpoint import load_checkpoint
from ..errors import ConfigError
from .dual_encoder import DualEncoder
from .ensemble import Ensemble


def load(
    source: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None, **hub: Any
) -> Ensemble | Any:
    """Load a saved model: an `Ensemble` or a `DualEncoder`, ready to answer tensors, texts and pictures.

    Args:
        source: A folder of `save_pretrained` or of a build, or a name on the hub, `owner/name` or `hub:owner/name`.
        device: Where the weights go; None is the CPU.
        dtype: Floating type of the weights; None is that of the file.
        hub: `revision`, `token` and other arguments of `huggingface_hub.snapshot_download`.

    Examples:
        >>> base.save_pretrained("my-model")
        >>> again = he.load("my-model")  # a folder, or "hub:owner/name"
        >>> images = torch.randn(2, 3, 64, 64)
        >>> torch.equal(again(images), base(images))
        True
    """
    kinds: dict[str, Any] = {kind._kind: kind for kind in (Ensemble, DualEncoder)}
    contents = load_checkpoint(source, kinds, **hub)
    return kinds[contents.kind]._restored(contents, device, dtype)


def require_model(model: object, caller: str, *kinds: type) -> Any:
    """Return the model, or raise if it is of none of these kinds (default: ours); `caller` is the function's name."""
    kinds = kinds or (Ensemble, DualEncoder)
    if isinstance(model, kinds):
        return model
    advice = "give what he.convert(model) returns" if Ensemble in kinds else "convert a CLIP model"
    if isinstance(model, DualEncoder):
        advice = "make a classifier of it first: he.zero_shot(model, class_names)"
    elif isinstance(model, nn.Module) and isinstance(unwrapped(model), kinds):
        advice = "give the model inside it (model.module, or model._orig_mod)"
    takes = " or ".join(kind.__name__ for kind in kinds)
    raise ConfigError(f"{caller} takes {takes}, got {type(model).__name__}; {advice}")


def require_ensemble(model: object, caller: str, classifies: bool = False) -> Ensemble:
    """Return the model, or raise if it is not an `Ensemble` or, with `classifies`, has no classes."""
    ensemble: Ensemble = require_model(model, caller, Ensemble)
    if classifies and not ensemble.num_classes:
        raise ConfigError(f"{caller} takes a classifier, this ensemble has none; convert the model with num_labels=")
    return ensemble


def require_single(model: object, caller: str, classifies: bool = True) -> None:
    """Refuse anything but an `Ensemble` with one member that, with `classifies`, has classes."""
    members = require_ensemble(model, caller, classifies).num_members
    if members != 1:
        raise ConfigError(f"{caller} takes a single model, got {members} members; give ensemble.member(i)")
