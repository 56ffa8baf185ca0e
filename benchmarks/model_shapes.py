"""Shapes of models that are measured: how to build the user's own model, and batches for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ModelShape:
    """One architecture in one size.

    Attributes:
        name: What it is called in the results.
        build: Makes the model with random weights, dropout off.
        inputs: A batch of so many inputs from a generator; the order of its tensors is that of the arguments.
        logits: Calls the model.
        tokens: Tokens of an input.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    logits: Callable[..., Tensor]
    tokens: int


@dataclass(frozen=True)
class ClipShape(ModelShape):
    """A dual encoder that classifies by the names of its classes; `build` makes the whole of it.

    Attributes:
        classes: Names to choose from.
        text_tokens: Tokens of a prompt, padding included.
    """

    classes: int
    text_tokens: int


def _images(pixels: int) -> Callable[[int, torch.Generator], Inputs]:
    def make(batch: int, generator: torch.Generator) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, pixels, pixels, generator=generator)}

    return make


def _texts(tokens: int, vocabulary: int) -> Callable[[int, torch.Generator], Inputs]:
    """Texts of mixed lengths, one of them full; the rest is padding."""

    def make(batch: int, generator: torch.Generator) -> Inputs:
        ids = torch.randint(1000 % vocabulary, vocabulary, (batch, tokens), generator=generator)
        lengths = torch.randint(tokens // 8, tokens + 1, (batch, 1), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens)[None] < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    return make


def _call(model: Any, images: Tensor) -> Tensor:
    return model(images)


def _call_text(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).logits


def _vit(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, **settings)

    return build


def _bert(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
        return BertForSequenceClassification(config)

    return build


def _clip(image: dict[str, Any], text: dict[str, Any], width: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        return CLIPModel(CLIPConfig(vision_config=image, text_config=text, projection_dim=width))

    return build


_TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 12, "num_heads": 6, "num_classes": 5}
_TINY_BERT = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 32, "vocab_size": 50}
_CLIP = {"num_hidden_layers": 12, "hidden_act": "gelu"}
_CLIP_IMAGE = {**_CLIP, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "patch_size": 32}
_CLIP_TEXT = {**_CLIP, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
_TINY_CLIP = {"num_hidden_layers": 4, "hidden_act": "gelu", "intermediate_size": 32}
_TINY_CLIP_IMAGE = {**_TINY_CLIP, "hidden_size": 24, "num_attention_heads": 6, "image_size": 16, "patch_size": 8}
_TINY_WORDS = {"vocab_size": 40, "bos_token_id": 38, "eos_token_id": 39, "max_position_embeddings": 12}
_TINY_CLIP_TEXT = {**_TINY_CLIP, **_TINY_WORDS, "hidden_size": 16, "num_attention_heads": 4}

SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("vit-b16", _vit("vit_base_patch16_224"), _images(224), _call, 197),
        ModelShape("vit-s16", _vit("vit_small_patch16_224"), _images(224), _call, 197),
        ModelShape("dinov2-s", _vit("vit_small_patch14_dinov2", img_size=112, num_classes=10), _images(112), _call, 65),
        ModelShape("bert-base", _bert(), _texts(128, 30522), _call_text, 128),
        ModelShape("tiny", _vit("vit_base_patch16_224", **_TINY), _images(16), _call, 5),
        ModelShape("tiny-bert", _bert(**_TINY_BERT), _texts(8, 50), _call_text, 8),
        ClipShape("clip-b32", _clip(_CLIP_IMAGE, _CLIP_TEXT, 512), _images(224), _call, 50, 1000, 77),
        ClipShape("clip-b32-100", _clip(_CLIP_IMAGE, _CLIP_TEXT, 512), _images(224), _call, 50, 100, 77),
        ClipShape("tiny-clip", _clip(_TINY_CLIP_IMAGE, _TINY_CLIP_TEXT, 20), _images(16), _call, 5, 5, 12),
    )
}
