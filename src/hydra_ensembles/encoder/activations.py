"""The activation functions of the supported architectures, by name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import Activation, HiddenActivation


def quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU that OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation | HiddenActivation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
