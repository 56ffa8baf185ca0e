"""What it takes to describe a foreign architecture: where each canonical parameter lies in it.

An `Architecture` is a declaration. Its `weights` map canonical parameter names (or prefixes of them) to
names in the foreign state dict; a `Source` says how the tensor is laid out there when it is not a plain
copy. `{i}` stands for the layer, on both sides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EnsembleConfig
from ..model.metadata import Metadata


class Source(Protocol):
    """Where a canonical tensor lies in a foreign state dict, and how it is laid out there."""

    @property
    def names(self) -> tuple[str, ...]:
        """Foreign names it is made from, with `{i}` for the layer."""

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """The canonical tensor of `shape`, from the foreign tensors in the order of `names`."""


@dataclass(frozen=True)
class Copy:
    """The same tensor; axes of length one may come or go."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Add or drop axes of length one."""
        (tensor,) = tensors
        if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise ConversionError(f"{self.name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor.reshape(shape)


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as `[in, out]`."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Swap the two axes."""
        return Copy(self.name).read((tensors[0].t(),), shape)


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value in one tensor, each block holding its heads in order: `[3·H·d_k, d]` or `[3·H·d_k]`."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Put a head's query, key and value side by side: `[H, 3, d_k, …]`."""
        heads, three, head_dim = shape[:3]
        blocks = tensors[0].reshape(three, heads, head_dim, *shape[3:])
        return blocks.transpose(0, 1).reshape(shape)


@dataclass(frozen=True)
class SplitQKV:
    """Query, key and value in three tensors, each holding its heads in order."""

    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, ...]:
        """The three foreign names."""
        return self.query, self.key, self.value

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Put a head's query, key and value side by side: `[H, 3, d_k, …]`."""
        heads, _, *rest = shape
        return torch.stack([part.reshape(heads, *rest) for part in tensors], dim=1)


@dataclass(frozen=True)
class OutProjection:
    """The output projection `[d, H·d_k]`, a head being a block of columns."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Give each head its own matrix: `[H, d_k, d]`."""
        return tensors[0].t().reshape(shape)


@dataclass(frozen=True)
class Joined:
    """Several tensors put one after another along their first non-trivial axis."""

    parts: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The foreign names, in order."""
        return self.parts

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Concatenate along axis 0 of the parts, leading axes of length one dropped."""
        trailing = len(shape) - 1
        rows = [tensor.reshape(-1, *tensor.shape[tensor.dim() - trailing + 1 :]) for tensor in tensors]
        return torch.cat(rows).reshape(shape)


Entry = str | Source
Weights = Mapping[str, Entry | tuple[Entry, ...]]


@dataclass(frozen=True)
class Architecture:
    """One foreign architecture, declared.

    Attributes:
        name: Library and model, as users know it.
        classes: Qualified names of the foreign classes it covers.
        config: Reads the canonical configuration off a live model (`num_labels` asks for a fresh classifier
            of that size on a model without one); refuses what has no canonical form.
        weights: Canonical parameter name or prefix → foreign name, prefix, or `Source`; of several, in a
            tuple, the first that the foreign model has.
        ignored: Prefixes of foreign tensors that take no part in the logits.
        fresh: Canonical prefixes that keep their initial values when the foreign model lacks them, because
            the user asked for a new classifier.
        metadata: Labels and preprocessing the live model knows about itself.
    """

    name: str
    classes: tuple[str, ...]
    config: Callable[[nn.Module, int | None], EnsembleConfig]
    weights: Weights
    ignored: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ("readout.classifier", "readout.distillation_classifier")
    metadata: Callable[[nn.Module], Metadata] = field(default=lambda model: Metadata())


def qualified_name(model: object) -> str:
    """Module and class name of an object, as declarations write it."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
