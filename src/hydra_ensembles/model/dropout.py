"""Dropout: in training mode, or set per thread, without changing the flag of any module."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import evaluation_mode

_THREAD = threading.local()  # `rule`: set by `dropping` in this thread; absent or None if unset


@contextmanager
def dropping(rule: bool | torch.Generator) -> Iterator[None]:
    """Override dropout in this thread alone, without changing flags: off (False), or drawn from a generator."""
    before = getattr(_THREAD, "rule", None)
    _THREAD.rule = rule
    try:
        yield
    finally:
        _THREAD.rule = before


def drops(module: nn.Module) -> bool | torch.Generator:
    """Whether a layer drops: as set by `dropping`, else its training mode; a generator if one is to be used."""
    rule: bool | torch.Generator | None = getattr(_THREAD, "rule", None)
    return module.training if rule is None else rule


class OurModel(nn.Module):
    """A model of this library: it has members, a device and a dtype, and all its layers follow `dropping`."""

    num_members: int

    def _per_member(self, x: Tensor) -> Tensor:
        return x.expand(self.num_members, *x.shape[1:])  # [N, B, …] -> [M, B, …]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    def to(self, *where: Any, memory_format: torch.memory_format | None = None, **more: Any) -> Self:
        """Like `nn.Module.to`, but ignores `memory_format`, which is meant for images: weights have other axes."""
        return super().to(*where, **more)


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Run in evaluation mode: our models in this thread only, without flag changes; other modules by their flags."""
    foreign = [model for model in models if isinstance(model, nn.Module) and not isinstance(model, OurModel)]
    with dropping(False), evaluation_mode(*foreign):
        yield


class Dropout(nn.Dropout):
    """Dropout that follows `dropping`."""

    def forward(self, x: Tensor) -> Tensor:
        """Zero some of the activations and scale the others up."""
        rule = self.p > 0.0 and drops(self)
        if isinstance(rule, torch.Generator):
            return dropped(x, self.p, rule)
        return F.dropout(x, self.p) if rule else x


def dropped(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """`F.dropout` with random numbers from a given generator."""
    return x * torch.empty_like(x).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
