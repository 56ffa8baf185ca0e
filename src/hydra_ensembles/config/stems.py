"""From inputs to tokens: images and texts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import ConfigError
from .checks import MAX_SIZE, require_choice, require_positive, require_rates, require_sizes

Resample = Literal["bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear"]


@dataclass(frozen=True)
class PatchStemConfig:
    """Images into tokens: a patch projection, prefix tokens, a position embedding that can be resampled.

    Tokens are ordered class, distillation, registers, patches. The first `position_prefix` of the prefix
    tokens have a position embedding of their own; the others get none.
    """

    kind: ClassVar[str] = "patch"

    patch_size: tuple[int, int]
    grid: tuple[int, int]
    channels: int = 3
    patch_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    position_prefix: int = 1
    resample: Resample = "bicubic_antialias"
    norm: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check sizes, and that the position embedding covers existing tokens."""
        require_sizes(self, channels=self.channels)
        for name in ("patch_size", "grid"):
            height, width = getattr(self, name)
            require_sizes(self, **{f"{name}[0]": height, f"{name}[1]": width, f"{name} area": height * width})
        if not 0 <= self.registers <= MAX_SIZE:
            raise ConfigError(f"PatchStemConfig.registers must not be negative or huge, got {self.registers}")
        if not 0 <= self.position_prefix <= self.prefix_tokens:
            raise ConfigError(
                f"PatchStemConfig.position_prefix is {self.position_prefix}, but there are "
                f"{self.prefix_tokens} prefix tokens"
            )
        require_choice(self, "resample", self.resample, Resample)
        require_rates(self, dropout=self.dropout)
        require_positive(self, norm_eps=self.norm_eps)

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the first patch."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images the position embedding was made for."""
        return self.patch_size[0] * self.grid[0], self.patch_size[1] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Sequence length at `image_size`."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class TextStemConfig:
    """Token ids into embeddings: words, learned positions, optional segments, optional norm and projection.

    `positions_after` is set for models (RoBERTa) that count positions from the padding id and give padding
    that id itself; otherwise positions are 0, 1, 2, …
    """

    kind: ClassVar[str] = "text"

    vocabulary: int
    positions: int
    embedding_width: int
    segments: int = 0
    positions_after: int | None = None
    norm: bool = True
    norm_eps: float = 1e-12
    project: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check sizes."""
        require_sizes(
            self,
            vocabulary=self.vocabulary,
            positions=self.positions,
            embedding_width=self.embedding_width,
        )
        if not 0 <= self.segments <= MAX_SIZE:
            raise ConfigError(f"TextStemConfig.segments must not be negative or huge, got {self.segments}")
        offset = self.positions_after
        if offset is not None and not 0 <= offset < self.positions - 1:
            raise ConfigError(
                f"TextStemConfig.positions_after is {offset}, which leaves no position of {self.positions}"
            )
        require_rates(self, dropout=self.dropout)
        require_positive(self, norm_eps=self.norm_eps)

    @property
    def max_tokens(self) -> int:
        """Longest sequence the position embedding covers."""
        return self.positions - (0 if self.positions_after is None else self.positions_after + 1)
