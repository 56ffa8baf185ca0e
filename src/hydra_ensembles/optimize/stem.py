"""The patch projection as a matrix product: patches do not overlap, so no convolution is needed."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.config import PatchStemConfig


class FrozenPatchStem(nn.Module):
    """A patch stem for images of the size its position embedding was made for; others go the usual way.

    Attributes:
        source: The stem it stands for; weights are its own.
        prefix: `[G, P, d]`, the prefix tokens with their positions, or None.
    """

    prefix: Tensor | None

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        config: PatchStemConfig = source.config
        self.config = config
        covered = config.position_prefix
        tokens = [source.class_token, source.distillation_token, source.register_tokens]
        present = [token for token in tokens if token is not None]
        prefix = None
        if present:
            joined = torch.cat(present, dim=1)  # [G, P, d]
            prefix = torch.cat([joined[:, :covered] + source.position[:, :covered], joined[:, covered:]], dim=1)
        self.register_buffer("prefix", prefix, persistent=False)

    def forward(self, images: Tensor, segments: None = None) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`; there are no segments, as text would have them."""
        config, source = self.config, self.source
        if images.dim() != 4 or images.shape[1:] != (config.channels, *config.image_size):
            return cast(Tensor, source(images))
        (rows, columns), (height, width) = config.grid, config.patch_size
        copies = source.patch.shape[0]
        patches = images.reshape(-1, config.channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        bias = None if source.patch_bias is None else source.patch_bias.flatten()
        x = F.linear(patches.flatten(3).flatten(1, 2), source.patch.flatten(2).flatten(0, 1), bias)  # [B, h·w, G·d]
        x = x.unflatten(2, (copies, -1)).permute(2, 0, 1, 3)  # [G, B, h·w, d]
        x = x + source.position[:, None, config.position_prefix :]
        if self.prefix is not None:
            x = torch.cat([self.prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)
        return x if source.norm is None else cast(Tensor, source.norm(x))
