"""transformers: what its tables share, and its image encoders: ViT, DeiT, MAE, MSN, I-JEPA, DINOv2, DINOv3."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, Pool, ReadoutConfig, Resample, RotaryConfig
from ..model.metadata import Metadata
from . import core
from .core import Architecture, NamedTensors, Weights, attention, below, block, concatenated, either, pair, run

# --- shared by all of them, and by texts and towers ------------------------------------------------------------


def read_encoder(config: Any, **settings: Any) -> EncoderConfig:
    """Read the blocks from a configuration; `settings` are those that a family reads in its own way."""
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    shared = {
        "width": width,
        "layers": int(config.num_hidden_layers),
        "heads": heads,
        "head_dim": int(getattr(config, "head_dim", None) or width // heads),
        "mlp_width": int(settings.get("mlp_width") or config.intermediate_size),
        "activation": settings.get("activation") or core.activation_of(config.hidden_act),
        "norm_eps": float(settings.get("norm_eps") or config.layer_norm_eps),
    }
    if "attention_dropout" not in settings:
        rate = getattr(config, "attention_probs_dropout_prob", None)
        shared["attention_dropout"] = float(config.attention_dropout if rate is None else rate)
    return EncoderConfig(**{**shared, **settings})


def patch_stem(config: Any, resample: Resample, **settings: Any) -> PatchStemConfig:
    """Read the patch stem from a configuration; `settings` are those that a family reads in its own way."""
    patch, image = pair(config.patch_size), pair(config.image_size)
    grid = image[0] // patch[0], image[1] // patch[1]
    return PatchStemConfig(patch, grid, channels=int(config.num_channels), resample=resample, **settings)


def read_classes(model: Any, classifier: Any, num_labels: int | None) -> tuple[int, bool]:
    """Return the number of classes and whether there is a bias; raise if classes are not mutually exclusive."""
    classes, bias = core.read_classifier(classifier, num_labels)
    problem = getattr(model.config, "problem_type", None)
    if isinstance(classifier, nn.Linear) and problem not in (None, "single_label_classification"):
        why = "but the probabilities here are a softmax over mutually exclusive classes"
        raise ConversionError(f"problem_type is {problem!r}, {why}")
    return classes, bias


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
    output = run(model.base_model if fresh and not bare else model, **inputs)
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
    "readout.classifier": ("classifier", "classifier.out_proj", "cls_classifier"),
    "readout.distillation_classifier": "distillation_classifier",
}


def declare(
    name: str,
    stem: str,
    config: Callable[..., EnsembleConfig],
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


def _vit_config(
    model: Any, num_labels: int | None, distilled: bool = False, class_token: bool = True
) -> EnsembleConfig:
    config = model.config
    dropout = float(config.hidden_dropout_prob)
    tokens = {"class_token": class_token, "distillation_token": distilled}
    stem = patch_stem(config, "bicubic", position_prefix=sum(tokens.values()), dropout=dropout, **tokens)
    encoder = read_encoder(config, qkv_bias=bool(config.qkv_bias), projection_dropout=dropout, output_dropout=dropout)
    teacher = getattr(model, "cls_classifier", None)
    classifier = getattr(model, "classifier", teacher)
    pool: Pool = "distilled" if teacher is not None else "cls" if class_token else "mean"
    readout = _image_readout(model, num_labels, classifier, pool)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _dinov2_config(model: Any, num_labels: int | None, resample: Resample = "bicubic") -> EnsembleConfig:
    config = model.config
    registers = int(getattr(config, "num_register_tokens", 0))
    dropout = float(config.hidden_dropout_prob)
    stem = patch_stem(config, resample, position_prefix=1, registers=registers, dropout=dropout)
    gated = bool(config.use_swiglu_ffn)
    hidden = int(config.hidden_size * config.mlp_ratio)
    encoder = read_encoder(
        config,
        mlp_width=(int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden,  # rounding of the library's SwiGLU
        gated=gated,
        qkv_bias=bool(config.qkv_bias),
        layer_scale=True,
        drop_path=(float(config.drop_path_rate),) * int(config.num_hidden_layers),
        **({"activation": "silu"} if gated else {}),
    )
    classifier = getattr(model, "classifier", None)
    bare_features = num_labels is None and classifier is None
    readout = _image_readout(model, num_labels, classifier, "cls" if bare_features else "cls_mean")
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _image_readout(model: Any, num_labels: int | None, classifier: Any, pool: Pool) -> ReadoutConfig:
    classes, bias = read_classes(model, classifier, num_labels)
    if not classes and pool == "distilled":
        raise core.refuse("it has two classifiers without classes")
    pooled = not classes and getattr(model, "pooler", None) is not None
    hidden = model.config.pooler_act if pooled else None
    return ReadoutConfig(pool, classes, norm_eps=float(model.config.layer_norm_eps), hidden=hidden, bias=bias)


def _mae_answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    """Return the class token of an encoder that sees all patches in order: none is masked, unlike in pre-training."""
    images = inputs["pixel_values"]
    ratio = model.config.mask_ratio
    patch = pair(model.config.patch_size)
    order = torch.arange(images.shape[2] // patch[0] * (images.shape[3] // patch[1]), device=images.device)
    model.config.mask_ratio = 0.0
    try:
        tokens: Tensor = run(model, images, noise=order.expand(len(images), -1).float()).last_hidden_state
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


def _dinov3_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = model.config
    registers = int(config.num_register_tokens)
    stem = patch_stem(config, "bicubic", position_prefix=0, registers=registers, learned_positions=False)
    biases = bool(config.query_bias), bool(config.key_bias), bool(config.value_bias)
    encoder = read_encoder(
        config,
        gated=bool(config.use_gated_mlp),
        qkv_bias=biases[0],
        key_bias=biases != (True, False, True),
        out_bias=bool(config.proj_bias),
        mlp_bias=bool(config.mlp_bias),
        layer_scale=True,
        drop_path=(float(config.drop_path_rate),) * int(config.num_hidden_layers),
        rotary=RotaryConfig(
            float(config.rope_theta),
            centred=True,
            shift=float(config.pos_embed_shift or 0.0),
            jitter=float(config.pos_embed_jitter or 1.0),
            rescale=float(config.pos_embed_rescale or 1.0),
        ),
    )
    classes, _ = read_classes(model, None, num_labels)
    readout = ReadoutConfig(num_classes=classes, norm_eps=float(config.layer_norm_eps))
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
    *declare("DeiT", "DeiT", partial(_vit_config, distilled=True), _VIT, _TEACHER, _UNREAD),
    declare("ViT-MAE", "ViTMAE", _vit_config, _VIT, (), _UNREAD, "vit_mae", _mae_answer)[1],
    *declare("ViT-MSN", "ViTMSN", _vit_config, _VIT, _IMAGES, _UNREAD, module="vit_msn", inside="vit"),
    *declare("I-JEPA", "IJepa", partial(_vit_config, class_token=False), _VIT, _IMAGES, _UNREAD, answer=_MEAN),
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
