"""Rotary positions: the angles of all tokens, computed once per pass, and the rotation of queries and keys."""

import math

import torch
from torch import Tensor, nn

from .config import EnsembleConfig, PatchStemConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines of the angles of all tokens, each [T, 1, d_k]


class Rotary(nn.Module):
    """Computes the rotations for inputs of any size: one for each base."""

    tables: Tensor | None  # [bases, 2, T, 1, d_k]

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__()
        rotary = config.encoder.rotary
        assert rotary is not None
        self.config, self.head_dim = rotary, config.encoder.head_dim
        self.prefix = config.stem.prefix_tokens if isinstance(config.stem, PatchStemConfig) else 0
        self.bases = (rotary.base,) if rotary.local_base is None else (rotary.base, rotary.local_base)
        self.precision = torch.float32  # of the angles, always, as in the original libraries
        self.size: tuple[int, ...] = ()  # of which `tables` are
        self.register_buffer("tables", None, persistent=False)

    def fix(self, size: tuple[int, ...], like: Tensor) -> None:
        """Keep the rotations for images of one size, or for texts of up to this one, instead of computing them."""
        self.tables, self.size = torch.stack([torch.stack(turn) for turn in self(size, like)]), size

    def forward(self, size: tuple[int, ...], like: Tensor, start: int = 0) -> tuple[Rotation, ...]:
        """Rotations for texts of `(tokens,)` or images of `(rows, columns)`, with device and dtype of `like`.

        `start` is the number of tokens in front of a text.
        """
        if self.tables is not None and (len(size) == 1 or size == self.size):
            tables = self.tables if len(size) > 1 else self.tables[:, :, start : start + size[0]]
            return tuple((turn[0], turn[1]) for turn in tables.to(like.dtype))
        axes = [self._positions(axis, count, like.device) + start for axis, count in enumerate(size)]
        grid = torch.stack(torch.meshgrid(axes, indexing="ij"), dim=-1).flatten(0, -2)  # [T, 1 or 2]
        pairs = self.head_dim // (2 * len(size))  # rotated by one axis
        exponents = torch.arange(pairs, device=like.device).to(self.precision) / pairs
        turns = []
        for index, base in enumerate(self.bases):
            rates, factor = 1.0 / base**exponents, 1.0
            if index == 0:
                factor = self.config.attention_factor
                if self.config.frequencies is not None:
                    rates = torch.tensor(self.config.frequencies, dtype=self.precision, device=like.device)
            angles = (grid[:, :, None] * rates).flatten(1)  # [T, d_k / 2], rows first; fewer if part of a head rotates
            if self.prefix:
                angles = torch.cat([angles.new_zeros(self.prefix, angles.shape[1]), angles])
            angles = angles.repeat(1, 2)[:, None]  # [T, 1, d_k]
            turns.append(((angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)))
        return tuple(turns)

    def _positions(self, axis: int, count: int, device: torch.device) -> Tensor:
        """Positions of the tokens along an axis, `[count]`."""
        config = self.config
        positions = torch.arange(count, device=device).to(self.precision)
        if config.centred:
            return 2 * math.pi * (2.0 * ((positions + 0.5) / count) - 1.0)
        positions = positions + config.offset
        return positions if config.reference is None else positions / count * config.reference[axis]


def rotate(heads: Tensor, turn: Rotation) -> Tensor:
    """Rotate heads `[R, T, H, d_k]`; the first half of what rotates of each is paired with the second half."""
    cosines, sines = turn
    if (width := cosines.shape[-1]) < heads.shape[-1]:  # the rest of the head does not rotate
        return torch.cat([rotate(heads[..., :width], turn), heads[..., width:]], dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)  # autocast mixes types
