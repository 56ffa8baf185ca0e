"""torchvision: `VisionTransformer`, whose attention is an `nn.MultiheadAttention`."""

from dataclasses import replace
from typing import Any

from ..model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig
from ..model.metadata import Metadata
from ..preprocessing import ImagePreprocessing
from .core import Architecture, activation_of, attention, dropout_rate, first_of, norm_eps, read_classifier, refuse

_LAYER = "encoder.layers.encoder_layer_{i}"


def _config(model: Any, num_labels: int | None) -> EnsembleConfig:
    blocks = list(model.encoder.layers)
    first = first_of(blocks)  # `require_known_parts` checks that all are alike
    heads, mlp = first.self_attention, first.mlp
    if len(mlp) != 5:
        raise refuse(f"its MLP has {len(mlp)} parts")
    grid = int(model.image_size) // int(model.patch_size)
    stem = PatchStemConfig(
        patch_size=(int(model.patch_size),) * 2,
        grid=(grid, grid),
        resample="bicubic_align_corners",
        dropout=dropout_rate(model.encoder.dropout),
    )
    encoder = EncoderConfig(
        width=int(model.hidden_dim),
        layers=len(blocks),
        heads=int(heads.num_heads),
        head_dim=int(heads.head_dim),
        mlp_width=int(mlp[0].out_features),
        activation=activation_of(mlp[1]),
        norm_eps=norm_eps(first),
        qkv_bias=heads.in_proj_bias is not None,
        out_bias=heads.out_proj.bias is not None,
        attention_dropout=float(heads.dropout),
        projection_dropout=dropout_rate(first.dropout),
        activation_dropout=dropout_rate(mlp[2]),
        output_dropout=dropout_rate(mlp[4]),
    )
    classes, bias = read_classifier(getattr(model.heads, "head", None), num_labels)
    readout = ReadoutConfig(num_classes=classes, norm_eps=float(model.encoder.ln.eps), bias=bias)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _metadata(model: Any) -> Metadata:
    """Preprocessing of torchvision's own weights for this shape; a model does not record which weights it has."""
    side, width, patch = int(model.image_size), int(model.hidden_dim), int(model.patch_size)
    preprocessing = ImagePreprocessing((side, side), interpolation="bilinear", crop_fraction=0.875)
    if (width, side, patch) == (1024, 224, 16):
        preprocessing = replace(preprocessing, crop_fraction=224 / 242)
    elif side in (384, 512, 518) or width == 1280:  # only the SWAG weights
        preprocessing = replace(preprocessing, interpolation="bicubic", crop_fraction=1.0)
    origin = "assumed: as with torchvision's own weights for this shape; processor=weights.transforms() is exact"
    return Metadata(preprocessing=preprocessing, preprocessing_from=origin)


VISION_TRANSFORMER = Architecture(
    name="torchvision VisionTransformer",
    classes=("torchvision.models.vision_transformer.VisionTransformer",),
    config=_config,
    weights={
        "stem.patch": "conv_proj.weight",
        "stem.patch_bias": "conv_proj.bias",
        "stem.class_token": "class_token",
        "stem.position": "encoder.pos_embedding",
        "encoder.layers.{i}.norm1": f"{_LAYER}.ln_1",
        **attention(f"{_LAYER}.self_attention.out_proj", f"{_LAYER}.self_attention.in_proj_*"),
        "encoder.layers.{i}.norm2": f"{_LAYER}.ln_2",
        "encoder.layers.{i}.mlp.up": f"{_LAYER}.mlp.0",
        "encoder.layers.{i}.mlp.down": f"{_LAYER}.mlp.3",
        "readout.norm": "encoder.ln",
        "readout.classifier": "heads.head",
    },
    metadata=_metadata,
)
ARCHITECTURES: tuple[Architecture, ...] = (VISION_TRANSFORMER,)
