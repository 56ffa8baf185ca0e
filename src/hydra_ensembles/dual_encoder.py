"""Two towers, one embedding: images and texts that can be compared, M members in one pass per tower."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint import open_checkpoint, push_checkpoint, save_checkpoint
from .checkpoint.dual_encoder_record import DUAL_ENCODER, dual_encoder_contents, read_dual_encoder
from .describe import Description
from .dual_config import DualEncoderConfig, output_width
from .encoder.grouped import GroupedLinear
from .ensemble import Ensemble
from .errors import ConfigError
from .member_states import listed
from .metadata import Metadata
from .projections import Projections, projection_config, projection_from

Tower = Literal["image", "text"]

INITIAL_SCALE = math.log(1 / 0.07)  # where CLIP's training starts


class DualEncoder(nn.Module):
    """An image tower and a text tower whose features are projected into one embedding (CLIP).

    Both towers are ensembles. They have the same number of members, or one of them has a single member that
    serves all. The logit of an image and a text is the cosine of their embeddings times `exp(logit_scale)`,
    plus `logit_bias` where there is one.
    """

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
            image: The tower for images; its forward pass gives its features.
            text: The tower for texts, likewise.
            projections: Linear maps into the embedding; None where the features are the embedding.
            logit_scale: Logarithm of the scale, one number or one per member.
            logit_bias: Added to the scaled cosines, as many numbers as `logit_scale`; None for no bias.
        """
        super().__init__()
        self.image = image
        self.text = text
        self.projections = Projections() if projections is None else projections
        self.logit_scale = _numbers(logit_scale, image)  # [1] or [M]
        self.logit_bias = None if logit_bias is None else _numbers(logit_bias, image)
        if self.logit_bias is not None and self.logit_bias.shape != self.logit_scale.shape:
            raise ConfigError(
                f"logit_scale has {self.logit_scale.numel()} numbers and logit_bias {self.logit_bias.numel()}; "
                "give as many of one as of the other"
            )
        _check_inputs("image", image, self.projections.image)
        _check_inputs("text", text, self.projections.text)
        self.config = DualEncoderConfig(
            image=image.config,
            text=text.config,
            image_projection=projection_config(self.projections.image),
            text_projection=projection_config(self.projections.text),
            scale_copies=self.logit_scale.numel(),
            logit_bias=self.logit_bias is not None,
        )

    # --- running -----------------------------------------------------------------------------------------

    def forward(self, images: Any, texts: Any) -> Tensor:
        """Logits per image, `[M, B_image, B_text]`; arguments as in `encode_image` and `encode_text`."""
        return self.logits(self.encode_image(images), self.encode_text(texts))

    def encode_image(self, inputs: Any, normalize: bool = True) -> Tensor:
        """Embed images as `[M, B, e]`.

        Args:
            inputs: Images `[B, 3, H, W]`, a mapping with `pixel_values`, or PIL images, which go through the
                saved preprocessing.
            normalize: Scale each embedding to length one.
        """
        return self._encode(self.image, self.projections.image, inputs, normalize)

    def encode_text(self, inputs: Any, normalize: bool = True) -> Tensor:
        """Embed texts as `[M, B, e]`.

        Args:
            inputs: Token ids `[B, T]`, a mapping with `input_ids` and perhaps `attention_mask`, or strings,
                which go through the saved tokenizer.
            normalize: Scale each embedding to length one.
        """
        return self._encode(self.text, self.projections.text, inputs, normalize)

    def logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scaled similarities `[M, B_image, B_text]` of normalised embeddings `[M or 1, B, e]`."""
        similarity = image_embeddings @ text_embeddings.transpose(1, 2)
        logits = similarity * self.logit_scale.exp()[:, None, None]
        return logits if self.logit_bias is None else logits + self.logit_bias[:, None, None]

    def _encode(self, tower: Ensemble, projection: GroupedLinear | None, inputs: Any, normalize: bool) -> Tensor:
        x = embed(tower, projection, inputs, normalize)
        return x.expand(self.num_members, *x.shape[1:])  # [M, B, e]

    # --- members -----------------------------------------------------------------------------------------

    @staticmethod
    def stack(members: Iterable["DualEncoder"]) -> "DualEncoder":
        """One dual encoder with all members of the given ones and nothing shared between them."""
        given = listed(members, "DualEncoder.stack")
        singles = [one.member(index) for one in given for index in range(one.num_members)]
        biases: list[Tensor] = [one.logit_bias for one in singles if one.logit_bias is not None]
        if len(biases) not in (0, len(singles)):
            raise ConfigError(f"{len(biases)} of {len(singles)} members have a logit bias; all must, or none")
        stacked = DualEncoder(
            Ensemble.stack([one.image for one in singles]),
            Ensemble.stack([one.text for one in singles]),
            Projections.stack([one.projections for one in singles]),
            torch.cat([one.logit_scale for one in singles]),
            torch.cat(biases) if biases else None,
        )
        return stacked.eval()

    def member(self, index: int) -> "DualEncoder":
        """A copy of one member as a dual encoder of its own."""
        if not -self.num_members <= index < self.num_members:
            raise ConfigError(f"member {index} does not exist: there are {self.num_members}, counted from 0")
        index %= self.num_members
        of = [index if copies > 1 else 0 for copies in (self.image.num_members, self.text.num_members)]
        one = slice(index, index + 1) if self.config.scale_copies > 1 else slice(0, 1)
        single = DualEncoder(
            self.image.member(of[0]),
            self.text.member(of[1]),
            self.projections.member(index),
            self.logit_scale[one],
            None if self.logit_bias is None else self.logit_bias[one],
        )
        return single.eval()

    @classmethod
    def from_config(
        cls, config: DualEncoderConfig, image: Metadata | None = None, text: Metadata | None = None
    ) -> "DualEncoder":
        """A dual encoder of this configuration, its towers freshly initialised, its projections still empty."""
        projections = Projections(
            projection_from(config.image_projection, output_width(config.image)),
            projection_from(config.text_projection, output_width(config.text)),
        )
        scale = torch.full((config.scale_copies,), INITIAL_SCALE)
        bias = torch.zeros(config.scale_copies) if config.logit_bias else None
        return cls(Ensemble(config.image, image), Ensemble(config.text, text), projections, scale, bias)

    @classmethod
    def from_state(
        cls,
        config: DualEncoderConfig,
        state: Mapping[str, Tensor],
        image: Metadata | None = None,
        text: Metadata | None = None,
    ) -> "DualEncoder":
        """Build a dual encoder around copies of the given tensors, keeping their dtype and device."""
        with torch.device("meta"):
            dual = cls.from_config(config, image, text)
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        dual.load_state_dict(copies, assign=True)
        for parameter in dual.parameters():
            parameter.requires_grad_(True)
        return dual.eval()

    # --- saving and loading ------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors`, `tokenizer.json` and a model card into a folder."""
        save_checkpoint(folder, self._contents(Path(folder).expanduser().resolve().name))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        token: str | None = None,
    ) -> "DualEncoder":
        """Load what `save_pretrained` or `push_to_hub` wrote, in evaluation mode; no code is run.

        Args:
            source: Folder, or hub id of the form `owner/name`.
            revision: Branch, tag or commit on the hub.
            device: Where the parameters go; None for the CPU.
            dtype: Floating type to convert to; None keeps the stored one.
            token: Access token for a private model; None for the one logged in with.

        Raises:
            CheckpointError: Something is missing, damaged, inconsistent, or not a saved dual encoder.
        """
        stored = open_checkpoint(source, DUAL_ENCODER, revision=revision, token=token)
        config, image, text = read_dual_encoder(stored)
        layers = config.image.encoder.layers + config.text.encoder.layers
        state = stored.tensors(lambda: cls.from_config(config), device, dtype, at_least=layers)
        return cls.from_state(config, state, image, text)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Publish on the hub as `owner/name`, in one commit; the address of that commit."""
        contents = self._contents(repo_id)
        return push_checkpoint(repo_id, contents, private=private, token=token, commit_message=commit_message)

    def _contents(self, name: str) -> Any:
        return dual_encoder_contents(name, self.config, self.image.metadata, self.text.metadata, self.state_dict())

    # --- looking at it -----------------------------------------------------------------------------------

    @property
    def num_members(self) -> int:
        """Number of members, M."""
        return self.config.members

    @property
    def embedding_width(self) -> int:
        """Width of the common embedding, e."""
        return self.config.embedding_width

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.image.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.image.dtype

    def describe(self) -> dict[Tower, Description]:
        """Parameters, multiply-adds and heads kept of each tower; print them."""
        return {"image": self.image.describe(), "text": self.text.describe()}

    def __repr__(self) -> str:
        """One line: members, embedding, both towers."""
        return (
            f"DualEncoder(members={self.num_members}, embedding={self.embedding_width}, "
            f"image={self.image!r}, text={self.text!r})"
        )


def embed(tower: Ensemble, projection: GroupedLinear | None, inputs: Any, normalize: bool) -> Tensor:
    """Embeddings `[G, B, e]` of what a tower takes; G is 1 where neither tower nor projection has members."""
    if not isinstance(inputs, Tensor | Mapping):
        inputs = tower.prepare(list(inputs) if isinstance(inputs, tuple) else inputs)
    x = cast(Tensor, tower(inputs))  # [M or 1, B, d]
    if projection is not None:
        x = projection(x)
    return F.normalize(x, dim=-1) if normalize else x


def _numbers(values: float | Tensor, like: Ensemble) -> nn.Parameter:
    """A parameter `[1]` or `[M]` with a copy of the given numbers; plain ones go where the towers are."""
    if not isinstance(values, Tensor):
        values = torch.tensor(float(values), dtype=like.dtype, device=like.device)
    return nn.Parameter(values.detach().clone().reshape(-1))


def _check_inputs(name: Tower, tower: Ensemble, projection: GroupedLinear | None) -> None:
    if projection is not None and projection.weight.shape[2] != output_width(tower.config):
        raise ConfigError(
            f"the {name} projection takes features of width {projection.weight.shape[2]}, "
            f"the {name} tower gives {output_width(tower.config)}"
        )
