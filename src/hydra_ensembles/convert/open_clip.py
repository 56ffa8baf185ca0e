"""open_clip: image and text towers of CLIP, its own and those of timm, alone and inside a dual encoder.

A projection is declared as the tower's classifier, since a tower on its own returns its outputs; for a dual encoder it
is separated again.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from .._utils import require
from ..model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, Pool, ReadoutConfig, TextStemConfig
from ..model.metadata import Metadata
from ..preprocessing import ImagePreprocessing
from . import core, timm_torchvision
from .core import Architecture, DualArchitecture, Weights, below, block, dropout_rate, is_identity, pair
from .processors import read_open_clip_tokenizer

_MEAN = (0.48145466, 0.4578275, 0.40821073)  # open_clip's default normalisation
_STD = (0.26862954, 0.26130258, 0.27577711)
_VOCABULARY = 49408  # size of the vocabulary that OpenAI's CLIP and its successors share

_LAYERS: Weights = below(
    "transformer.resblocks.{i}.",
    {
        **block(("attn.out_proj", "attn.in_proj_*"), ("ln_1", "ln_2"), ("mlp.c_fc", "mlp.c_proj")),
        "encoder.layers.{i}.attention.query_norm": "attn.ln_q",
        "encoder.layers.{i}.attention.key_norm": "attn.ln_k",
        "encoder.layers.{i}.attention.scale": "ls_1.gamma",
        "encoder.layers.{i}.mlp.scale": "ls_2.gamma",
    },
)
_IMAGE_WEIGHTS: Weights = {
    "stem.patch": "conv1.weight",
    "stem.class_token": "class_embedding",
    "stem.position": "positional_embedding",
    "stem.norm": "ln_pre",
    **_LAYERS,
    "readout.norm": "ln_post",
    "readout.classifier.weight": core.transposed("proj"),
}
_TEXT_WEIGHTS: Weights = {
    "stem.words": "token_embedding.weight",
    "stem.positions": "positional_embedding",
    **_LAYERS,
    "readout.norm": "ln_final",
    "readout.classifier.weight": (core.transposed("text_projection"), core.as_stored("text_projection.weight")),
    "readout.classifier.bias": "text_projection.bias",
}


def _image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    pools: dict[str, Pool] = {"tok": "cls", "avg": "mean"}
    normed = not is_identity(model.ln_pre)
    stem = PatchStemConfig(
        patch_size=pair(model.patch_size),
        grid=pair(model.grid_size),
        channels=int(model.conv1.in_channels),
        patch_bias=False,
        resample="bicubic_antialias",
        norm=normed,
        norm_eps=float(model.ln_pre.eps) if normed else 1e-5,
    )
    encoder = _encoder(model.transformer, causal=False)
    readout = ReadoutConfig(
        pool=pools[model.pool_type],
        num_classes=core.number_of_classes(0 if model.proj is None else int(model.proj.shape[1]), num_labels),
        norm="pooled" if model.final_ln_after_pool else "tokens",
        norm_eps=float(model.ln_post.eps),
        bias=model.proj is None,
    )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _trunk(model: Any) -> Architecture:
    """Return the table of the timm model inside."""
    tables = {name: table for table in timm_torchvision.ARCHITECTURES for name in table.classes}
    return tables[core.qualified_name(model.trunk)]


def _timm_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """A tower of open_clip's timm adapter: a timm model and possibly a linear projection, the adapter's or timm's."""
    config = _trunk(model).config(model.trunk, None)
    head = dict(model.head.named_children())
    if "proj" not in head:
        classes = core.number_of_classes(config.readout.num_classes, num_labels)
        return replace(config, readout=replace(config.readout, num_classes=classes))
    readout = replace(
        config.readout,
        num_classes=core.number_of_classes(int(head["proj"].out_features), num_labels),
        bias=head["proj"].bias is not None,
        dropout=dropout_rate(head.get("drop")) or config.readout.dropout,
    )
    return replace(config, readout=readout)


def _text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """A `TextTransformer`, or a `CLIP`, which has the same parts as direct attributes."""
    positions, width = model.positional_embedding.shape
    pool = getattr(model, "text_pool_type", None) or model.pool_type
    pools: dict[str, Pool] = {"first": "cls", "last": "last", "argmax": "eot", "eos": "eot"}
    end = model.text_eos_id if hasattr(model, "text_eos_id") else model.eos_id
    vocabulary = int(model.token_embedding.num_embeddings)
    stem = TextStemConfig(vocabulary, positions=int(positions), embedding_width=int(width), norm=False)
    encoder = _encoder(model.transformer, causal=model.attn_mask is not None)
    projection = model.text_projection
    linear = isinstance(projection, nn.Linear)
    outputs = 0 if projection is None else int(projection.out_features if linear else projection.shape[1])
    readout = ReadoutConfig(
        pool=pools[pool],
        num_classes=core.number_of_classes(outputs, num_labels),
        norm="tokens",
        norm_eps=float(model.ln_final.eps),
        bias=projection is None or (linear and projection.bias is not None),
        eot_token=int(end) if pool == "eos" else None,
    )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _encoder(transformer: Any, causal: bool) -> EncoderConfig:
    first = transformer.resblocks[0]
    mlp = first.mlp
    query_norm: Any = getattr(first.attn, "ln_q", None)
    return EncoderConfig(
        width=int(mlp.c_fc.in_features),
        layers=len(transformer.resblocks),
        heads=int(first.attn.num_heads),
        head_dim=int(first.attn.head_dim),
        mlp_width=int(mlp.c_fc.out_features),
        activation=core.activation_of(mlp.gelu),
        norm_eps=float(first.ln_1.eps),
        qk_norm=not is_identity(query_norm),
        layer_scale=not is_identity(first.ls_1),
        causal=causal,
    )


def _image_metadata(model: Any) -> Metadata:
    """Preprocessing that open_clip itself would use; empty if it pads images, which is not supported."""
    cfg: dict[str, Any] = dict(getattr(model, "preprocess_cfg", None) or {})
    mode = cfg.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        return Metadata()
    mean = cfg.get("mean") or getattr(model, "image_mean", None) or _MEAN
    std = cfg.get("std") or getattr(model, "image_std", None) or _STD
    size = pair(cfg.get("size") or model.image_size)
    bilinear = cfg.get("interpolation") == "bilinear" and (mode == "squash" or size[0] == size[1])  # else their default
    preprocessing = ImagePreprocessing(
        size=size,
        mean=tuple(float(value) for value in mean),
        std=tuple(float(value) for value in std),
        interpolation="bilinear" if bilinear else "bicubic",
        resize_mode="squash" if mode == "squash" else "shortest",
    )
    return Metadata(preprocessing=preprocessing, preprocessing_from="open_clip's preprocess_cfg of the model")


def _text_metadata(model: Any) -> Metadata:
    """CLIP's own tokenizer, for text transformers with a vocabulary of that size."""
    if int(model.token_embedding.num_embeddings) != _VOCABULARY:
        return Metadata()
    tokenizer = require("open_clip", extra="open-clip").tokenizer.SimpleTokenizer(context_length=model.context_length)
    return Metadata(preprocessing=read_open_clip_tokenizer(tokenizer), preprocessing_from="open_clip's own tokenizer")


_IMAGES = Architecture(
    name="open_clip image transformer",
    classes=("open_clip.transformer.VisionTransformer",),
    config=_image_config,
    weights=_IMAGE_WEIGHTS,
    metadata=_image_metadata,
)
_IMAGES_FROM_TIMM = Architecture(
    name="open_clip image tower from timm",
    classes=("open_clip.timm_model.TimmModel",),
    config=_timm_config,
    weights={
        **below("trunk.", timm_torchvision.VISION_TRANSFORMER.weights),
        "readout.classifier": ("head.proj", "trunk.head"),
    },
    metadata=_image_metadata,
    variant=lambda model: below("trunk.", _trunk(model).variant(model.trunk)),  # type: ignore[arg-type]
)
_TEXTS = Architecture(
    name="open_clip text transformer",
    classes=("open_clip.transformer.TextTransformer",),
    config=_text_config,
    weights=_TEXT_WEIGHTS,
    metadata=_text_metadata,
)
_TEXTS_IN_CLIP = replace(
    _TEXTS,
    classes=("open_clip.model.CLIP",),
    ignored=("visual.", "logit_scale", "logit_bias"),
    answer=lambda model, inputs, fresh: model.encode_text(inputs["input_ids"]),  # type: ignore[operator]
)
_DUAL = DualArchitecture(
    name="open_clip CLIP",
    classes=("open_clip.model.CLIP", "open_clip.model.CustomTextCLIP"),
    image=(("visual", _IMAGES), ("visual", _IMAGES_FROM_TIMM)),
    text=(("text", _TEXTS), ("", _TEXTS_IN_CLIP)),
)

ARCHITECTURES: tuple[Architecture, ...] = (_IMAGES, _IMAGES_FROM_TIMM, _TEXTS)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (_DUAL,)
