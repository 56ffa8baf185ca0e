"""timm: `VisionTransformer` (ViT, DeiT, DINOv2, CLIP, SigLIP) and `Eva` (EVA-02, DINOv3, PE); torchvision's ViT."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from .._utils import library
from ..model.config import EnsembleConfig, ReadoutConfig, RotaryConfig
from ..model.metadata import Metadata
from ..preprocessing import ImagePreprocessing
from . import core
from .core import Architecture, Found, Source, Weights, activation_of, attention, below, dropout_rate, pair
from .processors import with_images_of

# --- timm ----------------------------------------------------------------------------------------------------

_LAYERS: Weights = below(
    "blocks.{i}.",
    {
        **attention("attn.proj", "attn.qkv.*"),
        "encoder.layers.{i}.norm1": "norm1",
        "encoder.layers.{i}.attention.query_norm": "attn.q_norm",
        "encoder.layers.{i}.attention.key_norm": "attn.k_norm",
        "encoder.layers.{i}.attention.scale": ("ls1.gamma", "gamma_1"),
        "encoder.layers.{i}.norm2": "norm2",
        # timm's unpacked SwiGLU stores gate and value separately
        "encoder.layers.{i}.mlp.up.weight": (
            "mlp.fc1.weight",
            core.concatenated("mlp.fc1_g.weight", "mlp.fc1_x.weight"),
        ),
        "encoder.layers.{i}.mlp.up.bias": ("mlp.fc1.bias", core.concatenated("mlp.fc1_g.bias", "mlp.fc1_x.bias")),
        "encoder.layers.{i}.mlp.norm": "mlp.norm",
        "encoder.layers.{i}.mlp.down": "mlp.fc2",
        "encoder.layers.{i}.mlp.scale": ("ls2.gamma", "gamma_2"),
    },
)
_WEIGHTS: Weights = {
    "stem.patch": "patch_embed.proj.weight",
    "stem.patch_bias": "patch_embed.proj.bias",
    "stem.class_token": "cls_token",
    "stem.register_tokens": "reg_token",
    "stem.position": "pos_embed",
    "stem.norm": "norm_pre",
    **_LAYERS,
    "readout.norm": ("norm", "fc_norm"),
    "readout.map.query_token": "attn_pool.latent",
    **attention("attn_pool.proj", "attn_pool.q.*", "attn_pool.kv.*", place=core.POOLING),
    "readout.map.norm": "attn_pool.norm",
    "readout.map.up": "attn_pool.mlp.fc1",
    "readout.map.down": "attn_pool.mlp.fc2",
    "readout.classifier": ("head", "head.1"),
}


def _config(found: Found, num_labels: int | None, distilled: bool = False) -> EnsembleConfig:
    model = getattr(found.model, "trunk", found.model)  # the model inside a tower of open_clip
    first, pool = model.blocks[0], model.attn_pool
    attn, mlp = first.attn, first.mlp
    stem = found.patch_stem(
        pair(model.patch_embed.img_size), resample="bicubic_antialias", dropout=dropout_rate(model.pos_drop)
    )
    encoder = found.encoder(
        int(attn.num_heads),
        activation=activation_of(mlp.act),
        rotary=_rotary(model),
        attention_dropout=dropout_rate(attn.attn_drop),
        projection_dropout=dropout_rate(attn.proj_drop),
        activation_dropout=dropout_rate(mlp.drop1),
        output_dropout=dropout_rate(getattr(mlp, "drop2", mlp.drop1)),
        drop_path=tuple(dropout_rate(block.drop_path1) for block in model.blocks),
    )
    pools = {"token": "distilled"} if distilled else {"token": "cls", "avg": "mean", "map": "map"}
    takes_prefix = bool(getattr(model, "pool_include_prefix", pool is not None))  # Eva has no such setting
    classifier = found.classifier(num_labels)
    if distilled and not classifier["num_classes"]:
        raise core.refuse("it has two classifiers without classes")
    norm = next((norm for norm in (model.norm, model.fc_norm) if not isinstance(norm, nn.Identity)), None)
    readout = ReadoutConfig(
        pool=pools[model.global_pool],  # type: ignore[arg-type]
        norm="none" if norm is None else "tokens" if norm is model.norm else "pooled",
        norm_eps=encoder.norm_eps if norm is None else float(norm.eps),
        dropout=0.0 if distilled else dropout_rate(model.head_drop),  # not used with two classifiers
        map_heads=0 if pool is None else int(pool.num_heads),
        map_mlp_width=0 if pool is None else int(pool.mlp.fc1.out_features),
        map_activation="gelu" if pool is None else activation_of(pool.mlp.act),
        pool_prefix=takes_prefix and bool(model.num_prefix_tokens) and model.global_pool != "token",
        **classifier,
    )
    return EnsembleConfig(stem, encoder, readout)


def _rotary(model: Any) -> RotaryConfig | None:
    rope = getattr(model, "rope", None)
    kind = type(rope).__name__
    if rope is None:
        return None
    if kind == "RotaryEmbeddingCat":
        reference = None if rope.ref_feat_shape is None else pair(tuple(rope.ref_feat_shape))
        return RotaryConfig(float(rope.temperature), offset=float(rope.grid_offset), reference=reference)
    if kind == "RotaryEmbeddingDinoV3":
        return RotaryConfig(float(rope.temperature), centred=True)
    raise core.refuse(f"its rotary embedding is a {kind}")


def _eva_attention(model: Any) -> Weights:
    """Declare queries and keys of a live `Eva` in canonical order: pairs are halves of a head, rows before columns."""
    rope = model.rope
    swapped = type(rope).__name__ == "RotaryEmbeddingCat" and rope.grid_indexing == "xy"

    def order(head_dim: int) -> list[int]:
        half = head_dim // 2
        pairs = [*range(half // 2, half), *range(half // 2)] if swapped else [*range(half)]
        if getattr(rope, "rotate_half", False):  # earlier releases have only neighbours
            return [*pairs, *(half + i for i in pairs)]
        return [*(2 * i for i in pairs), *(2 * i + 1 for i in pairs)]

    prefix = "encoder.layers.{i}.attention."
    head_order = None if rope is None else order
    split = model.blocks[0].attn.qkv is None
    projections = [f"attn.{part}_proj.*" for part in "qkv"] if split else ["attn.qkv.*"]
    entries: dict[str, Any] = {**attention("attn.proj", *projections, order=head_order)}
    both = ("attn.q_proj.bias", "attn.v_proj.bias") if split else ("attn.q_bias", "attn.v_bias")
    entries[f"{prefix}qkv_bias"] = (entries[f"{prefix}qkv_bias"], core.qkv_by_head(*both, order=head_order))
    if rope is not None:
        for norm, leaf in product(("query_norm", "key_norm"), ("weight", "bias")):
            names = (f"attn.{norm[0]}_norm.{leaf}",)
            entries[f"{prefix}{norm}.{leaf}"] = Source(names, lambda tensors, shape: tensors[0][order(shape[-1])])
    return below("blocks.{i}.", entries)


def _metadata(model: Any) -> Metadata:
    """Class names, and the preprocessing of timm's own transforms for evaluation, if it can be reproduced."""
    data = library("timm.data", extra="timm")
    cfg: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or {})
    settings = data.resolve_data_config(pretrained_cfg=cfg)
    settings["input_size"] = (int(model.patch_embed.proj.in_channels), *pair(model.patch_embed.img_size))
    name = ".".join(str(cfg[key]) for key in ("architecture", "tag") if cfg.get(key)) or "the model"
    origin = f"timm's pretrained_cfg of {name}" if cfg.get("mean") else "assumed: timm says nothing of this model"
    labels = tuple(cfg.get("label_names") or ())
    scale = {name: settings[name] for name in ("mean", "std")}  # in the transform they are rounded
    if settings["input_size"][0] != 3:
        return Metadata(labels=labels)
    with torch.device("cpu"):  # ignore default device
        return with_images_of(data.create_transform(**settings), Metadata(labels=labels), origin, **scale)


VISION_TRANSFORMER = Architecture(
    name="timm VisionTransformer",
    classes=("timm.models.vision_transformer.VisionTransformer",),
    config=_config,
    weights=_WEIGHTS,
    metadata=_metadata,
)
_DISTILLED = Architecture(
    name="timm VisionTransformerDistilled",
    classes=("timm.models.deit.VisionTransformerDistilled",),
    config=partial(_config, distilled=True),
    weights={**_WEIGHTS, "stem.distillation_token": "dist_token", "readout.distillation_classifier": "head_dist"},
    metadata=_metadata,
)
EVA = Architecture(
    name="timm Eva",
    classes=("timm.models.eva.Eva",),
    config=_config,
    weights=_WEIGHTS,
    metadata=_metadata,
    variant=_eva_attention,
)

# --- torchvision, whose attention is an `nn.MultiheadAttention` ------------------------------------------------

_TORCHVISION_LAYER = core.block(
    ("self_attention.out_proj", "self_attention.in_proj_*"), ("ln_1", "ln_2"), ("mlp.0", "mlp.3")
)


def _torchvision_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    model = found.model
    first, side = model.encoder.layers[0], int(model.image_size)
    stem = found.patch_stem((side, side), resample="bicubic_align_corners", dropout=dropout_rate(model.encoder.dropout))
    encoder = found.encoder(
        int(first.self_attention.num_heads),
        activation=activation_of(first.mlp[1]),
        attention_dropout=float(first.self_attention.dropout),
        projection_dropout=dropout_rate(first.dropout),
        activation_dropout=dropout_rate(first.mlp[2]),
        output_dropout=dropout_rate(first.mlp[4]),
    )
    readout = ReadoutConfig(norm_eps=float(model.encoder.ln.eps), **found.classifier(num_labels))
    return EnsembleConfig(stem, encoder, readout)


def _torchvision_metadata(model: Any) -> Metadata:
    """Preprocessing of torchvision's own weights for this shape; a model does not record which weights it has."""
    side, width, patch = int(model.image_size), int(model.hidden_dim), int(model.patch_size)
    preprocessing = ImagePreprocessing((side, side), interpolation="bilinear", crop_fraction=0.875)
    if (width, side, patch) == (1024, 224, 16):
        preprocessing = replace(preprocessing, crop_fraction=224 / 242)
    elif side in (384, 512, 518) or width == 1280:  # only the SWAG weights
        preprocessing = replace(preprocessing, interpolation="bicubic", crop_fraction=1.0)
    origin = "assumed: as with torchvision's own weights for this shape; processor=weights.transforms() is exact"
    return Metadata(preprocessing=preprocessing, preprocessing_from=origin)


_TORCHVISION = Architecture(
    name="torchvision VisionTransformer",
    classes=("torchvision.models.vision_transformer.VisionTransformer",),
    config=_torchvision_config,
    weights={
        "stem.patch": "conv_proj.weight",
        "stem.patch_bias": "conv_proj.bias",
        "stem.class_token": "class_token",
        "stem.position": "encoder.pos_embedding",
        **below("encoder.layers.encoder_layer_{i}.", _TORCHVISION_LAYER),
        "readout.norm": "encoder.ln",
        "readout.classifier": ("heads.head", "heads", "heads.1"),
    },
    metadata=_torchvision_metadata,
)
ARCHITECTURES: tuple[Architecture, ...] = (VISION_TRANSFORMER, _DISTILLED, EVA, _TORCHVISION)
