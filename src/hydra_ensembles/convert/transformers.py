"""transformers: what its tables share, and its image encoders: ViT, DeiT, MAE, MSN, I-JEPA, DINOv2, DINOv3."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ConversionError
from ..model.config import EncoderConfig, EnsembleConfig, Pool, ReadoutConfig, Resample, RotaryConfig
from ..model.metadata import Metadata
from . import core
from .core import Architecture, Found, NamedTensors, Weights, attention, below, block, concatenated, either, pair

# --- shared by all of them, and by texts and towers ------------------------------------------------------------


def read_encoder(found: Found, config: Any, **settings: Any) -> EncoderConfig:
    """Read the blocks by the configuration's usual names; `settings` are what a family reads in its own way."""
    if "activation" not in settings:
        settings["activation"] = core.activation_of(config.hidden_act)
    if "attention_dropout" not in settings:
        rate = getattr(config, "attention_probs_dropout_prob", None)
        settings["attention_dropout"] = float(config.attention_dropout if rate is None else rate)
    return found.encoder(int(config.num_attention_heads), **settings)


def read_classifier(found: Found, num_labels: int | None) -> dict[str, Any]:
    """Return the settings of a readout that follow from the classifier; raise if classes are not mutually exclusive."""
    problem = getattr(found.model.config, "problem_type", None)
    if found.has("readout.classifier.weight") and problem not in (None, "single_label_classification"):
        why = "but the probabilities here are a softmax over mutually exclusive classes"
        raise ConversionError(f"problem_type is {problem!r}, {why}")
    return found.classifier(num_labels)


def metadata_of_classifier(model: Any) -> Metadata:
    """Read class names from the configuration, if numbered 0, 1, … and not placeholders like `LABEL_0`."""
    found: Any = getattr(model.config, "id2label", None) or {}
    pairs = found.items() if isinstance(found, Mapping) else enumerate(found)
    by_number = {str(number): "" if name is None else str(name) for number, name in pairs}
    names = [by_number.get(str(number)) for number in range(len(by_number))]
    if None in names or all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names):
        return Metadata()
    return Metadata(labels=tuple(map(str, names)))


def answer(model: Any, inputs: NamedTensors, fresh: bool, pool: Pool = "cls") -> Tensor:
    """Return logits, or the features of a bare encoder; `pool` is the input of the family's classifiers."""
    bare = type(model).__name__.endswith("Model")  # its own `base_model` may be a part of it (DINOv3)
    output = (model.base_model if fresh and not bare else model)(**inputs)
    answers = () if fresh else (getattr(output, name, None) for name in ("logits", "pooler_output"))
    for answer in answers:
        if answer is not None:
            return cast(Tensor, answer)
    tokens: Tensor = output.last_hidden_state  # [B, T, d]
    if pool == "mean":
        return tokens.mean(1)
    patches = tokens[:, 1 + int(getattr(model.config, "num_register_tokens", 0)) :]
    return torch.cat([tokens[:, 0], patches.mean(1)], dim=-1) if pool == "cls_mean" else tokens[:, 0]


READOUT: Weights = {
    "readout.hidden": (
        *("classifier.dense", "pre_classifier", "pooler.dense", "bert.pooler.dense", "albert.pooler", "pooler"),
    ),
    "readout.classifier": ("classifier", "classifier.1", "classifier.out_proj", "cls_classifier"),
    "readout.distillation_classifier": "distillation_classifier",
}


def declare(
    name: str,
    stem: str,
    config: Callable[[Found, int | None], EnsembleConfig],
    encoder: Weights,
    classifiers: tuple[str, ...],
    ignored: tuple[str, ...] = (),
    module: str = "",
    answer: Callable[[Any, NamedTensors, bool], Tensor] = answer,
    inside: str = "",
    readout: Weights = READOUT,
) -> tuple[Architecture, Architecture]:
    """Declare a family: its classifiers, which contain the encoder under the name of the module, and its bare encoder.

    Class names are `stem`, followed by one of `classifiers` for a classifier. `ignored` are tensors of the encoder that
    the classifiers do not read either; `module` is the module of the family, by default `stem` in lower case; `inside`
    is the classifiers' name for the encoder, by default that of the module.
    """
    module = module or stem.lower()
    inside = inside or module
    path = f"transformers.models.{module}.modeling_{module}.{stem}"
    classifier = Architecture(
        name=f"transformers {name} classifier",
        classes=tuple(path + ending for ending in classifiers),
        config=config,
        weights={**below(f"{inside}.", encoder), **readout},
        ignored=tuple(f"{inside}.{beginning}" for beginning in ignored),
        metadata=metadata_of_classifier,
        answer=answer,
    )
    weights, title = {**encoder, **readout}, f"transformers {name} encoder"
    return classifier, Architecture(title, (f"{path}Model",), config, weights, ignored, answer=answer)


# --- images --------------------------------------------------------------------------------------------------

_PATCHES: Weights = {
    "stem.patch": "embeddings.patch_embeddings.projection.weight",
    "stem.patch_bias": "embeddings.patch_embeddings.projection.bias",
    "stem.class_token": "embeddings.cls_token",
    "stem.distillation_token": "embeddings.distillation_token",
    "stem.register_tokens": "embeddings.register_tokens",
    "stem.position": "embeddings.position_embeddings",
    "readout.norm": "layernorm",
}
# Releases of transformers 5 differ in the names of attention parameters, and of the layers of ViT.
_ATTENTION = ("attention.o_proj", *(f"attention.{part}_proj.*" for part in "qkv"))
WORDS = ("query", "key", "value")
_OLD_ATTENTION = ("attention.output.dense", *(f"attention.attention.{part}.*" for part in WORDS))
_VIT_NORMS = ("layernorm_before", "layernorm_after")
_VIT_LAYER = block(_ATTENTION, _VIT_NORMS, ("mlp.fc1", "mlp.fc2"))
_OLD_VIT_LAYER = block(_OLD_ATTENTION, _VIT_NORMS, ("intermediate.dense", "output.dense"))
_VIT: Weights = {**_PATCHES, **either(below("layers.{i}.", _VIT_LAYER), below("encoder.layer.{i}.", _OLD_VIT_LAYER))}


def gated(*names: str) -> Weights:
    """Declare the first layer of an MLP: gate and value stored separately, or one tensor with one of `names`."""
    return {
        f"encoder.layers.{{i}}.mlp.up.{leaf}": (
            concatenated(f"mlp.gate_proj.{leaf}", f"mlp.up_proj.{leaf}"),
            *(f"{name}.{leaf}" for name in names),
        )
        for leaf in ("weight", "bias")
    }


DINO_LAYER: Weights = {
    **either(attention(*_ATTENTION), attention(*_OLD_ATTENTION)),
    "encoder.layers.{i}.norm1": "norm1",
    "encoder.layers.{i}.norm2": "norm2",
    "encoder.layers.{i}.attention.scale": "layer_scale1.lambda1",
    **gated("mlp.fc1", "mlp.weights_in"),
    "encoder.layers.{i}.mlp.down": ("mlp.fc2", "mlp.down_proj", "mlp.weights_out"),
    "encoder.layers.{i}.mlp.scale": "layer_scale2.lambda1",
}
_DINOV2: Weights = {**_PATCHES, **below("encoder.layer.{i}.", DINO_LAYER)}


def _vit_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    dropout = float(config.hidden_dropout_prob)
    stem = found.patch_stem(pair(config.image_size), resample="bicubic", dropout=dropout)
    encoder = read_encoder(found, config, projection_dropout=dropout, output_dropout=dropout)
    two = hasattr(found.model, "distillation_classifier")
    pool: Pool = "distilled" if two else "cls" if stem.class_token else "mean"
    return EnsembleConfig(stem, encoder, _image_readout(found, num_labels, pool), encoder.all_heads())


def _dinov2_config(found: Found, num_labels: int | None, resample: Resample = "bicubic") -> EnsembleConfig:
    config = found.model.config
    stem = found.patch_stem(pair(config.image_size), resample=resample, dropout=float(config.hidden_dropout_prob))
    drop_path = (float(config.drop_path_rate),) * int(config.num_hidden_layers)
    activation = {"activation": "silu"} if config.use_swiglu_ffn else {}
    encoder = read_encoder(found, config, drop_path=drop_path, **activation)
    features = num_labels is None and not found.has("readout.classifier.weight")
    readout = _image_readout(found, num_labels, "cls" if features else "cls_mean")
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _image_readout(found: Found, num_labels: int | None, pool: Pool) -> ReadoutConfig:
    config, classifier = found.model.config, read_classifier(found, num_labels)
    if not classifier["num_classes"] and pool == "distilled":
        raise core.refuse("it has two classifiers without classes")
    pooled = not classifier["num_classes"] and getattr(found.model, "pooler", None) is not None
    hidden = config.pooler_act if pooled else None
    return ReadoutConfig(pool, norm_eps=float(config.layer_norm_eps), hidden=hidden, **classifier)


def _mae_answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    """Return the class token of an encoder that sees all patches in order: none is masked, unlike in pre-training."""
    images = inputs["pixel_values"]
    ratio = model.config.mask_ratio
    patch = pair(model.config.patch_size)
    order = torch.arange(images.shape[2] // patch[0] * (images.shape[3] // patch[1]), device=images.device)
    model.config.mask_ratio = 0.0
    try:
        tokens: Tensor = model(images, noise=order.expand(len(images), -1).float()).last_hidden_state
    finally:
        model.config.mask_ratio = ratio
    return tokens[:, 0]


_DINOV3_LAYER: Weights = {
    **DINO_LAYER,
    "encoder.layers.{i}.attention.qkv_bias": (
        core.qkv_by_head(*(f"attention.{part}_proj.bias" for part in "qkv")),
        core.qkv_by_head("attention.q_proj.bias", "attention.v_proj.bias"),
    ),
    **gated("mlp.up_proj"),
}


def _dinov3_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    stem = found.patch_stem(pair(config.image_size), resample="bicubic")
    drop_path = (float(config.drop_path_rate),) * int(config.num_hidden_layers)
    rotary = RotaryConfig(float(config.rope_theta), centred=True)
    encoder = read_encoder(found, config, drop_path=drop_path, rotary=rotary)
    readout = ReadoutConfig(norm_eps=encoder.norm_eps, **read_classifier(found, num_labels))
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


_DINOV3: Weights = {
    "stem.patch": "embeddings.patch_embeddings.weight",
    "stem.patch_bias": "embeddings.patch_embeddings.bias",
    "stem.class_token": "embeddings.cls_token",
    "stem.register_tokens": "embeddings.register_tokens",
    **either(below("model.layer.{i}.", _DINOV3_LAYER), below("layer.{i}.", _DINOV3_LAYER)),  # releases differ
    "readout.norm": "norm",
}
_IMAGES = ("ForImageClassification",)
# A mask token is used only in pre-training, a pooler only for the features of a bare encoder.
_UNREAD = ("embeddings.mask_token", "pooler.")
_NO_REGISTERS = ("embeddings.mask_token", "embeddings.register_tokens")  # the latter is then an empty tensor
_MEAN = partial(answer, pool="mean")
_WITH_MEAN = partial(answer, pool="cls_mean")
_TEACHER = (*_IMAGES, "ForImageClassificationWithTeacher")

ARCHITECTURES: tuple[Architecture, ...] = (
    *declare("ViT", "ViT", _vit_config, _VIT, _IMAGES, _UNREAD),
    *declare("DeiT", "DeiT", _vit_config, _VIT, _TEACHER, _UNREAD),
    declare("ViT-MAE", "ViTMAE", _vit_config, _VIT, (), _UNREAD, "vit_mae", _mae_answer)[1],
    *declare("ViT-MSN", "ViTMSN", _vit_config, _VIT, _IMAGES, _UNREAD, module="vit_msn", inside="vit"),
    *declare("I-JEPA", "IJepa", _vit_config, _VIT, _IMAGES, _UNREAD, answer=_MEAN),
    *declare("DINOv2", "Dinov2", _dinov2_config, _DINOV2, _IMAGES, _UNREAD, answer=_WITH_MEAN),
    *declare(
        "DINOv2 with registers",
        "Dinov2WithRegisters",
        partial(_dinov2_config, resample="bicubic_antialias"),
        _DINOV2,
        _IMAGES,
        (*_UNREAD, *_NO_REGISTERS),
        module="dinov2_with_registers",
        answer=_WITH_MEAN,
    ),
    declare("DINOv3", "DINOv3ViT", _dinov3_config, _DINOV3, (), _NO_REGISTERS, "dinov3_vit")[1],
)
