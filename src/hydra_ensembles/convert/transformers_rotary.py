"""transformers with rotary positions: DINOv3 for images; ModernBERT, Nomic BERT, GTE and Jina embeddings for text."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

from ..model.config import EnsembleConfig, HiddenActivation, NormKind, ReadoutConfig, RotaryConfig
from .core import Architecture, Weights, activation_of, attention, below, either, qkv_by_head, refuse, run
from .transformers import (
    DINO_LAYER,
    READOUT,
    TEXTS,
    declare,
    gated,
    patch_stem,
    read_classes,
    read_encoder,
    text_readout,
    text_stem,
)


def _base(parameters: Any) -> float:
    """Return the base of rotary positions; raise unless they are of the default form."""
    kind = parameters.get("rope_type", "default")
    part = parameters.get("partial_rotary_factor") or 1.0
    if kind != "default" or part != 1.0:
        raise refuse(f"its rotary positions are of the type {kind!r} and rotate a share of {part} of each head")
    return float(parameters["rope_theta"])


# --- images --------------------------------------------------------------------------------------------------

_DINOV3_LAYER: Weights = {
    **DINO_LAYER,
    "encoder.layers.{i}.attention.qkv_bias": (
        qkv_by_head(*(f"attention.{part}_proj.bias" for part in "qkv")),
        qkv_by_head("attention.q_proj.bias", "attention.v_proj.bias"),
    ),
    **gated("mlp.up_proj"),
}


def _dinov3_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = model.config
    registers = int(config.num_register_tokens)
    stem = patch_stem(config, "bicubic", any_size=True, position_prefix=0, registers=registers, learned_positions=False)
    biases = bool(config.query_bias), bool(config.key_bias), bool(config.value_bias)
    encoder = read_encoder(
        config,
        gated=bool(config.use_gated_mlp),
        qkv_bias=biases[0],
        key_bias=biases != (True, False, True),
        out_bias=bool(config.proj_bias),
        mlp_bias=bool(config.mlp_bias),
        layer_scale=True,
        attention_dropout=float(config.attention_dropout),
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


_DINOV3 = Architecture(
    name="transformers DINOv3 encoder",
    classes=("transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTModel",),
    config=_dinov3_config,
    weights={
        "stem.patch": "embeddings.patch_embeddings.weight",
        "stem.patch_bias": "embeddings.patch_embeddings.bias",
        "stem.class_token": "embeddings.cls_token",
        "stem.register_tokens": "embeddings.register_tokens",
        **either(below("model.layer.{i}.", _DINOV3_LAYER), below("layer.{i}.", _DINOV3_LAYER)),  # releases differ
        "readout.norm": "norm",
    },
    ignored=("embeddings.mask_token", "embeddings.register_tokens"),  # empty if there are no registers
    answer=lambda model, inputs, fresh: run(model, **inputs).last_hidden_state[:, 0],
)


# --- text: blocks as in BERT ----------------------------------------------------------------------------------

_ROTARY_BERT: Weights = {
    "stem.words": "embeddings.word_embeddings.weight",
    "stem.segments": "embeddings.token_type_embeddings.weight",
    "stem.norm": "embeddings.LayerNorm",
    **below(
        "layers.{i}.",
        {
            **attention("self_attn.o_proj", *(f"self_attn.{part}_proj.*" for part in "qkv")),
            "encoder.layers.{i}.norm1": "post_attention_layernorm",
            **gated("mlp.fc1"),
            "encoder.layers.{i}.mlp.down": ("mlp.down_proj", "mlp.fc2"),
            "encoder.layers.{i}.norm2": "post_mlp_layernorm",
        },
    ),
}


def _rotary_bert_config(model: Any, num_labels: int | None, drops_first_token: bool = False) -> EnsembleConfig:
    """Nomic BERT, GTE and Jina embeddings, which differ in gates, biases and the readout."""
    config = model.config
    embeddings = model.base_model.embeddings
    layer = model.base_model.layers[0]
    segments = embeddings.token_type_embeddings
    dropout = float(config.hidden_dropout_prob)
    mlp, gated = layer.mlp, hasattr(layer.mlp, "gate_proj")
    stem = text_stem(
        embeddings.word_embeddings,
        int(config.max_position_embeddings),
        segments=0 if segments is None else segments.num_embeddings,
        norm_eps=float(config.layer_norm_eps),
        dropout=dropout,
    )
    encoder = read_encoder(
        config,
        norm_first=False,
        gated=gated,
        qkv_bias=layer.self_attn.q_proj.bias is not None,
        out_bias=layer.self_attn.o_proj.bias is not None,
        mlp_bias=(mlp.down_proj if gated else mlp.fc2).bias is not None,
        up_bias=(mlp.up_proj if gated else mlp.fc1).bias is not None,
        projection_dropout=dropout,
        activation_dropout=dropout if hasattr(mlp, "dropout") else 0.0,
        output_dropout=dropout,
        rotary=RotaryConfig(_base(config.rope_parameters)),
    )
    rate = dropout if config.classifier_dropout is None else float(config.classifier_dropout)
    readout = text_readout(model, num_labels, "tanh", rate, drops_first_token)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


# --- text: ModernBERT ----------------------------------------------------------------------------------------

_MODERNBERT: Weights = {
    "stem.words": "embeddings.tok_embeddings.weight",
    "stem.norm": "embeddings.norm",
    **below(
        "layers.{i}.",
        {
            **attention("attn.Wo", "attn.Wqkv.*"),
            "encoder.layers.{i}.norm1": "attn_norm",
            "encoder.layers.{i}.mlp.up": "mlp.Wi",
            "encoder.layers.{i}.mlp.down": "mlp.Wo",
            "encoder.layers.{i}.norm2": "mlp_norm",
        },
    ),
    "readout.norm": "final_norm",
}


def _modernbert_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = model.config
    eps = float(model.config.norm_eps)
    kind: NormKind = "layer" if config.norm_bias else "layer_no_bias"
    local = tuple(layer_type == "sliding_attention" for layer_type in config.layer_types)
    base, local_base = (_base(config.rope_parameters[f"{reach}_attention"]) for reach in ("full", "sliding"))
    tables = model.base_model.embeddings.tok_embeddings, int(config.max_position_embeddings)
    stem = text_stem(*tables, norm_eps=eps, norm_kind=kind, dropout=float(config.embedding_dropout))
    encoder = read_encoder(
        config,
        activation=activation_of(config.hidden_activation),
        gated=True,
        norm=kind,
        norm_eps=eps,
        first_norm=False,
        qkv_bias=bool(config.attention_bias),
        out_bias=bool(config.attention_bias),
        mlp_bias=bool(config.mlp_bias),
        attention_dropout=float(config.attention_dropout),
        projection_dropout=float(config.attention_dropout),
        activation_dropout=float(config.mlp_dropout),
        rotary=RotaryConfig(base, local_base=local_base),
        local=local,
        window=int(config.local_attention) // 2 if any(local) else None,
    )
    classes, bias = read_classes(model, getattr(model, "classifier", None), num_labels)
    readout = ReadoutConfig(num_classes=classes, norm_eps=eps, bias=bias)
    if getattr(model, "head", None) is not None:
        hidden = cast(HiddenActivation, config.classifier_activation)
        if hidden not in ("tanh", "relu", "gelu"):
            raise refuse(f"its classifier has the activation {hidden!r}")
        readout = replace(
            readout,
            pool=config.classifier_pooling,
            hidden=hidden,
            hidden_bias=bool(config.classifier_bias),
            hidden_norm=True,
            hidden_dropout=float(config.classifier_dropout),
        )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


_MODERNBERT_HEAD: Weights = {**READOUT, "readout.hidden": "head.dense", "readout.hidden_norm": "head.norm"}
_ROBERTA_HEAD = partial(_rotary_bert_config, drops_first_token=True)
_NOMIC, _GTE = ({**READOUT, "readout.hidden": (f"{key}.pooler.dense", "pooler.dense")} for key in ("nomic_bert", "gte"))

ARCHITECTURES: tuple[Architecture, ...] = (
    _DINOV3,
    *declare(
        "ModernBERT", "ModernBert", _modernbert_config, _MODERNBERT, TEXTS, inside="model", readout=_MODERNBERT_HEAD
    ),
    *declare("Nomic BERT", "NomicBert", _rotary_bert_config, _ROTARY_BERT, TEXTS, module="nomic_bert", readout=_NOMIC),
    *declare("GTE", "Gte", _rotary_bert_config, _ROTARY_BERT, TEXTS, readout=_GTE),
    *declare(
        "Jina embeddings",
        "JinaEmbeddingsV3",
        _ROBERTA_HEAD,
        _ROTARY_BERT,
        TEXTS,
        module="jina_embeddings_v3",
        inside="roberta",
    ),
)
