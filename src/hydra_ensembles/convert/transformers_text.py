"""transformers: BERT (MiniLM too), RoBERTa, DistilBERT and ELECTRA for sequence classification.

A classifier is translated as it is: first token, a hidden layer (BERT's pooler, the dense layer of the
others), a linear classifier. A bare encoder with `num_labels=` gets the same readout as the library's
classifier of its family; its hidden layer is the encoder's pooler where there is one, and fresh where there
is not, the classifier is fresh. Without `num_labels` a bare encoder answers with its `pooler_output`, or
with its first token where it has no pooler.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..model.config import EncoderConfig, EnsembleConfig, HiddenActivation, ReadoutConfig, TextStemConfig, all_heads
from .declaration import Architecture, OutProjection, SplitQKV, Weights
from .probe import classes_or_fresh, linear_or_none
from .transformers_common import (
    activation_named,
    head_size,
    metadata_of_classifier,
    require_one_label_per_input,
    require_plain_encoder,
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
        **_common_sizes(found, name),
    )
    rate = found.hidden_dropout_prob if found.classifier_dropout is None else found.classifier_dropout
    readout = _readout(model, num_labels, name, hidden, float(rate), drops_first_token=drops_first_token)
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
        **_common_sizes(found, _DISTILBERT),
    )
    rate = float(found.seq_classif_dropout)
    readout = _readout(model, num_labels, _DISTILBERT, "relu", rate, drops_first_token=False)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _table_sizes(embeddings: Any) -> dict[str, Any]:
    """Sizes of the embedding tables, read off the tables: they may have been resized after loading."""
    return {
        "vocabulary": embeddings.word_embeddings.num_embeddings,
        "positions": embeddings.position_embeddings.num_embeddings,
        "embedding_width": embeddings.word_embeddings.embedding_dim,
    }


def _common_sizes(found: Any, name: str) -> dict[str, Any]:
    """The fields of `EncoderConfig` that all families read from the same place."""
    require_plain_encoder(found, name)
    return {
        "width": int(found.hidden_size),
        "layers": int(found.num_hidden_layers),
        "heads": int(found.num_attention_heads),
        "head_dim": head_size(found, name),
        "norm_first": False,
    }


def _readout(
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


def _declare(
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


ARCHITECTURES: tuple[Architecture, ...] = (
    *_declare(_BERT, "bert", _bert_config, _bert_weights, "Bert"),
    *_declare(_ROBERTA, "roberta", _roberta_config, _bert_weights, "Roberta"),
    *_declare(_DISTILBERT, "distilbert", _distilbert_config, _distilbert_weights, "DistilBert"),
    *_declare(_ELECTRA, "electra", _electra_config, _bert_weights, "Electra"),
)
