"""From raw inputs to token embeddings: images through patches, text through an embedding table."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import PatchStemConfig, Resample, TextStemConfig
from .encoder.grouped import GroupedLinear, GroupedNorm, empty
from .errors import DataError


class PatchStem(nn.Module):
    """Cut an image into patches, project them, put prefix tokens in front and add positions."""

    def __init__(self, config: PatchStemConfig, width: int, copies: int) -> None:
        super().__init__()
        self.config = config
        rows, columns = config.grid
        self.patch = empty(copies, width, config.channels, *config.patch_size)
        self.patch_bias = empty(copies, width) if config.patch_bias else None
        self.class_token = empty(copies, 1, width) if config.class_token else None
        self.distillation_token = empty(copies, 1, width) if config.distillation_token else None
        self.register_tokens = empty(copies, config.registers, width) if config.registers else None
        self.position = empty(copies, config.position_prefix + rows * columns, width)
        self.norm = GroupedNorm(copies, width, config.norm_eps) if config.norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`; any size that is a multiple of the patch."""
        grid = self._grid_of(images)
        copies, width = self.patch.shape[:2]
        bias = None if self.patch_bias is None else self.patch_bias.flatten()
        x = F.conv2d(images, self.patch.flatten(0, 1), bias, stride=self.config.patch_size)  # [B, G·d, h, w]
        x = x.flatten(2).unflatten(1, (copies, width)).permute(1, 0, 3, 2)  # [G, B, h·w, d]
        covered = self.config.position_prefix
        position = resample_position(self.position, covered, self.config.grid, grid, self.config.resample)
        x = x + position[:, None, covered:]
        prefix = self._prefix()  # [G, P, d]
        if prefix is not None:
            with_position = prefix[:, :covered] + position[:, :covered]
            prefix = torch.cat([with_position, prefix[:, covered:]], dim=1)
            x = torch.cat([prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)  # [G, B, P + h·w, d]
        x = self.dropout(x)
        return x if self.norm is None else cast(Tensor, self.norm(x))

    def _prefix(self) -> Tensor | None:
        tokens = (self.class_token, self.distillation_token, self.register_tokens)
        present: list[Tensor] = [token for token in tokens if token is not None]
        return torch.cat(present, dim=1) if present else None

    def _grid_of(self, images: Tensor) -> tuple[int, int]:
        channels, patch = self.config.channels, self.config.patch_size
        if not images.is_floating_point():
            raise DataError(f"images are {images.dtype}; give normalised floats, or PIL images to `predict`")
        if images.dim() != 4 or images.shape[1] != channels:
            raise DataError(f"expected images of shape [batch, {channels}, height, width], got {list(images.shape)}")
        height, width = images.shape[2:]
        if height % patch[0] or width % patch[1] or not height or not width:
            raise DataError(
                f"images are {height}x{width}, which the patch size {patch[0]}x{patch[1]} does not divide; "
                f"resize them, for example to {self.config.image_size[0]}x{self.config.image_size[1]}"
            )
        return height // patch[0], width // patch[1]


def resample_position(
    position: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int], method: Resample
) -> Tensor:
    """Fit a position embedding `[G, prefix + h·w, d]` to another grid; the prefix part stays as it is."""
    if old == new:
        return position
    grid = position[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2).float()  # [G, d, h, w]
    grid = F.interpolate(
        grid,
        size=new,
        mode="bilinear" if method == "bilinear" else "bicubic",
        antialias=method == "bicubic_antialias",
        align_corners=method == "bicubic_align_corners",
    )
    patches = grid.permute(0, 2, 3, 1).flatten(1, 2).to(position.dtype)  # [G, h'·w', d]
    return torch.cat([position[:, :prefix], patches], dim=1)


class TextStem(nn.Module):
    """Look up words, positions and segments, add them, normalise, project to the encoder's width."""

    def __init__(self, config: TextStemConfig, width: int, copies: int) -> None:
        super().__init__()
        self.config = config
        embedding = config.embedding_width
        self.words = empty(copies, config.vocabulary, embedding)
        self.positions = empty(copies, config.positions, embedding)
        self.segments = empty(copies, config.segments, embedding) if config.segments else None
        self.norm = GroupedNorm(copies, embedding, config.norm_eps) if config.norm else None
        self.project = GroupedLinear(copies, embedding, width) if config.project else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """Embed token ids `[B, T]` (and segment ids of the same shape) as `[G, B, T, d]`."""
        if ids.dim() != 2 or ids.is_floating_point():
            raise DataError(f"expected token ids [batch, tokens] as integers, got {ids.dtype} {list(ids.shape)}")
        if not ids.shape[1] or (segments is not None and segments.shape != ids.shape):
            segment = None if segments is None else list(segments.shape)
            raise DataError(
                f"expected at least one token and segments of the same shape, got {list(ids.shape)} and {segment}"
            )
        if ids.shape[1] > self.config.max_tokens:
            raise DataError(
                f"the sequence has {ids.shape[1]} tokens, the position embedding covers "
                f"{self.config.max_tokens}; truncate the input"
            )
        x = lookup(self.words, ids) + lookup(self.positions, self._position_ids(ids))
        if self.segments is not None:
            x = x + lookup(self.segments, torch.zeros_like(ids) if segments is None else segments)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.project is None else cast(Tensor, self.project(x))

    def _position_ids(self, ids: Tensor) -> Tensor:
        padding = self.config.positions_after
        if padding is None:
            return torch.arange(ids.shape[1], device=ids.device)[None]  # [1, T]
        real = ids.ne(padding).long()
        return real.cumsum(1) * real + padding  # padding keeps its own id


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` `[B, T]` of each copy of a table `[G, V, d]`, as `[G, B, T, d]`."""
    if table.shape[0] == 1:
        return F.embedding(ids, table[0])[None]
    copies, rows = table.shape[:2]
    offsets = torch.arange(copies, device=ids.device)[:, None, None] * rows
    return F.embedding(ids[None] + offsets, table.flatten(0, 1))
