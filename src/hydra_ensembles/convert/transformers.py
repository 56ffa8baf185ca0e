"""transformers: ViT, DeiT and DINOv2 for images; BERT, RoBERTa, DistilBERT and ELECTRA for text."""

import re
from collections.abc import Callable
from functools import partial
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
    Source,
    Weights,
    activation_of,
    joined,
    out_projection,
    pair,
    read_classifier,
    refuse,
    split_qkv,
)

# --- what all of them share, CLIP's towers too ---------------------------------------------------------------

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


def read_encoder(config: Any, architecture: str, **settings: Any) -> EncoderConfig:
    """The blocks that a configuration describes, with what a family reads in its own way as settings.

    Refuses configurations whose blocks are more, or less, than self-attention and an MLP.
    """
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise refuse(architecture, "the model is a decoder (is_decoder or add_cross_attention)")
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise refuse(architecture, f"its position embedding is {positions!r}, not 'absolute'")
    if getattr(config, "pruned_heads", None):
        raise refuse(architecture, f"heads were pruned by transformers (pruned_heads={config.pruned_heads})")
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None)
    if not head_dim and width % heads:
        raise refuse(architecture, f"its width {width} is not a multiple of its {heads} heads")
    shared = {
        "width": width,
        "layers": int(config.num_hidden_layers),
        "heads": heads,
        "head_dim": int(head_dim or width // heads),
        "mlp_width": int(settings.get("mlp_width") or config.intermediate_size),
        "activation": settings.get("activation") or activation_named(config.hidden_act, architecture),
        "norm_eps": float(settings.get("norm_eps") or config.layer_norm_eps),
    }
    if "attention_dropout" not in settings:
        shared["attention_dropout"] = float(config.attention_probs_dropout_prob)
    return EncoderConfig(**{**shared, **settings})


def read_classes(model: Any, classifier: Any, num_labels: int | None, architecture: str) -> tuple[int, bool]:
    """Number of classes and whether they have a bias; refuses classifiers not trained to choose one of the classes."""
    classes, bias = read_classifier(classifier, num_labels, architecture)
    problem = getattr(model.config, "problem_type", None)
    if isinstance(classifier, nn.Linear) and problem not in (None, "single_label_classification"):
        raise ConversionError(
            f"{architecture}: problem_type is {problem!r}, and the probabilities here are a softmax over classes that "
            "exclude each other; supported are None and 'single_label_classification'"
        )
    return classes, bias


def metadata_of_classifier(model: Any) -> Metadata:
    """Class names from the configuration, unless they are placeholders like `LABEL_0`."""
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    if sorted(names) != list(range(len(names))) or all(re.fullmatch(r"LABEL_\d+", name) for name in names.values()):
        return Metadata()
    return Metadata(labels=tuple(names[index] for index in range(len(names))))


def qkv_of(pattern: str, parts: tuple[str, str, str], leaf: str) -> Source:
    """Query, key and value where `pattern` has their names in place of `*`."""
    return split_qkv(*(f"{pattern.replace('*', part)}.{leaf}" for part in parts))


_QKV, _QUERY_KEY_VALUE = ("q", "k", "v"), ("query", "key", "value")


def _declare(
    name: str,
    stem: str,
    config: Callable[..., EnsembleConfig],
    weights: Callable[[str], Weights],
    classifiers: tuple[str, ...],
    ignored: tuple[str, ...] = (),
    module: str | None = None,
) -> tuple[Architecture, Architecture]:
    """Two declarations of a family: its classifiers, and the bare encoder with other names in front.

    Args:
        name: What users call the family.
        stem: How the names of its classes begin.
        config: Reads its configuration; gets the name as well.
        weights: Its tensors, under a prefix.
        classifiers: How the names of its classifiers go on.
        ignored: Tensors of the encoder that its classifiers do not read either.
        module: Its module in transformers, where that is not the stem in small letters.
    """
    module = module or stem.lower()
    path = f"transformers.models.{module}.modeling_{module}.{stem}"
    named = partial(config, name=f"transformers {name}")
    return (
        Architecture(
            name=f"transformers {name} classifier",
            classes=tuple(path + one for one in classifiers),
            config=named,
            weights=weights(f"{module}."),
            ignored=tuple(f"{module}.{one}" for one in ignored),
            metadata=metadata_of_classifier,
        ),
        Architecture(
            name=f"transformers {name} encoder",
            classes=(f"{path}Model",),
            config=named,
            weights=weights(""),
            ignored=ignored,
        ),
    )


# --- images --------------------------------------------------------------------------------------------------


def _patches_and_readout(prefix: str) -> Weights:
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
            qkv_of(f"{new}.attention.*_proj", _QKV, leaf),
            qkv_of(f"{old}.attention.attention.*", _QUERY_KEY_VALUE, leaf),
        )

    places = f"{new}.attention.o_proj", f"{old}.attention.output.dense"
    return {
        "encoder.layers.{i}.attention.qkv": qkv("weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv("bias"),
        "encoder.layers.{i}.attention.out": tuple(out_projection(f"{place}.weight") for place in places),
        "encoder.layers.{i}.attention.out_bias": tuple(f"{place}.bias" for place in places),
    }


def _vit_weights(prefix: str) -> Weights:
    new, old = f"{prefix}layers.{{i}}", f"{prefix}encoder.layer.{{i}}"
    return {
        **_patches_and_readout(prefix),
        **_attention(new, old),
        "encoder.layers.{i}.norm1": (f"{new}.layernorm_before", f"{old}.layernorm_before"),
        "encoder.layers.{i}.norm2": (f"{new}.layernorm_after", f"{old}.layernorm_after"),
        "encoder.layers.{i}.mlp.up": (f"{new}.mlp.fc1", f"{old}.intermediate.dense"),
        "encoder.layers.{i}.mlp.down": (f"{new}.mlp.fc2", f"{old}.output.dense"),
    }


def _dinov2_weights(prefix: str) -> Weights:
    layer = f"{prefix}encoder.layer.{{i}}"

    def up(leaf: str) -> tuple[Entry, ...]:
        gate_and_value = joined(f"{layer}.mlp.gate_proj.{leaf}", f"{layer}.mlp.up_proj.{leaf}")
        return f"{layer}.mlp.fc1.{leaf}", gate_and_value, f"{layer}.mlp.weights_in.{leaf}"

    return {
        **_patches_and_readout(prefix),
        **_attention(layer, layer),
        "encoder.layers.{i}.norm1": f"{layer}.norm1",
        "encoder.layers.{i}.norm2": f"{layer}.norm2",
        "encoder.layers.{i}.attention.scale": f"{layer}.layer_scale1.lambda1",
        "encoder.layers.{i}.mlp.up.weight": up("weight"),
        "encoder.layers.{i}.mlp.up.bias": up("bias"),
        "encoder.layers.{i}.mlp.down": (f"{layer}.mlp.fc2", f"{layer}.mlp.down_proj", f"{layer}.mlp.weights_out"),
        "encoder.layers.{i}.mlp.scale": f"{layer}.layer_scale2.lambda1",
    }


def _vit_config(model: Any, num_labels: int | None, name: str, distilled: bool = False) -> EnsembleConfig:
    found = model.config
    stem = _patch_stem(found, "bicubic", position_prefix=2 if distilled else 1, distillation_token=distilled)
    dropout = float(found.hidden_dropout_prob)
    rates = {"projection_dropout": dropout, "output_dropout": dropout}
    encoder = read_encoder(found, name, qkv_bias=bool(found.qkv_bias), **rates)
    teacher = getattr(model, "cls_classifier", None)
    classifier = getattr(model, "classifier", teacher)
    readout = _image_readout(model, name, num_labels, classifier, "cls" if teacher is None else "distilled")
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _dinov2_config(model: Any, num_labels: int | None, name: str, resample: Resample = "bicubic") -> EnsembleConfig:
    found = model.config
    registers = int(getattr(found, "num_register_tokens", 0))
    stem = _patch_stem(found, resample, position_prefix=1, registers=registers)
    if stem.grid[0] != stem.grid[1]:
        raise refuse(name, f"its image_size {found.image_size} is not square, but its position embedding is read so")
    gated = bool(found.use_swiglu_ffn)
    hidden = int(found.hidden_size * found.mlp_ratio)
    encoder = read_encoder(
        found,
        name,
        mlp_width=(int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden,  # as the library rounds SwiGLU
        gated=gated,
        qkv_bias=bool(found.qkv_bias),
        layer_scale=True,
        drop_path=(float(found.drop_path_rate),) * int(found.num_hidden_layers),
        **({"activation": "silu"} if gated else {}),
    )
    bare_features = num_labels is None and not hasattr(model, "classifier")
    classifier = getattr(model, "classifier", None)
    readout = _image_readout(model, name, num_labels, classifier, "cls" if bare_features else "cls_mean")
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _patch_stem(found: Any, resample: Resample, **settings: Any) -> PatchStemConfig:
    patch, image = pair(found.patch_size), pair(found.image_size)
    return PatchStemConfig(
        patch_size=patch,
        grid=(image[0] // patch[0], image[1] // patch[1]),
        channels=int(found.num_channels),
        resample=resample,
        dropout=float(found.hidden_dropout_prob),
        **settings,
    )


def _image_readout(model: Any, name: str, num_labels: int | None, classifier: Any, pool: Pool) -> ReadoutConfig:
    classes, bias = read_classes(model, classifier, num_labels, name)
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
    norm_eps = float(model.config.layer_norm_eps)
    return ReadoutConfig(pool=pool, num_classes=classes, norm_eps=norm_eps, hidden=hidden, bias=bias)


_FOR_IMAGES = ("ForImageClassification",)
# A mask token takes part in pre-training only, a pooler only in the features of a bare encoder.
_UNREAD = ("embeddings.mask_token", "pooler.")


# --- text ----------------------------------------------------------------------------------------------------


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
    return {
        **_embeddings(prefix),
        "encoder.layers.{i}.attention.qkv": qkv_of(f"{layer}.attention.self.*", _QUERY_KEY_VALUE, "weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv_of(f"{layer}.attention.self.*", _QUERY_KEY_VALUE, "bias"),
        "encoder.layers.{i}.attention.out": out_projection(f"{layer}.attention.output.dense.weight"),
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
    return {
        **_embeddings(prefix),
        "encoder.layers.{i}.attention.qkv": qkv_of(f"{layer}.attention.*_lin", _QKV, "weight"),
        "encoder.layers.{i}.attention.qkv_bias": qkv_of(f"{layer}.attention.*_lin", _QKV, "bias"),
        "encoder.layers.{i}.attention.out": out_projection(f"{layer}.attention.out_lin.weight"),
        "encoder.layers.{i}.attention.out_bias": f"{layer}.attention.out_lin.bias",
        "encoder.layers.{i}.norm1": f"{layer}.sa_layer_norm",
        "encoder.layers.{i}.mlp.up": f"{layer}.ffn.lin1",
        "encoder.layers.{i}.mlp.down": f"{layer}.ffn.lin2",
        "encoder.layers.{i}.norm2": f"{layer}.output_layer_norm",
        "readout.hidden": "pre_classifier",
        "readout.classifier": "classifier",
    }


def _bert_config(
    model: Any,
    num_labels: int | None,
    name: str,
    hidden: HiddenActivation = "tanh",
    drops_first_token: bool = True,
    counts_after_padding: bool = False,
) -> EnsembleConfig:
    """BERT, RoBERTa and ELECTRA, which differ in the readout and in how positions are counted."""
    found, embeddings = model.config, model.base_model.embeddings
    dropout = float(found.hidden_dropout_prob)
    stem = TextStemConfig(
        segments=embeddings.token_type_embeddings.num_embeddings,
        positions_after=int(embeddings.padding_idx) if counts_after_padding else None,
        norm_eps=float(found.layer_norm_eps),
        project=hasattr(model.base_model, "embeddings_project"),
        dropout=dropout,
        **_table_sizes(embeddings),
    )
    encoder = read_encoder(found, name, norm_first=False, projection_dropout=dropout, output_dropout=dropout)
    rate = dropout if found.classifier_dropout is None else float(found.classifier_dropout)
    readout = _text_readout(model, num_labels, name, hidden, rate, drops_first_token)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _distilbert_config(model: Any, num_labels: int | None, name: str) -> EnsembleConfig:
    found, eps = model.config, 1e-12  # written in the library's code, not in its configuration
    dropout = float(found.dropout)
    stem = TextStemConfig(norm_eps=eps, dropout=dropout, **_table_sizes(model.base_model.embeddings))
    width = int(found.hidden_dim)
    encoder = read_encoder(
        found,
        name,
        norm_first=False,
        mlp_width=width,
        norm_eps=eps,
        activation=activation_named(found.activation, name),  # its own names: a stray `hidden_act` means nothing
        attention_dropout=float(found.attention_dropout),
        output_dropout=dropout,
    )
    readout = _text_readout(model, num_labels, name, "relu", float(found.seq_classif_dropout), False)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _table_sizes(embeddings: Any) -> dict[str, Any]:
    """Sizes of the embedding tables, read off the tables: they may have been resized after loading."""
    return {
        "vocabulary": embeddings.word_embeddings.num_embeddings,
        "positions": embeddings.position_embeddings.num_embeddings,
        "embedding_width": embeddings.word_embeddings.embedding_dim,
    }


def _text_readout(
    model: Any, num_labels: int | None, name: str, hidden: HiddenActivation, rate: float, drops_first_token: bool
) -> ReadoutConfig:
    head = getattr(model, "classifier", None)
    classes, bias = read_classes(model, getattr(head, "out_proj", head), num_labels, name)
    if not classes:
        pooled = getattr(model, "pooler", None) is not None
        return ReadoutConfig(norm="none", hidden="tanh" if pooled else None)
    return ReadoutConfig(
        num_classes=classes,
        norm="none",
        hidden=hidden,
        bias=bias,
        dropout=rate if drops_first_token else 0.0,
        hidden_dropout=rate,
    )


_FOR_TEXTS = ("ForSequenceClassification",)

ARCHITECTURES: tuple[Architecture, ...] = (
    *_declare("ViT", "ViT", _vit_config, _vit_weights, _FOR_IMAGES, _UNREAD),
    *_declare(
        "DeiT",
        "DeiT",
        partial(_vit_config, distilled=True),
        _vit_weights,
        (*_FOR_IMAGES, "ForImageClassificationWithTeacher"),
        _UNREAD,
    ),
    *_declare("DINOv2", "Dinov2", _dinov2_config, _dinov2_weights, _FOR_IMAGES, _UNREAD),
    *_declare(
        "DINOv2 with registers",
        "Dinov2WithRegisters",
        partial(_dinov2_config, resample="bicubic_antialias"),
        _dinov2_weights,
        _FOR_IMAGES,
        _UNREAD,
        module="dinov2_with_registers",
    ),
    *_declare("BERT", "Bert", partial(_bert_config, drops_first_token=False), _bert_weights, _FOR_TEXTS),
    *_declare("RoBERTa", "Roberta", partial(_bert_config, counts_after_padding=True), _bert_weights, _FOR_TEXTS),
    *_declare("DistilBERT", "DistilBert", _distilbert_config, _distilbert_weights, _FOR_TEXTS),
    *_declare("ELECTRA", "Electra", partial(_bert_config, hidden="gelu"), _bert_weights, _FOR_TEXTS),
)
