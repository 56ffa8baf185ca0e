"""CLIP and MetaCLIP 2: the image and text towers of transformers and open_clip, alone and inside a dual encoder.

A projection is declared as the tower's classifier: that is what it is for a tower on its own, and a dual
encoder takes it off again.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .._utils import require
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
from ..preprocessing import ImagePreprocessing
from . import timm
from .core import (
    Architecture,
    Inputs,
    Weights,
    activation_of,
    attention,
    below,
    copied,
    dropout_rate,
    either,
    first_of,
    is_identity,
    named_outputs,
    norm_eps,
    number_of_classes,
    pair,
    qualified_name,
    refuse,
    require_usual_scale,
    run,
    transposed,
)
from .processors import read_open_clip_tokenizer
from .transformers import metadata_of_classifier, patch_stem, read_classes, read_encoder


@dataclass(frozen=True)
class DualArchitecture:
    """A foreign dual encoder, declared: its classes, and for each tower where it may lie and what it may be there.

    The place is empty for a tower whose parts lie in the model itself, beside those of the other tower.
    """

    name: str
    classes: tuple[str, ...]
    image: tuple[tuple[str, Architecture], ...]
    text: tuple[tuple[str, Architecture], ...]


# --- transformers --------------------------------------------------------------------------------------------

_HF_IMAGE = "transformers CLIP image tower"
_HF_TEXT = "transformers CLIP text tower"
_FAMILIES = ("clip.modeling_clip.CLIP", "metaclip_2.modeling_metaclip_2.MetaClip2")
_LEGACY_EOS = 2  # configurations with this id pool at the highest id of the vocabulary instead

HF_LAYERS: Weights = below(
    "encoder.layers.{i}.",
    {
        **attention("self_attn.out_proj", *(f"self_attn.{part}_proj.*" for part in "qkv")),
        "encoder.layers.{i}.norm1": "layer_norm1",
        "encoder.layers.{i}.norm2": "layer_norm2",
        "encoder.layers.{i}.mlp.up": "mlp.fc1",
        "encoder.layers.{i}.mlp.down": "mlp.fc2",
    },
)
_HF_IMAGE_TOWER: Weights = {
    "stem.patch": "embeddings.patch_embedding.weight",
    "stem.class_token": "embeddings.class_embedding",
    "stem.position": "embeddings.position_embedding.weight",
    "stem.norm": "pre_layrnorm",
    **HF_LAYERS,
    "readout.norm": "post_layernorm",
}
_HF_TEXT_TOWER: Weights = {
    "stem.words": "embeddings.token_embedding.weight",
    "stem.positions": "embeddings.position_embedding.weight",
    **HF_LAYERS,
    "readout.norm": "final_layer_norm",
}
# A tower lies at the top, or (in a dual encoder, with a projection, and alone in older releases) under a prefix.
_HF_IMAGE_WEIGHTS: Weights = {
    **either(_HF_IMAGE_TOWER, below("vision_model.", _HF_IMAGE_TOWER)),
    "readout.classifier": ("visual_projection", "classifier"),
}
_HF_TEXT_WEIGHTS: Weights = {
    **either(_HF_TEXT_TOWER, below("text_model.", _HF_TEXT_TOWER)),
    "readout.classifier": "text_projection",
}


def _classes(*names: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{family}{name}" for family in _FAMILIES for name in names)


def _hf_image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "vision_config", model.config)
    stem = patch_stem(found, "bicubic", patch_bias=False, norm=True, norm_eps=float(found.layer_norm_eps))
    encoder = read_encoder(found, _HF_IMAGE, attention_dropout=float(found.attention_dropout))
    readout = _hf_readout(getattr(model, "visual_projection", None), found, num_labels, _HF_IMAGE)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _hf_classifier_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """`CLIPForImageClassification` reads the mean patch, before the final norm."""
    config = _hf_image_config(model, num_labels)
    classes, bias = read_classes(model, model.classifier, num_labels, _HF_IMAGE)
    return replace(config, readout=replace(config.readout, pool="mean", norm="none", num_classes=classes, bias=bias))


def _hf_text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "text_config", model.config)
    stem = TextStemConfig(
        vocabulary=int(found.vocab_size),
        positions=int(found.max_position_embeddings),
        embedding_width=int(found.hidden_size),
        norm=False,
    )
    encoder = read_encoder(found, _HF_TEXT, causal=True, attention_dropout=float(found.attention_dropout))
    end = int(found.eos_token_id)
    readout = replace(
        _hf_readout(getattr(model, "text_projection", None), found, num_labels, _HF_TEXT),
        pool="eot",
        eot_token=None if end == _LEGACY_EOS and type(model).__name__.startswith("CLIP") else end,
        norm="tokens",
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _hf_readout(projection: nn.Linear | None, found: Any, num_labels: int | None, name: str) -> ReadoutConfig:
    return ReadoutConfig(
        num_classes=number_of_classes(0 if projection is None else projection.out_features, num_labels, name),
        norm="pooled",
        norm_eps=float(found.layer_norm_eps),
        bias=projection is None or projection.bias is not None,
    )


def _hf_answer(model: Any, inputs: Inputs, fresh: bool) -> Tensor:
    output = run(model, **inputs)
    answers = (getattr(output, name, None) for name in ("logits", "image_embeds", "text_embeds", "pooler_output"))
    return next(answer for answer in answers if answer is not None)


def _hf_dual_answer(model: Any, inputs: Inputs, fresh: bool) -> Tensor:
    with named_outputs(model):
        output = model.get_image_features(**inputs) if "pixel_values" in inputs else model.get_text_features(**inputs)
    return output if isinstance(output, Tensor) else output.pooler_output  # releases of transformers 5 differ


_HF_IMAGES = Architecture(
    name=_HF_IMAGE,
    classes=_classes("VisionModel", "VisionModelWithProjection"),
    config=_hf_image_config,
    weights=_HF_IMAGE_WEIGHTS,
    answer=_hf_answer,
)
_HF_CLASSIFIER = Architecture(
    name=f"{_HF_IMAGE} with classifier",
    classes=_classes("ForImageClassification"),
    config=_hf_classifier_config,
    weights=_HF_IMAGE_WEIGHTS,
    ignored=("vision_model.post_layernorm",),
    metadata=metadata_of_classifier,
    answer=_hf_answer,
)
_HF_TEXTS = Architecture(
    name=_HF_TEXT,
    classes=_classes("TextModel", "TextModelWithProjection"),
    config=_hf_text_config,
    weights=_HF_TEXT_WEIGHTS,
    answer=_hf_answer,
)
# In the dual encoder the two towers lie side by side; each ignores what belongs to the other.
_HF_CLASSES = _classes("Model")
_HF_UNREAD_BY_IMAGES = ("text_model.", "text_projection.", "logit_scale", "vision_model.embeddings.position_ids")
_HF_UNREAD_BY_TEXTS = ("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids")
_HF_DUAL = DualArchitecture(
    name="transformers CLIP and MetaCLIP 2",
    classes=_HF_CLASSES,
    image=(("", replace(_HF_IMAGES, classes=_HF_CLASSES, ignored=_HF_UNREAD_BY_IMAGES, answer=_hf_dual_answer)),),
    text=(("", replace(_HF_TEXTS, classes=_HF_CLASSES, ignored=_HF_UNREAD_BY_TEXTS, answer=_hf_dual_answer)),),
)


# --- open_clip -----------------------------------------------------------------------------------------------

_IMAGE = "open_clip image transformer"
_TIMM = "open_clip image tower from timm"
_TEXT = "open_clip text transformer"
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # what open_clip normalises with unless a model says otherwise
_STD = (0.26862954, 0.26130258, 0.27577711)
_VOCABULARY = 49408  # size of the vocabulary that OpenAI's CLIP and its successors share

_LAYERS: Weights = below(
    "transformer.resblocks.{i}.",
    {
        **attention("attn.out_proj", "attn.in_proj_*"),
        "encoder.layers.{i}.norm1": "ln_1",
        "encoder.layers.{i}.attention.query_norm": "attn.ln_q",
        "encoder.layers.{i}.attention.key_norm": "attn.ln_k",
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


_TRUNKS = (timm.VISION_TRANSFORMER, timm.EVA)


def _trunk_variant(model: Any) -> Weights:
    known = next((one for one in _TRUNKS if qualified_name(model.trunk) in one.classes), _TRUNKS[0])
    return below("trunk.", known.variant(model.trunk))


def _timm_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """A tower of open_clip's adapter: a timm model and perhaps a linear projection, its own or timm's."""
    trunk, head = model.trunk, dict(model.head.named_children())
    known = next((one for one in _TRUNKS if qualified_name(trunk) in one.classes), None)
    if known is None:
        raise refuse(_TIMM, f"its trunk is a {qualified_name(trunk)}")
    if head.keys() - {"drop", "proj"}:
        raise refuse(_TIMM, f"its head is made of {sorted(head)}; linear and no projection are supported")
    config = known.config(trunk, None)
    if "proj" not in head:
        classes = number_of_classes(config.readout.num_classes, num_labels, _TIMM)
        return replace(config, readout=replace(config.readout, num_classes=classes))
    dropout = dropout_rate(head.get("drop"))
    if config.readout.num_classes or (dropout and config.readout.dropout):
        raise refuse(_TIMM, "both its trunk and its head project, or have dropout")
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
    vocabulary = int(model.token_embedding.num_embeddings)
    stem = TextStemConfig(vocabulary, positions=int(positions), embedding_width=int(width), norm=False)
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
    first = first_of(blocks, name)  # the others are known to be like it
    if not is_identity(getattr(first, "ln_attn", None)) or not is_identity(getattr(first.mlp, "ln", None)):
        raise refuse(name, "attention or MLP has a norm of its own (scale_attn, scale_fc)")
    extras = ("ln_inner", "head_scale", "logit_scale")
    if not all(is_identity(getattr(first.attn, extra, None)) for extra in extras):
        raise refuse(name, "its attention is scaled (scaled_cosine_attn, scale_heads, scale_attn_inner)")
    if hasattr(first.attn, "scale"):
        require_usual_scale(first.attn, name)
    mlp = first.mlp
    query_norm: Any = getattr(first.attn, "ln_q", None)
    return EncoderConfig(
        width=int(mlp.c_fc.in_features),
        layers=len(blocks),
        heads=int(first.attn.num_heads),
        head_dim=int(first.attn.head_dim),
        mlp_width=int(mlp.c_fc.out_features),
        activation=activation_of(mlp.gelu, name),
        norm_eps=norm_eps(first, name),
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
    preprocessing = ImagePreprocessing(
        size=pair(found.get("size") or model.image_size),
        mean=tuple(float(value) for value in mean),
        std=tuple(float(value) for value in std),
        interpolation="bilinear" if found.get("interpolation") == "bilinear" else "bicubic",
        resize_mode="squash" if mode == "squash" else "shortest",
    )
    return Metadata(preprocessing=preprocessing, preprocessing_from="open_clip's preprocess_cfg of the model")


def _text_metadata(model: Any) -> Metadata:
    """CLIP's own tokenizer, for every text transformer that has its vocabulary."""
    if int(model.token_embedding.num_embeddings) != _VOCABULARY:
        return Metadata()
    tokenizer = require("open_clip", extra="open_clip").tokenizer.SimpleTokenizer(context_length=model.context_length)
    return Metadata(preprocessing=read_open_clip_tokenizer(tokenizer), preprocessing_from="open_clip's own tokenizer")


_IMAGES = Architecture(
    name=_IMAGE,
    classes=("open_clip.transformer.VisionTransformer",),
    config=_image_config,
    weights=_IMAGE_WEIGHTS,
    metadata=_image_metadata,
)
_IMAGES_FROM_TIMM = Architecture(
    name=_TIMM,
    classes=("open_clip.timm_model.TimmModel",),
    config=_timm_config,
    weights={**below("trunk.", timm.VISION_TRANSFORMER.weights), "readout.classifier": ("head.proj", "trunk.head")},
    metadata=_image_metadata,
    variant=_trunk_variant,
)
_TEXTS = Architecture(
    name=_TEXT,
    classes=("open_clip.transformer.TextTransformer",),
    config=_text_config,
    weights=_TEXT_WEIGHTS,
    metadata=_text_metadata,
)
_TEXTS_IN_CLIP = replace(
    _TEXTS,
    classes=("open_clip.model.CLIP",),
    ignored=("visual.", "logit_scale", "logit_bias"),
    answer=lambda model, inputs, fresh: model.encode_text(inputs["input_ids"]),  # type: ignore[operator]
)
_DUAL = DualArchitecture(
    name="open_clip CLIP",
    classes=("open_clip.model.CLIP", "open_clip.model.CustomTextCLIP"),
    image=(("visual", _IMAGES), ("visual", _IMAGES_FROM_TIMM)),
    text=(("text", _TEXTS), ("", _TEXTS_IN_CLIP)),
)

ARCHITECTURES: tuple[Architecture, ...] = (_HF_IMAGES, _HF_CLASSIFIER, _HF_TEXTS, _IMAGES, _IMAGES_FROM_TIMM, _TEXTS)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (_HF_DUAL, _DUAL)
