"""What this folder needs to know of an ensemble, so that `Ensemble` itself can offer `optimize`."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..model.config import EnsembleConfig
from ..model.cost import Description
from ..model.layers import Encoder
from ..model.metadata import Metadata


class EnsembleLike(Protocol):
    """The part of `Ensemble` that running it fast depends on."""

    stem: Any
    encoder: Encoder
    readout: Any
    config: EnsembleConfig
    metadata: Metadata

    @property
    def kind(self) -> str:
        """`"image"` or `"text"`."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""

    def __call__(self, *arguments: Any) -> Any:
        """Member logits."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether gradients are recorded."""

    def to(self, dtype: torch.dtype) -> Any:
        """Convert the floating-point parameters."""

    def modules(self) -> Any:
        """All modules."""

    def parameters(self) -> Any:
        """All parameters."""

    def buffers(self) -> Any:
        """All buffers."""

    def unpack(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Arguments of `forward`, in order."""

    def describe(self) -> Description:
        """Parameters, multiply-adds and heads kept."""
