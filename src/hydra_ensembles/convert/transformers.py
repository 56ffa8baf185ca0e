"""Readings off transformers models that image and text architectures have in common."""

import re
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ..errors import ConversionError
from ..model.config import (
    Activation,
    EncoderConfig,
    EnsembleConfig,
    HiddenActivation,
    PatchStemConfig,
    Pool,
    ReadoutConfig,
    Resample,
    TextStemConfig,
    all_heads,
)
from ..model.metadata import Metadata
from .core import (
    Architecture,
    Entry,
    Joined,
    OutProjection,
    SplitQKV,
    Weights,
    activation_of,
    classes_or_fresh,
    linear_or_none,
    pair,
    refuse,
)

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation_named(name: Any, architecture: str) -> Activation:
    """The activation that a transformers configuration names, or holds as a module or function."""
    if not isinstance(name, str):
        return activation_of(name, architecture)
    if name not in _ACTIVATIONS:
        raise ConversionError(
            f"{architecture}: the activation {name!r} is not supported; supported are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def require_plain_encoder(config: Any, architecture: str) -> None:
    """Refuse configurations whose blocks are more, or less, than self-attention and an MLP."""
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise refuse(architecture, "the model is a decoder (is_decoder or add_cross_attention)")
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise refuse(architecture, f"its position embedding is {positions!r}, not 'absolute'")
    if getattr(config, "pruned_heads", None):
        raise refuse(architecture, f"heads were pruned by transformers (pruned_heads={config.pruned_heads})")


def head_size(config: Any, architecture: str) -> int:
    """Width of one head."""
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or width // heads)
    if size * heads != width and not getattr(config, "head_dim", None):
        raise refuse(architecture, f"its width {width} is not a multiple of its {heads} heads")
    return size


def require_one_label_per_input(model: Any, architecture: str) -> None:
    """Refuse classifiers that were not trained to choose one of the classes."""
    problem = getattr(model.config, "problem_type", None)
    if problem not in (None, "single_label_classification"):
        raise ConversionError(
            f"{architecture}: problem_type is {problem!r}, and the probabilities here are a softmax over classes that "
            "exclude each other; supported are None and 'single_label_classification'"
        )


def metadata_of_classifier(model: Any) -> Metadata:
    """Class names from the configuration, unless they are placeholders like `LABEL_0`."""
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    if sorted(names) != list(range(len(names))) or all(re.fullmatch(r"LABEL_\d+", name) for name in names.values()):
        return Metadata()
    return Metadata(labels=tuple(names[index] for index in range(len(names))))


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


VISION_ARCHITECTURES: tuple[Architecture, ...] = (
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


_BERT = "transformers BERT"
_ROBERTA = "transformers RoBERTa"
_DISTILBERT = "transformers DistilBERT"
_ELECTRA = "transformers ELECTRA"
_DISTILBERT_EPS = 1e-12  # written in the library's code, not in its configuration


def _embeddings(prefix: str) -> Weights:
    return {
        "stem.words": f"{prefix}embeddings.word_embeddings.weight",
        "stem.positions": f"{prefix}embeddings.position_embeddings.weight",
        "stem.segments": f"{prefix}embeddings.token_type_embeddings.weight",
        "stem.norm": f"{prefix}embeddings.LayerNorm",
        "stem.project": f"{prefix}embeddings_project",
    }


def _bert_weights(prefix: str) -> Weights:
    """BERT, RoBERTa and ELECTRA; `prefix` leads to the encoder inside a classifier."""
    layer = f"{prefix}encoder.layer.{{i}}"

    def qkv(leaf: str) -> SplitQKV:
        return SplitQKV(*(f"{layer}.attention.self.{part}.{leaf}" for part in ("query", "key", "value")))

    return {
        **_embeddings(prefix),
        "encoder.layers.{i}.attention.qkv": qkv("weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv("bias"),
        "encoder.layers.{i}.attention.out": OutProjection(f"{layer}.attention.output.dense.weight"),
        "encoder.layers.{i}.attention.out_bias": f"{layer}.attention.output.dense.bias",
        "encoder.layers.{i}.norm1": f"{layer}.attention.output.LayerNorm",
        "encoder.layers.{i}.mlp.up": f"{layer}.intermediate.dense",
        "encoder.layers.{i}.mlp.down": f"{layer}.output.dense",
        "encoder.layers.{i}.norm2": f"{layer}.output.LayerNorm",
        "readout.hidden": ("classifier.dense", f"{prefix}pooler.dense"),
        "readout.classifier": ("classifier", "classifier.out_proj"),
    }


def _distilbert_weights(prefix: str) -> Weights:
    layer = f"{prefix}transformer.layer.{{i}}"

    def qkv(leaf: str) -> SplitQKV:
        return SplitQKV(*(f"{layer}.attention.{part}_lin.{leaf}" for part in "qkv"))

    return {
        **_embeddings(prefix),
        "encoder.layers.{i}.attention.qkv": qkv("weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv("bias"),
        "encoder.layers.{i}.attention.out": OutProjection(f"{layer}.attention.out_lin.weight"),
        "encoder.layers.{i}.attention.out_bias": f"{layer}.attention.out_lin.bias",
        "encoder.layers.{i}.norm1": f"{layer}.sa_layer_norm",
        "encoder.layers.{i}.mlp.up": f"{layer}.ffn.lin1",
        "encoder.layers.{i}.mlp.down": f"{layer}.ffn.lin2",
        "encoder.layers.{i}.norm2": f"{layer}.output_layer_norm",
        "readout.hidden": "pre_classifier",
        "readout.classifier": "classifier",
    }


def _bert_like_config(
    model: Any, num_labels: int | None, name: str, hidden: HiddenActivation, *, drops_first_token: bool
) -> EnsembleConfig:
    """BERT, RoBERTa and ELECTRA, which differ in the readout and in how positions are counted."""
    found, embeddings = model.config, model.base_model.embeddings
    stem = TextStemConfig(
        segments=embeddings.token_type_embeddings.num_embeddings,
        positions_after=int(embeddings.padding_idx) if name == _ROBERTA else None,
        norm_eps=float(found.layer_norm_eps),
        project=hasattr(model.base_model, "embeddings_project"),
        dropout=float(found.hidden_dropout_prob),
        **_table_sizes(embeddings),
    )
    encoder = EncoderConfig(
        mlp_width=int(found.intermediate_size),
        activation=activation_named(found.hidden_act, name),
        norm_eps=float(found.layer_norm_eps),
        attention_dropout=float(found.attention_probs_dropout_prob),
        projection_dropout=float(found.hidden_dropout_prob),
        output_dropout=float(found.hidden_dropout_prob),
        **_transformers_text_common_sizes(found, name),
    )
    rate = found.hidden_dropout_prob if found.classifier_dropout is None else found.classifier_dropout
    readout = _transformers_text_readout(
        model, num_labels, name, hidden, float(rate), drops_first_token=drops_first_token
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _bert_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    return _bert_like_config(model, num_labels, _BERT, "tanh", drops_first_token=False)


def _roberta_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    return _bert_like_config(model, num_labels, _ROBERTA, "tanh", drops_first_token=True)


def _electra_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    return _bert_like_config(model, num_labels, _ELECTRA, "gelu", drops_first_token=True)


def _distilbert_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = model.config
    stem = TextStemConfig(
        norm_eps=_DISTILBERT_EPS, dropout=float(found.dropout), **_table_sizes(model.base_model.embeddings)
    )
    encoder = EncoderConfig(
        mlp_width=int(found.hidden_dim),
        activation=activation_named(found.activation, _DISTILBERT),
        norm_eps=_DISTILBERT_EPS,
        attention_dropout=float(found.attention_dropout),
        output_dropout=float(found.dropout),
        **_transformers_text_common_sizes(found, _DISTILBERT),
    )
    rate = float(found.seq_classif_dropout)
    readout = _transformers_text_readout(model, num_labels, _DISTILBERT, "relu", rate, drops_first_token=False)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _table_sizes(embeddings: Any) -> dict[str, Any]:
    """Sizes of the embedding tables, read off the tables: they may have been resized after loading."""
    return {
        "vocabulary": embeddings.word_embeddings.num_embeddings,
        "positions": embeddings.position_embeddings.num_embeddings,
        "embedding_width": embeddings.word_embeddings.embedding_dim,
    }


def _transformers_text_common_sizes(found: Any, name: str) -> dict[str, Any]:
    """The fields of `EncoderConfig` that all families read from the same place."""
    require_plain_encoder(found, name)
    return {
        "width": int(found.hidden_size),
        "layers": int(found.num_hidden_layers),
        "heads": int(found.num_attention_heads),
        "head_dim": head_size(found, name),
        "norm_first": False,
    }


def _transformers_text_readout(
    model: Any, num_labels: int | None, name: str, hidden: HiddenActivation, rate: float, *, drops_first_token: bool
) -> ReadoutConfig:
    head = getattr(model, "classifier", None)
    linear = linear_or_none(getattr(head, "out_proj", head), name)
    if linear is not None:
        require_one_label_per_input(model, name)
    classes = classes_or_fresh(0 if linear is None else linear.out_features, num_labels, name)
    if not classes:
        pooled = getattr(model, "pooler", None) is not None
        return ReadoutConfig(norm="none", hidden="tanh" if pooled else None)
    return ReadoutConfig(
        num_classes=classes,
        norm="none",
        hidden=hidden,
        bias=linear is None or linear.bias is not None,
        dropout=rate if drops_first_token else 0.0,
        hidden_dropout=rate,
    )


def _transformers_text_declare(
    name: str,
    module: str,
    config: Callable[[nn.Module, int | None], EnsembleConfig],
    weights: Callable[[str], Weights],
    stem: str,
) -> tuple[Architecture, Architecture]:
    """Two declarations of a family: its sequence classifier, and the bare encoder without its prefix."""
    path = f"transformers.models.{module}.modeling_{module}.{stem}"
    return (
        Architecture(
            name=f"{name} classifier",
            classes=(f"{path}ForSequenceClassification",),
            config=config,
            weights=weights(f"{module}."),
            metadata=metadata_of_classifier,
        ),
        Architecture(
            name=f"{name} encoder",
            classes=(f"{path}Model",),
            config=config,
            weights=weights(""),
            fresh=("readout.hidden", "readout.classifier"),
        ),
    )


TEXT_ARCHITECTURES: tuple[Architecture, ...] = (
    *_transformers_text_declare(_BERT, "bert", _bert_config, _bert_weights, "Bert"),
    *_transformers_text_declare(_ROBERTA, "roberta", _roberta_config, _bert_weights, "Roberta"),
    *_transformers_text_declare(_DISTILBERT, "distilbert", _distilbert_config, _distilbert_weights, "DistilBert"),
    *_transformers_text_declare(_ELECTRA, "electra", _electra_config, _bert_weights, "Electra"),
)
