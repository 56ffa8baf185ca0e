"""Small readings off live modules that several declarations need."""

from typing import Any

from torch import nn

from ..errors import ConversionError
from ..model.config import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanhActivation": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


def activation_of(module: Any, architecture: str) -> Activation:
    """Name of the activation a module or function computes."""
    name = module.__name__ if hasattr(module, "__name__") else type(module).__name__
    if name == "GELU" and getattr(module, "approximate", "none") == "tanh":
        return "gelu_tanh"
    if name not in _ACTIVATIONS:
        raise ConversionError(
            f"{architecture}: the activation {name} is not supported; supported are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def dropout_rate(module: Any) -> float:
    """Rate of a dropout (or drop-path) module; 0 for an identity."""
    for attribute in ("p", "drop_prob"):
        rate = getattr(module, attribute, None)
        if rate is not None:
            return float(rate)
    return 0.0


def is_identity(module: Any) -> bool:
    """Whether a module does nothing."""
    return module is None or isinstance(module, nn.Identity)


def pair(size: Any) -> tuple[int, int]:
    """Height and width from a number or a pair."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def refuse(architecture: str, what: str) -> ConversionError:
    """The error for a variant that has no canonical form."""
    return ConversionError(f"{architecture}: {what}, which this library cannot represent without changing predictions")


def linear_or_none(module: Any, architecture: str) -> nn.Linear | None:
    """The classifier, or None where the model was built without one; anything but a linear layer is refused."""
    if module is None or isinstance(module, nn.Identity):
        return None
    if not isinstance(module, nn.Linear):
        raise refuse(architecture, f"the classifier is a {type(module).__name__}, not a linear layer")
    return module


def classes_or_fresh(found: int, num_labels: int | None, architecture: str) -> int:
    """Number of classes: the model's own, or `num_labels` when it has no classifier."""
    if num_labels is not None and num_labels < 2:
        raise ConversionError(f"num_labels must be at least 2, got {num_labels}")
    if found == 1:
        raise ConversionError(
            f"{architecture}: the classifier has one output (regression, or one probability by a sigmoid); "
            "the probabilities here are a softmax, which needs at least two"
        )
    if found and num_labels is not None and num_labels != found:
        raise ConversionError(
            f"{architecture}: the model already classifies {found} classes, num_labels={num_labels} was asked for; "
            "remove its classifier first (timm: model.reset_classifier(0)), or leave num_labels out"
        )
    return found or num_labels or 0
