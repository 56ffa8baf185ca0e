"""transformers: the towers of CLIP, alone (with or without their projection) and inside a `CLIPModel`.

A projection is declared as the tower's classifier: that is what it is for a tower on its own, and a dual
encoder takes it off again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, TextStemConfig, all_heads
from .core import Architecture, Entry, OutProjection, Source, SplitQKV, Weights, classes_or_fresh, linear_or_none, pair
from .transformers import (
    activation_named,
    head_size,
    metadata_of_classifier,
    require_one_label_per_input,
    require_plain_encoder,
)

_IMAGE = "transformers CLIP image tower"
_TEXT = "transformers CLIP text tower"
_MODULE = "transformers.models.clip.modeling_clip"
_LEGACY_EOS = 2  # configurations with this id pool at the highest id of the vocabulary instead


def _layers(prefix: str) -> Weights:
    layer = f"{prefix}encoder.layers.{{i}}"

    def qkv(leaf: str) -> SplitQKV:
        return SplitQKV(*(f"{layer}.self_attn.{part}_proj.{leaf}" for part in "qkv"))

    return {
        "encoder.layers.{i}.norm1": f"{layer}.layer_norm1",
        "encoder.layers.{i}.attention.qkv": qkv("weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv("bias"),
        "encoder.layers.{i}.attention.out": OutProjection(f"{layer}.self_attn.out_proj.weight"),
        "encoder.layers.{i}.attention.out_bias": f"{layer}.self_attn.out_proj.bias",
        "encoder.layers.{i}.norm2": f"{layer}.layer_norm2",
        "encoder.layers.{i}.mlp.up": f"{layer}.mlp.fc1",
        "encoder.layers.{i}.mlp.down": f"{layer}.mlp.fc2",
    }


def _image_weights(prefix: str) -> Weights:
    return {
        "stem.patch": f"{prefix}embeddings.patch_embedding.weight",
        "stem.class_token": f"{prefix}embeddings.class_embedding",
        "stem.position": f"{prefix}embeddings.position_embedding.weight",
        "stem.norm": f"{prefix}pre_layrnorm",
        **_layers(prefix),
        "readout.norm": f"{prefix}post_layernorm",
        "readout.classifier": ("visual_projection", "classifier"),
    }


def _text_weights(prefix: str) -> Weights:
    return {
        "stem.words": f"{prefix}embeddings.token_embedding.weight",
        "stem.positions": f"{prefix}embeddings.position_embedding.weight",
        **_layers(prefix),
        "readout.norm": f"{prefix}final_layer_norm",
        "readout.classifier": "text_projection",
    }


def _either(weights: Callable[[str], Weights], prefix: str) -> Weights:
    """Both spellings of a tower on its own: its tensors lie at the top, or (older releases) under `prefix`."""
    bare, nested = weights(""), weights(prefix)
    return {name: (*_alternatives(entry), *_alternatives(nested[name])) for name, entry in bare.items()}


def _alternatives(entry: Entry | tuple[Entry, ...]) -> tuple[str | Source, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _encoder(found: Any, name: str, causal: bool) -> EncoderConfig:
    require_plain_encoder(found, name)
    return EncoderConfig(
        width=int(found.hidden_size),
        layers=int(found.num_hidden_layers),
        heads=int(found.num_attention_heads),
        head_dim=head_size(found, name),
        mlp_width=int(found.intermediate_size),
        activation=activation_named(found.hidden_act, name),
        norm_eps=float(found.layer_norm_eps),
        causal=causal,
        attention_dropout=float(found.attention_dropout),
    )


def _image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "vision_config", model.config)
    patch, image = pair(found.patch_size), pair(found.image_size)
    stem = PatchStemConfig(
        patch_size=patch,
        grid=(image[0] // patch[0], image[1] // patch[1]),
        channels=int(found.num_channels),
        patch_bias=False,
        resample="bicubic",
        norm=True,
        norm_eps=float(found.layer_norm_eps),
    )
    encoder = _encoder(found, _IMAGE, causal=False)
    return EnsembleConfig(stem, encoder, _readout(model, "visual_projection", found, num_labels), all_heads(encoder))


def _text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "text_config", model.config)
    stem = TextStemConfig(
        vocabulary=int(found.vocab_size),
        positions=int(found.max_position_embeddings),
        embedding_width=int(found.hidden_size),
        norm=False,
    )
    encoder = _encoder(found, _TEXT, causal=True)
    end = int(found.eos_token_id)
    readout = replace(
        _readout(model, "text_projection", found, num_labels),
        pool="eot",
        eot_token=None if end == _LEGACY_EOS else end,
        norm="tokens",
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _classifier_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """`CLIPForImageClassification` reads the mean patch, before the final norm."""
    config = _image_config(model, num_labels)
    classifier = linear_or_none(model.classifier, _IMAGE)
    if classifier is not None:
        require_one_label_per_input(model, _IMAGE)
    readout = replace(
        config.readout,
        pool="mean",
        norm="none",
        num_classes=classes_or_fresh(0 if classifier is None else classifier.out_features, num_labels, _IMAGE),
        bias=True,
    )
    return replace(config, readout=readout)


def _readout(model: Any, projection: str, found: Any, num_labels: int | None) -> ReadoutConfig:
    projected: nn.Linear | None = getattr(model, projection, None)
    classes = 0 if projected is None else projected.out_features
    return ReadoutConfig(
        num_classes=classes_or_fresh(classes, num_labels, _IMAGE if projection == "visual_projection" else _TEXT),
        norm="pooled",
        norm_eps=float(found.layer_norm_eps),
        bias=projected is None or projected.bias is not None,
    )


# Inside a CLIPModel the two towers lie side by side; each ignores what belongs to the other.
IMAGE_IN_DUAL = Architecture(
    name=_IMAGE,
    classes=(f"{_MODULE}.CLIPModel",),
    config=_image_config,
    weights=_image_weights("vision_model."),
    ignored=("text_model.", "text_projection.", "logit_scale", "vision_model.embeddings.position_ids"),
)
TEXT_IN_DUAL = Architecture(
    name=_TEXT,
    classes=(f"{_MODULE}.CLIPModel",),
    config=_text_config,
    weights=_text_weights("text_model."),
    ignored=("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids"),
)
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name=_IMAGE,
        classes=(f"{_MODULE}.CLIPVisionModel", f"{_MODULE}.CLIPVisionModelWithProjection"),
        config=_image_config,
        weights=_either(_image_weights, "vision_model."),
    ),
    Architecture(
        name=_TEXT,
        classes=(f"{_MODULE}.CLIPTextModel", f"{_MODULE}.CLIPTextModelWithProjection"),
        config=_text_config,
        weights=_either(_text_weights, "text_model."),
    ),
    Architecture(
        name=f"{_IMAGE} with classifier",
        classes=(f"{_MODULE}.CLIPForImageClassification",),
        config=_classifier_config,
        weights=_image_weights("vision_model."),
        ignored=("vision_model.post_layernorm",),
        metadata=metadata_of_classifier,
    ),
)
