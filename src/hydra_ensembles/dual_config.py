"""What a dual encoder is made of, as plain data: two ensembles, their projections, a scale."""

from dataclasses import dataclass

from .config import MAX_SIZE, EnsembleConfig, PatchStemConfig, TextStemConfig
from .errors import ConfigError


@dataclass(frozen=True)
class ProjectionConfig:
    """A linear map from a tower's features to the common embedding, stored once or once per member."""

    outputs: int
    bias: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        """Check sizes."""
        if not 1 <= self.outputs <= MAX_SIZE:
            raise ConfigError(f"ProjectionConfig.outputs must be between 1 and {MAX_SIZE}, got {self.outputs}")
        if not 1 <= self.copies <= 4096:
            raise ConfigError(f"ProjectionConfig.copies must be between 1 and 4096, got {self.copies}")


@dataclass(frozen=True)
class DualEncoderConfig:
    """Two towers with one embedding space.

    Attributes:
        image: The image tower.
        text: The text tower.
        image_projection: From image features to the embedding; None when they are the embedding.
        text_projection: From text features to the embedding; None when they are the embedding.
        scale_copies: How many logit scales (and biases) are stored: 1, or one per member.
        logit_bias: Whether a bias is added to the scaled similarities.
    """

    image: EnsembleConfig
    text: EnsembleConfig
    image_projection: ProjectionConfig | None = None
    text_projection: ProjectionConfig | None = None
    scale_copies: int = 1
    logit_bias: bool = False

    def __post_init__(self) -> None:
        """Check that the towers are of the right kind and meet in one embedding."""
        if not isinstance(self.image.stem, PatchStemConfig) or not isinstance(self.text.stem, TextStemConfig):
            raise ConfigError(
                f"a dual encoder has an image tower and a text tower, in this order; got towers for "
                f"{_kind(self.image)} and {_kind(self.text)}"
            )
        if self.image.members != self.text.members and 1 not in (self.image.members, self.text.members):
            raise ConfigError(
                f"the image tower has {self.image.members} members and the text tower {self.text.members}; "
                "both must have the same number, or one of them a single member"
            )
        widths = self.embedding_of("image"), self.embedding_of("text")
        if widths[0] != widths[1]:
            raise ConfigError(
                f"the image tower ends in an embedding of width {widths[0]}, the text tower in one of width "
                f"{widths[1]}; give projections to a common width (Projections.fresh makes new ones)"
            )
        stored = {"scale_copies": self.scale_copies}
        for name in ("image_projection", "text_projection"):
            projection = getattr(self, name)
            if projection is not None:
                stored[f"{name}.copies"] = projection.copies
        for name, copies in stored.items():
            if copies not in (1, self.members):
                raise ConfigError(f"{name} is {copies}, it must be 1 or the number of members, {self.members}")

    @property
    def members(self) -> int:
        """Number of members, M."""
        return max(self.image.members, self.text.members)

    @property
    def embedding_width(self) -> int:
        """Width of the embedding that both towers share."""
        return self.embedding_of("image")

    def embedding_of(self, tower: str) -> int:
        """Width of the embedding one tower ends in."""
        projection: ProjectionConfig | None = getattr(self, f"{tower}_projection")
        return output_width(getattr(self, tower)) if projection is None else projection.outputs


def output_width(config: EnsembleConfig) -> int:
    """Width of what an ensemble answers with: its logits, or its pooled features where it does not classify."""
    if config.readout.num_classes:
        return config.readout.num_classes
    if config.readout.pool == "distilled":
        raise ConfigError("a tower that reads class and distillation token apart has no single feature vector")
    return config.encoder.width * (2 if config.readout.pool == "cls_mean" else 1)


def _kind(config: EnsembleConfig) -> str:
    return "images" if isinstance(config.stem, PatchStemConfig) else "text"
