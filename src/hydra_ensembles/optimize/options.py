"""How an ensemble is to be run fast."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import ConfigError
from ..model.layers import Plan

PLANS: tuple[Plan, ...] = get_args(Plan)


@dataclass(frozen=True)
class RunOptions:
    """Settings of an `OptimizedEnsemble`.

    Attributes:
        plans: Ways to choose from; None for all that can be faster on the device.
        compile: Whether to compile the plan chosen for an input shape; the name of a backend of `torch.compile`
            in place of true chooses that backend.
        dynamic: Whether compiled code is to serve all batch sizes. It is slower than code made for one size, which
            takes some seconds to make for each.
        compiled_shapes: For so many input shapes code of their own is compiled; further ones run uncompiled.
        graphs: Whether to record CUDA graphs; None does so on a CUDA device.
        dtype: Floating type to compute in; None keeps the ensemble's.
        weights: `"int8"` stores the projections of the encoder in eight bits (on a CPU only); None stores them in
            the type that is computed in.
        repeats: How often each plan is run to choose between them.
    """

    plans: tuple[Plan, ...] | None = None
    compile: bool | str = False
    dynamic: bool = False
    compiled_shapes: int = 16
    graphs: bool | None = None
    dtype: torch.dtype | None = None
    weights: Literal["int8"] | None = None
    repeats: int = 5

    def __post_init__(self) -> None:
        """Check each setting, and those that exclude each other."""
        if self.plans is not None and (not self.plans or set(self.plans) - set(PLANS)):
            raise ConfigError(f"plans must be some of {list(PLANS)}, got {list(self.plans)}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating type such as torch.bfloat16, got {self.dtype}")
        if self.weights not in (None, "int8"):
            raise ConfigError(f"weights must be None or 'int8', got {self.weights!r}")
        if self.weights == "int8" and self.plans not in (None, ("loop",)):
            raise ConfigError(f"weights in int8 run by the plan 'loop' alone, got plans={list(self.plans or ())}")
        if self.compiled_shapes < 1 or self.repeats < 1:
            raise ConfigError(
                f"compiled_shapes and repeats must be at least 1, got {self.compiled_shapes} and {self.repeats}"
            )
