"""open_clip: its image and text transformers, alone and inside `CLIP` or `CustomTextCLIP`, and CLIP's tokenizer.

A projection is declared as the tower's classifier: that is what it is for a tower on its own, and a dual
encoder takes it off again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .._utils import require
from ..errors import ConversionError
from ..model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    Pool,
    ReadoutConfig,
    TextStemConfig,
    all_heads,
)
from ..model.metadata import Metadata
from ..preprocessing import ImagePreprocessing, TextCleaning, TextPreprocessing
from . import timm
from .core import (
    Architecture,
    Weights,
    activation_of,
    below,
    copied,
    dropout_rate,
    fused_qkv,
    is_identity,
    number_of_classes,
    out_projection,
    pair,
    qualified_name,
    refuse,
    transposed,
)

_IMAGE = "open_clip image transformer"
_TIMM = "open_clip image tower from timm"
_TEXT = "open_clip text transformer"
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # what open_clip normalises with unless a model says otherwise
_STD = (0.26862954, 0.26130258, 0.27577711)


_LAYERS: Weights = below(
    "transformer.resblocks.{i}.",
    {
        "encoder.layers.{i}.norm1": "ln_1",
        "encoder.layers.{i}.attention.qkv": fused_qkv("attn.in_proj_weight"),
        "encoder.layers.{i}.attention.qkv_bias": fused_qkv("attn.in_proj_bias"),
        "encoder.layers.{i}.attention.query_norm": "attn.ln_q",
        "encoder.layers.{i}.attention.key_norm": "attn.ln_k",
        "encoder.layers.{i}.attention.out": out_projection("attn.out_proj.weight"),
        "encoder.layers.{i}.attention.out_bias": "attn.out_proj.bias",
        "encoder.layers.{i}.attention.scale": "ls_1.gamma",
        "encoder.layers.{i}.norm2": "ln_2",
        "encoder.layers.{i}.mlp.up": "mlp.c_fc",
        "encoder.layers.{i}.mlp.down": "mlp.c_proj",
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
    "readout.classifier.weight": transposed("proj"),
}
_TEXT_WEIGHTS: Weights = {
    "stem.words": "token_embedding.weight",
    "stem.positions": "positional_embedding",
    **_LAYERS,
    "readout.norm": "ln_final",
    "readout.classifier.weight": (transposed("text_projection"), copied("text_projection.weight")),
    "readout.classifier.bias": "text_projection.bias",
}


def _image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    if model.attn_pool is not None:
        raise refuse(_IMAGE, "it pools by attention (attentional_pool)")
    if not is_identity(model.patch_dropout):
        raise refuse(_IMAGE, "it drops patches in training (patch_dropout)")
    pools: dict[str, Pool] = {"tok": "cls", "avg": "mean"}
    if model.pool_type not in pools or model.output_tokens:
        raise refuse(_IMAGE, f"pool_type is {model.pool_type!r}, output_tokens {model.output_tokens}")
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
    encoder = _encoder(model.transformer, _IMAGE, causal=False)
    classes = 0 if model.proj is None else int(model.proj.shape[1])
    readout = ReadoutConfig(
        pool=pools[model.pool_type],
        num_classes=number_of_classes(classes, num_labels, _IMAGE),
        norm="pooled" if model.final_ln_after_pool else "tokens",
        norm_eps=float(model.ln_post.eps),
        bias=model.proj is None,
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _timm_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """A tower of open_clip's adapter: a timm model and perhaps a linear projection, its own or timm's."""
    trunk, head = model.trunk, dict(model.head.named_children())
    if qualified_name(trunk) not in timm.VISION_TRANSFORMER.classes:
        raise refuse(_TIMM, f"its trunk is a {qualified_name(trunk)}")
    if head.keys() - {"drop", "proj"}:
        raise refuse(_TIMM, f"its head is made of {sorted(head)}; linear and no projection are supported")
    config = timm.VISION_TRANSFORMER.config(trunk, None)
    if "proj" not in head:
        classes = number_of_classes(config.readout.num_classes, num_labels, _TIMM)
        return replace(config, readout=replace(config.readout, num_classes=classes))
    if config.readout.num_classes:
        raise refuse(_TIMM, "both its trunk and its head project")
    dropout = dropout_rate(head.get("drop"))
    if dropout and config.readout.dropout:
        raise refuse(_TIMM, "both its trunk and its head have dropout")
    readout = replace(
        config.readout,
        num_classes=number_of_classes(int(head["proj"].out_features), num_labels, _TIMM),
        bias=head["proj"].bias is not None,
        dropout=dropout or config.readout.dropout,
    )
    return replace(config, readout=readout)


def _text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """A `TextTransformer`, or a `CLIP`, which carries the parts of one itself."""
    positions, width = model.positional_embedding.shape
    if getattr(model, "cls_emb", None) is not None or positions != model.context_length:
        raise refuse(_TEXT, "a class token is appended to the text (embed_cls)")
    if getattr(model, "use_pad_mask", False) or getattr(model, "output_tokens", False):
        raise refuse(_TEXT, "it masks padding by itself, or answers with tokens (use_pad_mask, output_tokens)")
    pool = getattr(model, "text_pool_type", None) or model.pool_type
    pools: dict[str, Pool] = {"first": "cls", "last": "last", "argmax": "eot", "eos": "eot"}
    if pool not in pools:
        raise refuse(_TEXT, f"pool_type is {pool!r}")
    end = model.text_eos_id if hasattr(model, "text_eos_id") else model.eos_id
    stem = TextStemConfig(
        vocabulary=int(model.token_embedding.num_embeddings),
        positions=int(positions),
        embedding_width=int(width),
        norm=False,
    )
    encoder = _encoder(model.transformer, _TEXT, causal=model.attn_mask is not None)
    projection = model.text_projection
    linear = isinstance(projection, nn.Linear)
    found = 0 if projection is None else int(projection.out_features if linear else projection.shape[1])
    readout = ReadoutConfig(
        pool=pools[pool],
        num_classes=number_of_classes(found, num_labels, _TEXT),
        norm="tokens",
        norm_eps=float(model.ln_final.eps),
        bias=projection is None or (linear and projection.bias is not None),
        eot_token=int(end) if pool == "eos" else None,
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _encoder(transformer: Any, name: str, causal: bool) -> EncoderConfig:
    blocks = list(transformer.resblocks)
    first = blocks[0]
    for block in blocks:
        if type(block).__name__ not in ("ResidualAttentionBlock", "CustomResidualAttentionBlock"):
            raise refuse(name, f"a block is a {type(block).__name__}")
        if not is_identity(getattr(block, "ln_attn", None)) or not is_identity(getattr(block.mlp, "ln", None)):
            raise refuse(name, "attention or MLP has a norm of its own (scale_attn, scale_fc)")
        extras = ("ln_inner", "head_scale", "logit_scale")
        if not all(is_identity(getattr(block.attn, extra, None)) for extra in extras):
            raise refuse(name, "its attention is scaled (scaled_cosine_attn, scale_heads, scale_attn_inner)")
    attention, mlp = first.attn, first.mlp
    query_norm: Any = getattr(attention, "ln_q", None)
    if not is_identity(query_norm) and query_norm.eps != first.ln_1.eps:
        raise refuse(name, f"its norms differ in eps ({query_norm.eps} and {first.ln_1.eps})")
    return EncoderConfig(
        width=int(mlp.c_fc.in_features),
        layers=len(blocks),
        heads=int(attention.num_heads),
        head_dim=int(attention.head_dim),
        mlp_width=int(mlp.c_fc.out_features),
        activation=activation_of(mlp.gelu, name),
        norm_eps=float(first.ln_1.eps),
        qk_norm=not is_identity(query_norm),
        layer_scale=not is_identity(first.ls_1),
        causal=causal,
    )


def _image_metadata(model: Any) -> Metadata:
    """The transform open_clip itself would use; unknown where it pads images, which has no canonical form."""
    found: dict[str, Any] = dict(getattr(model, "preprocess_cfg", None) or {})
    mode = found.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        return Metadata()
    mean = found.get("mean") or getattr(model, "image_mean", None) or _MEAN
    std = found.get("std") or getattr(model, "image_std", None) or _STD
    return Metadata(
        preprocessing=ImagePreprocessing(
            size=pair(found.get("size") or model.image_size),
            mean=tuple(float(value) for value in mean),
            std=tuple(float(value) for value in std),
            interpolation="bilinear" if found.get("interpolation") == "bilinear" else "bicubic",
            resize_mode="squash" if mode == "squash" else "shortest",
        )
    )


def _text_metadata(model: Any) -> Metadata:
    """CLIP's own tokenizer, for every text transformer that has its vocabulary."""
    if int(model.token_embedding.num_embeddings) != VOCABULARY:
        return Metadata()
    tokenizer = require("open_clip", extra="open_clip").tokenizer
    return Metadata(preprocessing=read_simple_tokenizer(tokenizer.SimpleTokenizer(context_length=model.context_length)))


IMAGE = Architecture(
    name=_IMAGE,
    classes=("open_clip.transformer.VisionTransformer",),
    config=_image_config,
    weights=_IMAGE_WEIGHTS,
    metadata=_image_metadata,
)
IMAGE_FROM_TIMM = Architecture(
    name=_TIMM,
    classes=("open_clip.timm_model.TimmModel",),
    config=_timm_config,
    weights={**below("trunk.", timm.VISION_TRANSFORMER.weights), "readout.classifier": ("head.proj", "trunk.head")},
    metadata=_image_metadata,
)
TEXT = Architecture(
    name=_TEXT,
    classes=("open_clip.transformer.TextTransformer",),
    config=_text_config,
    weights=_TEXT_WEIGHTS,
    metadata=_text_metadata,
)
TEXT_IN_DUAL = replace(TEXT, classes=("open_clip.model.CLIP",), ignored=("visual.", "logit_scale", "logit_bias"))
ARCHITECTURES: tuple[Architecture, ...] = (IMAGE, IMAGE_FROM_TIMM, TEXT)


# --- CLIP's tokenizer ----------------------------------------------------------------------------------------

SIMPLE_TOKENIZER = "open_clip.tokenizer.SimpleTokenizer"
VOCABULARY = 49408  # size of the vocabulary that OpenAI's CLIP and its successors share
PADDING_ID = 0

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLEANINGS: dict[str, TextCleaning] = {
    "_clean_lower": "lower",
    "_clean_whitespace": "whitespace",
    "_clean_canonicalize": "canonicalize",
}


def read_simple_tokenizer(tokenizer: Any) -> TextPreprocessing:
    """Our description of open_clip's `SimpleTokenizer`.

    Texts are cleaned as `hydra_ensembles.preprocessing.clean_text` says, which is what open_clip does except for the
    repair of mojibake; they are cut to the context length with the end token kept, and padded with zeros.
    """
    if qualified_name(tokenizer) != SIMPLE_TOKENIZER:
        raise ConversionError(f"expected open_clip's SimpleTokenizer, got a {qualified_name(tokenizer)}")
    cleaning = _CLEANINGS.get(tokenizer.clean_fn.__name__)
    if cleaning is None or tokenizer.reduction_fn is not None:
        raise ConversionError(
            f"this SimpleTokenizer cleans with {tokenizer.clean_fn.__name__} and has the reduction "
            f"{tokenizer.reduction_fn}; supported are {sorted(_CLEANINGS)} without reduction"
        )
    vocabulary, length = dict(tokenizer.encoder), int(tokenizer.context_length)
    names = {index: token for token, index in vocabulary.items()}
    special = [names[index] for index in tokenizer.all_special_ids]
    content = clip_tokenizer_json(
        vocabulary, list(tokenizer.bpe_ranks), special, length, lower=cleaning != "whitespace"
    )
    return TextPreprocessing(
        max_length=length,
        pad_id=PADDING_ID,
        pad_token=names[PADDING_ID],
        pad_to_max=True,
        attention_mask=False,
        cleaning=cleaning,
        tokenizer=content,
    )


def clip_tokenizer_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    context_length: int,
    lower: bool = True,
) -> str:
    """The content of a `tokenizer.json`.

    The normalizers in it (Unicode normalisation, white space, lower case) serve whoever reads the file
    without this library; `TextPreprocessing` cleans more thoroughly before, and lower-cases a Greek sigma at
    the end of a word as Python does.

    Args:
        vocabulary: Token → id; a token that ends a word carries the suffix `</w>`.
        merges: Pairs of tokens, in the order in which they are merged.
        special: Special tokens: start of text, end of text, further ones.
        context_length: Length that texts are cut and padded to.
        lower: Whether texts are lower-cased.
    """
    start, end = special[0], special[1]
    normalizers: list[dict[str, Any]] = [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "</w>",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": dict(vocabulary),
        "merges": [" ".join(pair) for pair in merges],
    }
    template: list[dict[str, Any]] = [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": end, "type_id": 0}},
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": context_length,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": context_length},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": PADDING_ID,
            "pad_type_id": 0,
            "pad_token": next(token for token, index in vocabulary.items() if index == PADDING_ID),
        },
        "added_tokens": [{"id": vocabulary[token], "content": token, **added} for token in special],
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, *([{"type": "Lowercase"}] if lower else [])]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 0}}, template[-1]],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (start, end)
            },
        },
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
