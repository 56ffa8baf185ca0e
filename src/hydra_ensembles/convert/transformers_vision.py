"""transformers: ViT, DeiT, DINOv2 and DINOv2 with registers.

A classifier is translated as it is. A bare encoder with `num_labels=` gets a fresh classifier on the features
that the library's own classifier of that family reads: the class token (ViT, DeiT), or the class token and
the mean patch side by side (DINOv2). Without `num_labels` it answers with the library's `pooler_output`, or
with the class token where it has no pooler.

Transformers 5 has renamed the parts of these models between releases; the tables name all spellings.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ..model.config import (
    EncoderConfig,
    EnsembleConfig,
    HiddenActivation,
    PatchStemConfig,
    Pool,
    ReadoutConfig,
    Resample,
    all_heads,
)
from .declaration import Architecture, Entry, Joined, OutProjection, SplitQKV, Weights
from .probe import classes_or_fresh, linear_or_none, pair, refuse
from .transformers_common import (
    activation_named,
    head_size,
    metadata_of_classifier,
    require_one_label_per_input,
    require_plain_encoder,
)

_VIT = "transformers ViT"
_DEIT = "transformers DeiT"
_DINOV2 = "transformers DINOv2"
_REGISTERS = "transformers DINOv2 with registers"


def _stem_and_readout(prefix: str) -> Weights:
    """What all families call the same; `prefix` leads to the encoder inside a classifier."""
    return {
        "stem.patch": f"{prefix}embeddings.patch_embeddings.projection.weight",
        "stem.patch_bias": f"{prefix}embeddings.patch_embeddings.projection.bias",
        "stem.class_token": f"{prefix}embeddings.cls_token",
        "stem.distillation_token": f"{prefix}embeddings.distillation_token",
        "stem.register_tokens": f"{prefix}embeddings.register_tokens",
        "stem.position": f"{prefix}embeddings.position_embeddings",
        "readout.norm": f"{prefix}layernorm",
        "readout.hidden": f"{prefix}pooler.dense",
        "readout.classifier": ("classifier", "cls_classifier"),
        "readout.distillation_classifier": "distillation_classifier",
    }


def _attention(new: str, old: str) -> Weights:
    """The attention of a layer, in the two spellings `new` and `old` lead to."""

    def qkv(leaf: str) -> tuple[Entry, ...]:
        return (
            SplitQKV(*(f"{new}.attention.{part}_proj.{leaf}" for part in "qkv")),
            SplitQKV(*(f"{old}.attention.attention.{part}.{leaf}" for part in ("query", "key", "value"))),
        )

    return {
        "encoder.layers.{i}.attention.qkv": qkv("weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv("bias"),
        "encoder.layers.{i}.attention.out": (
            OutProjection(f"{new}.attention.o_proj.weight"),
            OutProjection(f"{old}.attention.output.dense.weight"),
        ),
        "encoder.layers.{i}.attention.out_bias": (
            f"{new}.attention.o_proj.bias",
            f"{old}.attention.output.dense.bias",
        ),
    }


def _vit_weights(prefix: str) -> Weights:
    new, old = f"{prefix}layers.{{i}}", f"{prefix}encoder.layer.{{i}}"
    return {
        **_stem_and_readout(prefix),
        **_attention(new, old),
        "encoder.layers.{i}.norm1": (f"{new}.layernorm_before", f"{old}.layernorm_before"),
        "encoder.layers.{i}.norm2": (f"{new}.layernorm_after", f"{old}.layernorm_after"),
        "encoder.layers.{i}.mlp.up": (f"{new}.mlp.fc1", f"{old}.intermediate.dense"),
        "encoder.layers.{i}.mlp.down": (f"{new}.mlp.fc2", f"{old}.output.dense"),
    }


def _dinov2_weights(prefix: str) -> Weights:
    layer = f"{prefix}encoder.layer.{{i}}"

    def up(leaf: str) -> tuple[Entry, ...]:
        gate_and_value = Joined((f"{layer}.mlp.gate_proj.{leaf}", f"{layer}.mlp.up_proj.{leaf}"))
        return f"{layer}.mlp.fc1.{leaf}", gate_and_value, f"{layer}.mlp.weights_in.{leaf}"

    return {
        **_stem_and_readout(prefix),
        **_attention(layer, layer),
        "encoder.layers.{i}.norm1": f"{layer}.norm1",
        "encoder.layers.{i}.norm2": f"{layer}.norm2",
        "encoder.layers.{i}.attention.scale": f"{layer}.layer_scale1.lambda1",
        "encoder.layers.{i}.mlp.up.weight": up("weight"),
        "encoder.layers.{i}.mlp.up.bias": up("bias"),
        "encoder.layers.{i}.mlp.down": (f"{layer}.mlp.fc2", f"{layer}.mlp.down_proj", f"{layer}.mlp.weights_out"),
        "encoder.layers.{i}.mlp.scale": f"{layer}.layer_scale2.lambda1",
    }


def _vit_config(model: Any, num_labels: int | None, name: str = _VIT, distilled: bool = False) -> EnsembleConfig:
    found = model.config
    stem = _stem(found, "bicubic", prefix=2 if distilled else 1, distilled=distilled)
    encoder = EncoderConfig(
        mlp_width=int(found.intermediate_size),
        projection_dropout=float(found.hidden_dropout_prob),
        output_dropout=float(found.hidden_dropout_prob),
        **_common_sizes(found, name),
    )
    teacher = getattr(model, "cls_classifier", None)
    classifier = linear_or_none(getattr(model, "classifier", teacher), name)
    readout = _readout(model, name, num_labels, classifier, "cls" if teacher is None else "distilled")
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _deit_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    return _vit_config(model, num_labels, _DEIT, distilled=True)


def _dinov2_config(
    model: Any, num_labels: int | None, name: str = _DINOV2, resample: Resample = "bicubic"
) -> EnsembleConfig:
    found = model.config
    stem = _stem(found, resample, prefix=1, registers=int(getattr(found, "num_register_tokens", 0)))
    if stem.grid[0] != stem.grid[1]:
        raise refuse(name, f"its image_size {found.image_size} is not square, but its position embedding is read so")
    gated = bool(found.use_swiglu_ffn)
    hidden = int(found.hidden_size * found.mlp_ratio)
    sizes = _common_sizes(found, name)
    sizes["activation"] = "silu" if gated else sizes["activation"]
    encoder = EncoderConfig(
        mlp_width=(int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden,  # as the library rounds SwiGLU
        gated=gated,
        layer_scale=True,
        drop_path=(float(found.drop_path_rate),) * int(found.num_hidden_layers),
        **sizes,
    )
    classifier = linear_or_none(getattr(model, "classifier", None), name)
    bare_features = num_labels is None and not hasattr(model, "classifier")
    readout = _readout(model, name, num_labels, classifier, "cls" if bare_features else "cls_mean")
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _registers_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    return _dinov2_config(model, num_labels, _REGISTERS, "bicubic_antialias")


def _stem(
    found: Any, resample: Resample, *, prefix: int, registers: int = 0, distilled: bool = False
) -> PatchStemConfig:
    patch, image = pair(found.patch_size), pair(found.image_size)
    return PatchStemConfig(
        patch_size=patch,
        grid=(image[0] // patch[0], image[1] // patch[1]),
        channels=int(found.num_channels),
        distillation_token=distilled,
        registers=registers,
        position_prefix=prefix,
        resample=resample,
        dropout=float(found.hidden_dropout_prob),
    )


def _common_sizes(found: Any, name: str) -> dict[str, Any]:
    """The fields of `EncoderConfig` that all families read from the same place."""
    require_plain_encoder(found, name)
    return {
        "width": int(found.hidden_size),
        "layers": int(found.num_hidden_layers),
        "heads": int(found.num_attention_heads),
        "head_dim": head_size(found, name),
        "activation": activation_named(found.hidden_act, name),
        "norm_eps": float(found.layer_norm_eps),
        "qkv_bias": bool(found.qkv_bias),
        "attention_dropout": float(found.attention_probs_dropout_prob),
    }


def _readout(model: Any, name: str, num_labels: int | None, classifier: nn.Linear | None, pool: Pool) -> ReadoutConfig:
    if classifier is not None:
        require_one_label_per_input(model, name)
    classes = classes_or_fresh(0 if classifier is None else classifier.out_features, num_labels, name)
    pooler = getattr(model, "pooler", None)
    hidden: HiddenActivation | None = None
    if not classes and pool == "distilled":
        raise refuse(name, "it has two classifiers without classes; convert its encoder instead (model.deit)")
    if not classes and pooler is not None:
        if model.config.pooler_act not in ("tanh", "relu", "gelu"):
            raise refuse(name, f"its pooler has the activation {model.config.pooler_act!r}")
        if pooler.dense.out_features != model.config.hidden_size:
            raise refuse(name, f"its pooler changes the width to {pooler.dense.out_features}")
        hidden = cast(HiddenActivation, model.config.pooler_act)
    return ReadoutConfig(
        pool=pool,
        num_classes=classes,
        norm_eps=float(model.config.layer_norm_eps),
        hidden=hidden,
        bias=classifier is None or classifier.bias is not None,
    )


def _declare(
    name: str,
    module: str,
    config: Callable[[nn.Module, int | None], EnsembleConfig],
    weights: Callable[[str], Weights],
    classifiers: tuple[str, ...],
    bare: str,
) -> tuple[Architecture, Architecture]:
    """Two declarations of a family: its classifiers, and the bare encoder with other names in front.

    A mask token takes part in pre-training only, a pooler only in the features of a bare encoder.
    """
    path = f"transformers.models.{module}.modeling_{module}"
    return (
        Architecture(
            name=f"{name} classifier",
            classes=tuple(f"{path}.{one}" for one in classifiers),
            config=config,
            weights=weights(f"{module}."),
            ignored=(f"{module}.embeddings.mask_token",),
            metadata=metadata_of_classifier,
        ),
        Architecture(
            name=f"{name} encoder",
            classes=(f"{path}.{bare}",),
            config=config,
            weights=weights(""),
            ignored=("embeddings.mask_token", "pooler."),
        ),
    )


ARCHITECTURES: tuple[Architecture, ...] = (
    *_declare(_VIT, "vit", _vit_config, _vit_weights, ("ViTForImageClassification",), "ViTModel"),
    *_declare(
        _DEIT,
        "deit",
        _deit_config,
        _vit_weights,
        ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        "DeiTModel",
    ),
    *_declare(_DINOV2, "dinov2", _dinov2_config, _dinov2_weights, ("Dinov2ForImageClassification",), "Dinov2Model"),
    *_declare(
        _REGISTERS,
        "dinov2_with_registers",
        _registers_config,
        _dinov2_weights,
        ("Dinov2WithRegistersForImageClassification",),
        "Dinov2WithRegistersModel",
    ),
)
