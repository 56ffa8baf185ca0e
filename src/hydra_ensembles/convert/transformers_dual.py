"""transformers with two towers: CLIP, MetaCLIP 2, SigLIP and SigLIP 2; towers alone, classifiers, dual encoders.

A projection is declared as the tower's classifier, since a tower on its own returns its outputs; for a dual encoder it
is separated again.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EnsembleConfig, ReadoutConfig
from . import core
from .core import Architecture, DualArchitecture, NamedTensors, Weights, attention, below, block, either, run
from .transformers import metadata_of_classifier, patch_stem, read_classes, read_encoder
from .transformers_text import text_stem

# --- CLIP and MetaCLIP 2 ---------------------------------------------------------------------------------------------

_FAMILIES = ("clip.modeling_clip.CLIP", "metaclip_2.modeling_metaclip_2.MetaClip2")
_LEGACY_EOS = 2  # configurations with this id pool at the highest id of the vocabulary instead

_LAYER = block(
    ("self_attn.out_proj", *(f"self_attn.{part}_proj.*" for part in "qkv")),
    ("layer_norm1", "layer_norm2"),
    ("mlp.fc1", "mlp.fc2"),
)
_LAYERS = below("encoder.layers.{i}.", _LAYER)
_CLIP_IMAGE_TOWER: Weights = {
    "stem.patch": "embeddings.patch_embedding.weight",
    "stem.class_token": "embeddings.class_embedding",
    "stem.position": "embeddings.position_embedding.weight",
    "stem.norm": "pre_layrnorm",
    **_LAYERS,
    "readout.norm": "post_layernorm",
}
_CLIP_TEXT_TOWER: Weights = {
    "stem.words": "embeddings.token_embedding.weight",
    "stem.positions": "embeddings.position_embedding.weight",
    **_LAYERS,
    "readout.norm": "final_layer_norm",
}
# A tower is at the top level, or (in a dual encoder, with a projection, or in older releases) under a prefix.
_CLIP_IMAGE_WEIGHTS: Weights = {
    **either(_CLIP_IMAGE_TOWER, below("vision_model.", _CLIP_IMAGE_TOWER)),
    "readout.classifier": ("visual_projection", "classifier"),
}
_CLIP_TEXT_WEIGHTS: Weights = {
    **either(_CLIP_TEXT_TOWER, below("text_model.", _CLIP_TEXT_TOWER)),
    "readout.classifier": "text_projection",
}


def _clip_classes(*names: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{family}{name}" for family in _FAMILIES for name in names)


def _clip_image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = getattr(model.config, "vision_config", model.config)
    stem = patch_stem(config, "bicubic", patch_bias=False, norm=True, norm_eps=float(config.layer_norm_eps))
    encoder = read_encoder(config)
    readout = _clip_readout(getattr(model, "visual_projection", None), config, num_labels)
    if hasattr(model, "classifier"):  # it reads the mean of the patches, before the final norm
        classes, bias = read_classes(model, model.classifier, num_labels)
        readout = replace(readout, pool="mean", norm="none", num_classes=classes, bias=bias)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _clip_text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = getattr(model.config, "text_config", model.config)
    tables = getattr(model, "text_model", model).embeddings
    stem = text_stem(tables.token_embedding, tables.position_embedding, norm=False)
    encoder = read_encoder(config, causal=True)
    end, words = config.eos_token_id, tables.token_embedding.num_embeddings
    if not isinstance(end, int) or not 0 <= end < words:
        problem = f"its eos_token_id, at which texts are read, is {end!r}, but the vocabulary has {words} tokens"
        raise ConversionError(f"{problem}; set that of its tokenizer in the configuration, and build the model anew")
    readout = replace(
        _clip_readout(getattr(model, "text_projection", None), config, num_labels),
        pool="eot",
        eot_token=None if end == _LEGACY_EOS and type(model).__name__.startswith("CLIP") else end,
        norm="tokens",
    )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _clip_readout(projection: nn.Linear | None, config: Any, num_labels: int | None) -> ReadoutConfig:
    return ReadoutConfig(
        num_classes=core.number_of_classes(0 if projection is None else projection.out_features, num_labels),
        norm="pooled",
        norm_eps=float(config.layer_norm_eps),
        bias=projection is None or projection.bias is not None,
    )


def _answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    output = run(model, **inputs)
    answers = (getattr(output, name, None) for name in ("logits", "image_embeds", "text_embeds", "pooler_output"))
    return next(answer for answer in answers if answer is not None)


def _clip_dual_answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    with core.named_outputs(model):
        output = model.get_image_features(**inputs) if "pixel_values" in inputs else model.get_text_features(**inputs)
    return output if isinstance(output, Tensor) else output.pooler_output  # releases of transformers 5 differ


_CLIP_IMAGES = Architecture(
    name="transformers CLIP image tower",
    classes=_clip_classes("VisionModel", "VisionModelWithProjection"),
    config=_clip_image_config,
    weights=_CLIP_IMAGE_WEIGHTS,
    answer=_answer,
)
_CLIP_CLASSIFIER = Architecture(
    name="transformers CLIP image tower with classifier",
    classes=_clip_classes("ForImageClassification"),
    config=_clip_image_config,
    weights=_CLIP_IMAGE_WEIGHTS,
    ignored=("vision_model.post_layernorm",),
    metadata=metadata_of_classifier,
    answer=_answer,
)
_CLIP_TEXTS = Architecture(
    name="transformers CLIP text tower",
    classes=_clip_classes("TextModel", "TextModelWithProjection"),
    config=_clip_text_config,
    weights=_CLIP_TEXT_WEIGHTS,
    answer=_answer,
)
# In the dual encoder both towers are attributes of the model; each declaration ignores tensors of the other.
_CLIP_CLASSES = _clip_classes("Model")
_CLIP_UNREAD_BY_IMAGES = ("text_model.", "text_projection.", "logit_scale", "vision_model.embeddings.position_ids")
_CLIP_UNREAD_BY_TEXTS = ("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids")
_CLIP_DUAL = DualArchitecture(
    name="transformers CLIP and MetaCLIP 2",
    classes=_CLIP_CLASSES,
    image=(
        ("", replace(_CLIP_IMAGES, classes=_CLIP_CLASSES, ignored=_CLIP_UNREAD_BY_IMAGES, answer=_clip_dual_answer)),
    ),
    text=(("", replace(_CLIP_TEXTS, classes=_CLIP_CLASSES, ignored=_CLIP_UNREAD_BY_TEXTS, answer=_clip_dual_answer)),),
)


# --- SigLIP and SigLIP 2 ---------------------------------------------------------------------------------------------

_SIGLIP_MODULE = "transformers.models.siglip.modeling_siglip.Siglip"

_SIGLIP_IMAGE_TOWER: Weights = {
    **_CLIP_IMAGE_TOWER,
    "stem.patch_bias": "embeddings.patch_embedding.bias",
    "readout.map.query_token": "head.probe",
    **attention("head.attention.out_proj", "head.attention.in_proj_*", place=core.POOLING),
    "readout.map.norm": "head.layernorm",
    "readout.map.up": "head.mlp.fc1",
    "readout.map.down": "head.mlp.fc2",
}
_SIGLIP_TEXT_TOWER: Weights = {**_CLIP_TEXT_TOWER, "readout.classifier": "head"}


def _siglip_image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    config = getattr(model.config, "vision_config", model.config)
    stem = patch_stem(config, "bicubic", class_token=False, position_prefix=0)
    encoder = read_encoder(config)
    if hasattr(model, "classifier"):  # it reads the mean of the patches: attention pooling is not used
        classes, bias = read_classes(model, model.classifier, num_labels)
        mean = ReadoutConfig(pool="mean", num_classes=classes, norm_eps=encoder.norm_eps, bias=bias)
        return EnsembleConfig(stem, encoder, mean, encoder.all_heads())
    if not getattr(config, "vision_use_head", True):
        raise core.refuse("it has no attention pooling for images (vision_use_head), so it has no features")
    readout = ReadoutConfig(
        pool="map",
        num_classes=core.number_of_classes(0, num_labels),
        norm_eps=encoder.norm_eps,
        map_heads=encoder.heads,
        map_mlp_width=encoder.mlp_width,
        map_activation=core.activation_of(config.hidden_act),
    )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _siglip_text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """The text tower pools the token at the last position, which is padding in all but the longest texts."""
    model = getattr(model, "text_model", model)  # releases of transformers 5 differ, here and in their classes
    config = model.config
    stem = text_stem(model.embeddings.token_embedding, model.embeddings.position_embedding, norm=False)
    encoder = read_encoder(config)
    classes = core.number_of_classes(model.head.out_features, num_labels)
    bias = model.head.bias is not None
    readout = ReadoutConfig(pool="final", num_classes=classes, norm_eps=encoder.norm_eps, bias=bias)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


_SIGLIP_IMAGES = Architecture(
    name="transformers SigLIP image tower",
    classes=(f"{_SIGLIP_MODULE}VisionModel", f"{_SIGLIP_MODULE}VisionTransformer"),
    config=_siglip_image_config,
    weights=either(_SIGLIP_IMAGE_TOWER, below("vision_model.", _SIGLIP_IMAGE_TOWER)),
    answer=_answer,
)
_SIGLIP_CLASSIFIER = Architecture(
    name="transformers SigLIP classifier",
    classes=(f"{_SIGLIP_MODULE}ForImageClassification",),
    config=_siglip_image_config,
    weights={**below("vision_model.", _SIGLIP_IMAGE_TOWER), "readout.classifier": "classifier"},
    ignored=("vision_model.head.",),
    metadata=metadata_of_classifier,
    answer=_answer,
)
_SIGLIP_TEXTS = Architecture(
    name="transformers SigLIP text tower",
    classes=(f"{_SIGLIP_MODULE}TextModel", f"{_SIGLIP_MODULE}TextTransformer"),
    config=_siglip_text_config,
    weights=either(_SIGLIP_TEXT_TOWER, below("text_model.", _SIGLIP_TEXT_TOWER)),
    answer=_answer,
    masks=False,
)
_SIGLIP_DUAL = DualArchitecture(
    name="transformers SigLIP",
    classes=(f"{_SIGLIP_MODULE}Model",),
    image=(("vision_model", _SIGLIP_IMAGES),),
    text=(("text_model", _SIGLIP_TEXTS),),
)

ARCHITECTURES: tuple[Architecture, ...] = (
    *(_CLIP_IMAGES, _CLIP_CLASSIFIER, _CLIP_TEXTS),
    *(_SIGLIP_IMAGES, _SIGLIP_CLASSIFIER, _SIGLIP_TEXTS),
)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (_CLIP_DUAL, _SIGLIP_DUAL)
