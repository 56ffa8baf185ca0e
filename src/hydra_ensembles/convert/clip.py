"""CLIP and its relatives, in transformers and in open_clip: towers alone, with classifiers, and dual encoders.

A projection is declared as the tower's classifier, since a tower on its own returns its outputs; for a dual encoder it
is separated again.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._utils import library
from ..model.config import EncoderConfig, EnsembleConfig, Pool, ReadoutConfig, ReadoutNorm
from ..model.metadata import Metadata
from . import core, timm_torchvision
from .core import Architecture, DualArchitecture, Found, NamedTensors, Weights, below, block, either, pair
from .processors import read_open_clip_tokenizer, with_images_of
from .transformers import metadata_of_classifier, read_classifier, read_encoder

# --- transformers: CLIP and MetaCLIP 2 --------------------------------------------------------------------------

_FAMILIES = ("clip.modeling_clip.CLIP", "metaclip_2.modeling_metaclip_2.MetaClip2")
_LEGACY_EOS = 2  # configurations with this id pool at the highest id of the vocabulary instead

_LAYER = block(
    ("self_attn.out_proj", *(f"self_attn.{part}_proj.*" for part in "qkv")),
    ("layer_norm1", "layer_norm2"),
    ("mlp.fc1", "mlp.fc2"),
)
_LAYERS = below("encoder.layers.{i}.", _LAYER)
_CLIP_IMAGE_TOWER: Weights = {
    "stem.patch": "embeddings.patch_embedding.weight",
    "stem.class_token": "embeddings.class_embedding",
    "stem.position": "embeddings.position_embedding.weight",
    "stem.norm": "pre_layrnorm",
    **_LAYERS,
    "readout.norm": "post_layernorm",
}
_CLIP_TEXT_TOWER: Weights = {
    "stem.words": "embeddings.token_embedding.weight",
    "stem.positions": "embeddings.position_embedding.weight",
    **_LAYERS,
    "readout.norm": "final_layer_norm",
}
# A tower is at the top level, or (in a dual encoder, with a projection, or in older releases) under a prefix.
_CLIP_IMAGE_WEIGHTS: Weights = {
    **either(_CLIP_IMAGE_TOWER, below("vision_model.", _CLIP_IMAGE_TOWER)),
    "readout.classifier": ("visual_projection", "classifier"),
}
_CLIP_TEXT_WEIGHTS: Weights = {
    **either(_CLIP_TEXT_TOWER, below("text_model.", _CLIP_TEXT_TOWER)),
    "readout.classifier": "text_projection",
}


def _clip_classes(*names: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{family}{name}" for family in _FAMILIES for name in names)


def _image_config(found: Found, num_labels: int | None, pool: Pool = "cls") -> EnsembleConfig:
    """An image tower: CLIP reads its class token before the final norm, SigLIP pools by attention after it."""
    config = getattr(found.model.config, "vision_config", found.model.config)
    stem = found.patch_stem(pair(config.image_size), resample="bicubic")
    encoder = read_encoder(found, config)
    norm: ReadoutNorm = "pooled" if pool == "cls" else "tokens"
    readout = ReadoutConfig(pool, norm=norm, norm_eps=encoder.norm_eps, **read_classifier(found, num_labels))
    if hasattr(found.model, "classifier"):  # it reads the mean of the patches, in CLIP before the final norm
        readout = replace(readout, pool="mean", norm="none" if pool == "cls" else "tokens")
    elif pool == "map":
        sizes: dict[str, Any] = {"map_heads": encoder.heads, "map_mlp_width": encoder.mlp_width}
        readout = replace(readout, map_activation=encoder.activation, **sizes)
    return EnsembleConfig(stem, encoder, readout)


def _text_config(found: Found, num_labels: int | None, pool: Pool = "eot") -> EnsembleConfig:
    """A text tower: CLIP reads its end token, SigLIP the last position, mostly padding."""
    model = getattr(found.model, "text_model", found.model)
    encoder = read_encoder(found, model.config, causal=pool == "eot")
    end = model.config.eos_token_id
    legacy = end == _LEGACY_EOS and type(found.model).__name__.startswith("CLIP")
    eot = end if pool == "eot" and not legacy else None
    readout = ReadoutConfig(pool, norm_eps=encoder.norm_eps, eot_token=eot, **found.classifier(num_labels))
    return EnsembleConfig(found.text_stem(), encoder, readout)


def _answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    output = model(**inputs)
    answers = (getattr(output, name, None) for name in ("logits", "image_embeds", "text_embeds", "pooler_output"))
    return next(answer for answer in answers if answer is not None)


def _clip_dual_answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    output = model.get_image_features(**inputs) if "pixel_values" in inputs else model.get_text_features(**inputs)
    return output if isinstance(output, Tensor) else output.pooler_output  # releases of transformers 5 differ


_tower = partial(Architecture, answer=_answer)
_CLIP_IMAGES = _tower(
    "transformers CLIP image tower",
    _clip_classes("VisionModel", "VisionModelWithProjection"),
    _image_config,
    _CLIP_IMAGE_WEIGHTS,
)
_CLIP_CLASSIFIER = replace(
    _CLIP_IMAGES,
    name="transformers CLIP image tower with classifier",
    classes=_clip_classes("ForImageClassification"),
    ignored=("vision_model.post_layernorm",),
    metadata=metadata_of_classifier,
)
_CLIP_TEXTS = _tower(
    "transformers CLIP text tower",
    _clip_classes("TextModel", "TextModelWithProjection"),
    _text_config,
    _CLIP_TEXT_WEIGHTS,
)
# In the dual encoder both towers are attributes of the model; each declaration ignores tensors of the other.
_CLIP_UNREAD_BY_IMAGES = ("text_model.", "text_projection.", "logit_scale", "vision_model.embeddings.position_ids")
_CLIP_UNREAD_BY_TEXTS = ("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids")
_CLIP_DUAL = DualArchitecture(
    name="transformers CLIP and MetaCLIP 2",
    classes=_clip_classes("Model"),
    image=replace(_CLIP_IMAGES, ignored=_CLIP_UNREAD_BY_IMAGES, answer=_clip_dual_answer),
    text=replace(_CLIP_TEXTS, ignored=_CLIP_UNREAD_BY_TEXTS, answer=_clip_dual_answer),
)


# --- transformers: SigLIP and SigLIP 2 --------------------------------------------------------------------------

_SIGLIP_MODULE = "transformers.models.siglip.modeling_siglip.Siglip"

_SIGLIP_IMAGE_TOWER: Weights = {
    **_CLIP_IMAGE_TOWER,
    "stem.patch_bias": "embeddings.patch_embedding.bias",
    "readout.map.query_token": "head.probe",
    **core.attention("head.attention.out_proj", "head.attention.in_proj_*", place=core.POOLING),
    "readout.map.norm": "head.layernorm",
    "readout.map.up": "head.mlp.fc1",
    "readout.map.down": "head.mlp.fc2",
}
_SIGLIP_TEXT_TOWER: Weights = {**_CLIP_TEXT_TOWER, "readout.classifier": "head"}


_SIGLIP_IMAGES = _tower(
    "transformers SigLIP image tower",
    (f"{_SIGLIP_MODULE}VisionModel", f"{_SIGLIP_MODULE}VisionTransformer"),
    partial(_image_config, pool="map"),
    either(_SIGLIP_IMAGE_TOWER, below("vision_model.", _SIGLIP_IMAGE_TOWER)),
)
_SIGLIP_CLASSIFIER = replace(
    _SIGLIP_IMAGES,
    name="transformers SigLIP classifier",
    classes=(f"{_SIGLIP_MODULE}ForImageClassification",),
    weights={**below("vision_model.", _SIGLIP_IMAGE_TOWER), "readout.classifier": "classifier"},
    ignored=("vision_model.head.",),
    metadata=metadata_of_classifier,
)
_SIGLIP_TEXTS = _tower(
    "transformers SigLIP text tower",
    (f"{_SIGLIP_MODULE}TextModel", f"{_SIGLIP_MODULE}TextTransformer"),
    partial(_text_config, pool="final"),
    either(_SIGLIP_TEXT_TOWER, below("text_model.", _SIGLIP_TEXT_TOWER)),
    masks=False,
)
_SIGLIP_DUAL = DualArchitecture(
    name="transformers SigLIP",
    classes=(f"{_SIGLIP_MODULE}Model",),
    image="vision_model",
    text="text_model",
)

# --- open_clip -------------------------------------------------------------------------------------------------

_VOCABULARY = 49408  # size of the vocabulary that OpenAI's CLIP and its successors share

_OPEN_LAYERS: Weights = below(
    "transformer.resblocks.{i}.",
    {
        **block(("attn.out_proj", "attn.in_proj_*"), ("ln_1", "ln_2"), ("mlp.c_fc", "mlp.c_proj")),
        "encoder.layers.{i}.attention.query_norm": "attn.ln_q",
        "encoder.layers.{i}.attention.key_norm": "attn.ln_k",
        "encoder.layers.{i}.attention.scale": "ls_1.gamma",
        "encoder.layers.{i}.mlp.scale": "ls_2.gamma",
    },
)
_OPEN_IMAGE_WEIGHTS: Weights = {
    "stem.patch": "conv1.weight",
    "stem.class_token": "class_embedding",
    "stem.position": "positional_embedding",
    "stem.norm": "ln_pre",
    **_OPEN_LAYERS,
    "readout.norm": "ln_post",
    "readout.classifier.weight": core.transposed("proj"),
}
_OPEN_TEXT_WEIGHTS: Weights = {
    "stem.words": "token_embedding.weight",
    "stem.positions": "positional_embedding",
    **_OPEN_LAYERS,
    "readout.norm": "ln_final",
    "readout.classifier.weight": (core.transposed("text_projection"), core.as_stored("text_projection.weight")),
    "readout.classifier.bias": "text_projection.bias",
}


def _open_image_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    model = found.model
    pools: dict[str, Pool] = {"tok": "cls", "avg": "mean"}
    stem = found.patch_stem(pair(model.image_size), resample="bicubic_antialias")
    encoder = _open_encoder(found)
    readout = ReadoutConfig(
        pool=pools[model.pool_type],
        norm="pooled" if model.final_ln_after_pool else "tokens",
        norm_eps=float(model.ln_post.eps),
        **found.classifier(num_labels, encoder.width),
    )
    return EnsembleConfig(stem, encoder, readout)


def _trunk(model: Any) -> Architecture:
    """Return the table of the timm model inside."""
    tables = {name: table for table in timm_torchvision.ARCHITECTURES for name in table.classes}
    return tables[core.qualified_name(model.trunk)]


def _open_timm_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    """A tower of open_clip's timm adapter: a timm model and possibly a linear projection, the adapter's or timm's."""
    config = _trunk(found.model).config(found, num_labels)
    rate = core.dropout_rate(dict(found.model.head.named_children()).get("drop")) or config.readout.dropout
    return replace(config, readout=replace(config.readout, dropout=rate))


def _open_text_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    """A `TextTransformer`, or a `CLIP`, which has the same parts as direct attributes."""
    model = found.model
    pool = getattr(model, "text_pool_type", None) or model.pool_type
    pools: dict[str, Pool] = {"first": "cls", "last": "last", "argmax": "eot", "eos": "eot"}
    end = model.text_eos_id if hasattr(model, "text_eos_id") else model.eos_id
    encoder = _open_encoder(found, causal=model.attn_mask is not None)
    readout = ReadoutConfig(
        pool=pools[pool],
        norm_eps=float(model.ln_final.eps),
        eot_token=int(end) if pool == "eos" else None,
        **found.classifier(num_labels, encoder.width),
    )
    return EnsembleConfig(found.text_stem(), encoder, readout)


def _open_encoder(found: Found, causal: bool = False) -> EncoderConfig:
    first = found.model.transformer.resblocks[0]
    return found.encoder(int(first.attn.num_heads), activation=core.activation_of(first.mlp.gelu), causal=causal)


def _open_image_metadata(model: Any) -> Metadata:
    """Preprocessing that open_clip itself would use; empty if it cannot be reproduced."""
    library("open_clip", extra="open-clip")
    from open_clip.model import get_model_preprocess_cfg
    from open_clip.transform import PreprocessCfg, image_transform_v2

    with torch.device("cpu"):  # ignore default device
        transform = image_transform_v2(PreprocessCfg(**get_model_preprocess_cfg(model)), is_train=False)
        return with_images_of(transform, Metadata(), "open_clip's preprocess_cfg of the model")


def _open_text_metadata(model: Any) -> Metadata:
    """CLIP's own tokenizer, for text transformers with a vocabulary of that size."""
    if int(model.token_embedding.num_embeddings) != _VOCABULARY:
        return Metadata()
    tokenizer = library("open_clip", extra="open-clip").tokenizer.SimpleTokenizer(context_length=model.context_length)
    return Metadata(preprocessing=read_open_clip_tokenizer(tokenizer), preprocessing_from="open_clip's own tokenizer")


_OPEN_IMAGES = Architecture(
    name="open_clip image transformer",
    classes=("open_clip.transformer.VisionTransformer",),
    config=_open_image_config,
    weights=_OPEN_IMAGE_WEIGHTS,
    metadata=_open_image_metadata,
)
_OPEN_IMAGES_FROM_TIMM = Architecture(
    name="open_clip image tower from timm",
    classes=("open_clip.timm_model.TimmModel",),
    config=_open_timm_config,
    weights={
        **below("trunk.", timm_torchvision.VISION_TRANSFORMER.weights),
        "readout.classifier": ("head.proj", "trunk.head"),
    },
    metadata=_open_image_metadata,
    variant=lambda model: below("trunk.", _trunk(model).variant(model.trunk)),  # type: ignore[arg-type]
)
_OPEN_TEXTS = Architecture(
    name="open_clip text transformer",
    classes=("open_clip.transformer.TextTransformer",),
    config=_open_text_config,
    weights=_OPEN_TEXT_WEIGHTS,
    metadata=_open_text_metadata,
)
_OPEN_TEXTS_IN_CLIP = replace(
    _OPEN_TEXTS,
    ignored=("visual.", "logit_scale", "logit_bias"),
    answer=lambda model, inputs, fresh: model.encode_text(inputs["input_ids"]),  # type: ignore[operator]
)
_OPEN_DUAL = DualArchitecture(
    name="open_clip CLIP",
    classes=("open_clip.model.CLIP",),
    image="visual",
    text=_OPEN_TEXTS_IN_CLIP,
)
_OPEN_CUSTOM = replace(_OPEN_DUAL, classes=("open_clip.model.CustomTextCLIP",), text="text")

ARCHITECTURES: tuple[Architecture, ...] = (
    *(_CLIP_IMAGES, _CLIP_CLASSIFIER, _CLIP_TEXTS),
    *(_SIGLIP_IMAGES, _SIGLIP_CLASSIFIER, _SIGLIP_TEXTS),
    *(_OPEN_IMAGES, _OPEN_IMAGES_FROM_TIMM, _OPEN_TEXTS),
)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (_CLIP_DUAL, _SIGLIP_DUAL, _OPEN_DUAL, _OPEN_CUSTOM)
