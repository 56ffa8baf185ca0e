"""Readings off transformers models that image and text architectures have in common."""

import re
from typing import Any

from ..errors import ConversionError
from ..model.config import Activation
from ..model.metadata import Metadata
from .probe import activation_of, refuse

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation_named(name: Any, architecture: str) -> Activation:
    """The activation that a transformers configuration names, or holds as a module or function."""
    if not isinstance(name, str):
        return activation_of(name, architecture)
    if name not in _ACTIVATIONS:
        raise ConversionError(
            f"{architecture}: the activation {name!r} is not supported; supported are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def require_plain_encoder(config: Any, architecture: str) -> None:
    """Refuse configurations whose blocks are more, or less, than self-attention and an MLP."""
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise refuse(architecture, "the model is a decoder (is_decoder or add_cross_attention)")
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise refuse(architecture, f"its position embedding is {positions!r}, not 'absolute'")
    if getattr(config, "pruned_heads", None):
        raise refuse(architecture, f"heads were pruned by transformers (pruned_heads={config.pruned_heads})")


def head_size(config: Any, architecture: str) -> int:
    """Width of one head."""
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or width // heads)
    if size * heads != width and not getattr(config, "head_dim", None):
        raise refuse(architecture, f"its width {width} is not a multiple of its {heads} heads")
    return size


def require_one_label_per_input(model: Any, architecture: str) -> None:
    """Refuse classifiers that were not trained to choose one of the classes."""
    problem = getattr(model.config, "problem_type", None)
    if problem not in (None, "single_label_classification"):
        raise ConversionError(
            f"{architecture}: problem_type is {problem!r}, and the probabilities here are a softmax over classes that "
            "exclude each other; supported are None and 'single_label_classification'"
        )


def metadata_of_classifier(model: Any) -> Metadata:
    """Class names from the configuration, unless they are placeholders like `LABEL_0`."""
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    if sorted(names) != list(range(len(names))) or all(re.fullmatch(r"LABEL_\d+", name) for name in names.values()):
        return Metadata()
    return Metadata(labels=tuple(names[index] for index in range(len(names))))
