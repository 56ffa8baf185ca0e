"""Dual encoders: two towers with a common embedding."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batches import READ
from ..checkpoint import Contents, Saved, placed
from ..model_card import dual_model_card
from ..settings import from_plain, to_plain
from .config import DualEncoderConfig, output_width
from .dropout import OurModel
from .ensemble import Ensemble, build_with_state, copied
from .layers import GroupedLinear
from .member_states import member_index
from .metadata import Metadata
from .stem_readout import Projections, projection_config, projection_from

Tower = Literal["image", "text"]

INITIAL_SCALE = math.log(1 / 0.07)  # initial value in CLIP's training


class DualEncoder(OurModel, Saved):
    """An image tower and a text tower whose features are projected into one embedding (CLIP).

    The towers have the same number of members, or one of them has a single member for all. The logit of an image and
    a text is the cosine of their embeddings times `exp(logit_scale)`, plus `logit_bias` if there is one.

    Attributes:
        config: Configuration of towers, projections and scale.
        num_members: Number of members, M.
        embedding_width: Width of the common embedding, e.

    Examples:
        >>> images, texts = torch.randn(2, 3, 32, 32), ["a photo of a cat", "a photo of a dog", "a red bus"]
        >>> dual(images, texts).shape  # a logit for each image and text, of every member
        torch.Size([1, 2, 3])
        >>> dual.encode_text(texts).shape == (1, 3, dual.embedding_width)
        True
    """

    _kind = "dual_encoder"

    def __init__(
        self,
        image: Ensemble,
        text: Ensemble,
        projections: Projections | None = None,
        logit_scale: float | Tensor = INITIAL_SCALE,
        logit_bias: float | Tensor | None = None,
    ) -> None:
        """Put two towers together; they become part of the dual encoder, nothing is copied.

        Args:
            image: The tower for images.
            text: The tower for texts.
            projections: Linear maps into the embedding; None if the features are the embedding.
            logit_scale: Logarithm of the scale, one number or one per member.
            logit_bias: Added to the scaled cosines, as many numbers as `logit_scale`; None for no bias.
        """
        super().__init__()
        self.image, self.text = image, text
        self.projections = Projections() if projections is None else projections
        self.logit_scale = _numbers(logit_scale, image)  # [1] or [M]
        self.logit_bias = None if logit_bias is None else _numbers(logit_bias, image)
        maps = projection_config(self.projections.image), projection_config(self.projections.text)
        scales = self.logit_scale.numel(), self.logit_bias is not None
        self.config = DualEncoderConfig(image.config, text.config, *maps, *scales)
        self.num_members, self.embedding_width = self.config.members, self.config.embedding_of("image")

    def forward(self, images: Any = None, texts: Any = None, **named: Any) -> Tensor:
        """Logits per image, `[M, B_image, B_text]`; arguments as in `encode_image` and `encode_text`.

        Both may come as keywords, as processors name them: `dual(**processor(text=..., images=...))`.
        """
        return self.logits(self.encode_image(images, **named), self.encode_text(texts, **named))

    def encode_image(self, inputs: Any = None, normalize: bool = True, **named: Any) -> Tensor:
        """Embed images as `[M, B, e]`.

        Args:
            inputs: Images `[B, 3, H, W]`, a mapping with `pixel_values`, or PIL images, which go through the
                saved preprocessing.
            normalize: Scale each embedding to length one.
            named: The same as keywords; those for the other tower are ignored.
        """
        return self._per_member(embed(self.image, self.projections.image, inputs, normalize, **named))

    def encode_text(self, inputs: Any = None, normalize: bool = True, **named: Any) -> Tensor:
        """Embed texts as `[M, B, e]`.

        Args:
            inputs: Token ids `[B, T]`, a mapping with `input_ids` and perhaps `attention_mask`, or strings,
                which go through the saved tokenizer.
            normalize: Scale each embedding to length one.
            named: As in `encode_image`.
        """
        return self._per_member(embed(self.text, self.projections.text, inputs, normalize, **named))

    def logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scaled similarities `[M, B_image, B_text]` of normalised embeddings `[M or 1, B, e]`."""
        similarity = image_embeddings @ text_embeddings.transpose(1, 2)
        logits = similarity * self.logit_scale.exp()[:, None, None]
        return logits if self.logit_bias is None else logits + self.logit_bias[:, None, None]

    def member(self, index: int) -> "DualEncoder":
        """A copy of one member as a separate dual encoder."""
        index = member_index(index, self.num_members)
        image, text = (tower.member(min(index, tower.num_members - 1)) for tower in (self.image, self.text))
        copy = min(index, self.config.scale_copies - 1)
        bias = None if self.logit_bias is None else self.logit_bias[copy]
        return DualEncoder(image, text, self.projections.member(index), self.logit_scale[copy], bias).eval()

    @classmethod
    def from_state(
        cls, config: DualEncoderConfig, state: Mapping[str, Tensor], image: Metadata, text: Metadata
    ) -> "DualEncoder":
        """Build a dual encoder around copies of the given tensors, keeping their dtype and device."""
        return build_with_state(lambda: cls._empty(config, image, text), copied(state))

    @classmethod
    def _empty(cls, config: DualEncoderConfig, image: Metadata, text: Metadata) -> "DualEncoder":
        maps = (config.image_projection, config.image), (config.text_projection, config.text)
        projections = Projections(*(projection_from(projection, output_width(tower)) for projection, tower in maps))
        scale = torch.zeros(config.scale_copies)
        towers = (Ensemble(config.image, image), Ensemble(config.text, text))
        return cls(*towers, projections, scale, scale if config.logit_bias else None)

    def _contents(self, name: str) -> Contents:
        metadata = {"image": self.image.stored().metadata, "text": self.text.stored().metadata}
        return Contents(self._kind, to_plain(self.config), metadata, self.state_dict(), dual_model_card(name, self))

    @classmethod
    def _restored(
        cls, contents: Contents, device: str | torch.device | None, dtype: torch.dtype | None
    ) -> "DualEncoder":
        config = from_plain(DualEncoderConfig, contents.model, "config.model")
        image, text = (
            from_plain(Metadata, contents.metadata[name], f"config.metadata.{name}") for name in ("image", "text")
        )
        state = placed(contents.tensors, device, dtype)
        return build_with_state(lambda: cls._empty(config, image, text), state)

    def __repr__(self) -> str:
        sizes = f"members={self.num_members}, embedding={self.embedding_width}"
        return f"DualEncoder({sizes}, image={self.image!r}, text={self.text!r})"


def embed(
    tower: Ensemble, projection: GroupedLinear | None, inputs: Any, normalize: bool = True, **named: Any
) -> Tensor:
    """Embeddings `[G, B, e]` of a tower's inputs; G is 1 if neither tower nor projection has several members."""
    foreign = READ["text" if tower.kind == "image" else "image"]  # a processor returns inputs of both towers together
    named = {name: value for name, value in named.items() if name not in foreign}
    if isinstance(inputs, Mapping):
        kept = {name: value for name, value in inputs.items() if name not in foreign}
        inputs = kept if len(kept) < len(inputs) else inputs
    elif isinstance(inputs, tuple):
        inputs = list(inputs)
    x = tower(inputs, **named)  # [M or 1, B, d]
    if projection is not None:
        x = projection(x)
    return F.normalize(x, dim=-1) if normalize else x


def _numbers(values: float | Tensor, like: Ensemble) -> nn.Parameter:
    """A parameter `[1]` or `[M]` with a copy of the given numbers; plain numbers go to the towers' device and dtype."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=like.dtype, device=like.device)
    return nn.Parameter(tensor.detach().clone().reshape(-1))
