"""CLIP: the towers of transformers, and dual encoders of transformers and open_clip with both towers translated.

A projection is declared as the tower's classifier: that is what it is for a tower on its own, and a dual
encoder takes it off again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import ConversionError
from ..model.clip import DualEncoder
from ..model.config import EnsembleConfig, PatchStemConfig, ReadoutConfig, TextStemConfig, all_heads
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear
from ..model.stem_readout import Projections, linear
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from . import open_clip
from .core import (
    Architecture,
    Weights,
    alternatives,
    below,
    number_of_classes,
    out_projection,
    pair,
    qualified_name,
    require_finite,
    require_nothing_left,
    split_qkv,
    translate,
)
from .processors import read_processor
from .transformers import metadata_of_classifier, read_classes, read_encoder

# --- the towers of transformers ------------------------------------------------------------------------------

_IMAGE = "transformers CLIP image tower"
_TEXT = "transformers CLIP text tower"
_MODULE = "transformers.models.clip.modeling_clip"
_LEGACY_EOS = 2  # configurations with this id pool at the highest id of the vocabulary instead

_LAYERS: Weights = below(
    "encoder.layers.{i}.",
    {
        "encoder.layers.{i}.norm1": "layer_norm1",
        "encoder.layers.{i}.attention.qkv": split_qkv(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
        "encoder.layers.{i}.attention.qkv_bias": split_qkv(*(f"self_attn.{part}_proj.bias" for part in "qkv")),
        "encoder.layers.{i}.attention.out": out_projection("self_attn.out_proj.weight"),
        "encoder.layers.{i}.attention.out_bias": "self_attn.out_proj.bias",
        "encoder.layers.{i}.norm2": "layer_norm2",
        "encoder.layers.{i}.mlp.up": "mlp.fc1",
        "encoder.layers.{i}.mlp.down": "mlp.fc2",
    },
)
_IMAGE_TOWER: Weights = {
    "stem.patch": "embeddings.patch_embedding.weight",
    "stem.class_token": "embeddings.class_embedding",
    "stem.position": "embeddings.position_embedding.weight",
    "stem.norm": "pre_layrnorm",
    **_LAYERS,
    "readout.norm": "post_layernorm",
}
_TEXT_TOWER: Weights = {
    "stem.words": "embeddings.token_embedding.weight",
    "stem.positions": "embeddings.position_embedding.weight",
    **_LAYERS,
    "readout.norm": "final_layer_norm",
}


def _both_spellings(prefix: str, tower: Weights, *classifiers: str) -> Weights:
    """A tower whose tensors lie at the top, or (in a dual encoder, and alone in older releases) under a prefix."""
    nested = below(prefix, tower)
    names = {name: (*alternatives(entry), *alternatives(nested[name])) for name, entry in tower.items()}
    return {**names, "readout.classifier": classifiers}


_IMAGE_WEIGHTS = _both_spellings("vision_model.", _IMAGE_TOWER, "visual_projection", "classifier")
_TEXT_WEIGHTS = _both_spellings("text_model.", _TEXT_TOWER, "text_projection")


def _image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "vision_config", model.config)
    patch, image = pair(found.patch_size), pair(found.image_size)
    stem = PatchStemConfig(
        patch_size=patch,
        grid=(image[0] // patch[0], image[1] // patch[1]),
        channels=int(found.num_channels),
        patch_bias=False,
        resample="bicubic",
        norm=True,
        norm_eps=float(found.layer_norm_eps),
    )
    encoder = read_encoder(found, _IMAGE, attention_dropout=float(found.attention_dropout))
    readout = _readout(getattr(model, "visual_projection", None), found, num_labels, _IMAGE)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "text_config", model.config)
    stem = TextStemConfig(
        vocabulary=int(found.vocab_size),
        positions=int(found.max_position_embeddings),
        embedding_width=int(found.hidden_size),
        norm=False,
    )
    encoder = read_encoder(found, _TEXT, causal=True, attention_dropout=float(found.attention_dropout))
    end = int(found.eos_token_id)
    readout = replace(
        _readout(getattr(model, "text_projection", None), found, num_labels, _TEXT),
        pool="eot",
        eot_token=None if end == _LEGACY_EOS else end,
        norm="tokens",
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _classifier_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """`CLIPForImageClassification` reads the mean patch, before the final norm."""
    config = _image_config(model, num_labels)
    classes, bias = read_classes(model, model.classifier, num_labels, _IMAGE)
    return replace(config, readout=replace(config.readout, pool="mean", norm="none", num_classes=classes, bias=bias))


def _readout(projection: nn.Linear | None, found: Any, num_labels: int | None, name: str) -> ReadoutConfig:
    return ReadoutConfig(
        num_classes=number_of_classes(0 if projection is None else projection.out_features, num_labels, name),
        norm="pooled",
        norm_eps=float(found.layer_norm_eps),
        bias=projection is None or projection.bias is not None,
    )


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name=_IMAGE,
        classes=(f"{_MODULE}.CLIPVisionModel", f"{_MODULE}.CLIPVisionModelWithProjection"),
        config=_image_config,
        weights=_IMAGE_WEIGHTS,
    ),
    Architecture(
        name=_TEXT,
        classes=(f"{_MODULE}.CLIPTextModel", f"{_MODULE}.CLIPTextModelWithProjection"),
        config=_text_config,
        weights=_TEXT_WEIGHTS,
    ),
    Architecture(
        name=f"{_IMAGE} with classifier",
        classes=(f"{_MODULE}.CLIPForImageClassification",),
        config=_classifier_config,
        weights=_IMAGE_WEIGHTS,
        ignored=("vision_model.post_layernorm",),
        metadata=metadata_of_classifier,
    ),
)


# --- dual encoders -------------------------------------------------------------------------------------------

_SCALES = ("logit_scale", "logit_bias")


@dataclass(frozen=True)
class Tower:
    """A tower of a dual encoder: where it lies in the model, and the declaration for it.

    The path is empty for a tower whose parts lie in the model itself, beside those of the other tower. What
    the declaration calls a classifier is the projection.
    """

    path: str
    architecture: Architecture

    def within(self, model: nn.Module) -> Any:
        """The module at the path."""
        return getattr(model, self.path, None) if self.path else model


@dataclass(frozen=True)
class DualArchitecture:
    """A foreign dual encoder, declared: its classes, and for each tower what it may be."""

    name: str
    classes: tuple[str, ...]
    image: tuple[Tower, ...]
    text: tuple[Tower, ...]


# In transformers the two towers lie side by side; each ignores what belongs to the other.
_DUAL_IMAGE = replace(
    ARCHITECTURES[0],
    classes=(f"{_MODULE}.CLIPModel",),
    ignored=("text_model.", "text_projection.", "logit_scale", "vision_model.embeddings.position_ids"),
)
_DUAL_TEXT = replace(
    ARCHITECTURES[1],
    classes=(f"{_MODULE}.CLIPModel",),
    ignored=("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids"),
)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (
    DualArchitecture(
        name="transformers CLIP",
        classes=(f"{_MODULE}.CLIPModel",),
        image=(Tower("", _DUAL_IMAGE),),
        text=(Tower("", _DUAL_TEXT),),
    ),
    DualArchitecture(
        name="open_clip CLIP",
        classes=("open_clip.model.CLIP", "open_clip.model.CustomTextCLIP"),
        image=(Tower("visual", open_clip.IMAGE), Tower("visual", open_clip.IMAGE_FROM_TIMM)),
        text=(Tower("text", open_clip.TEXT), Tower("", open_clip.TEXT_IN_DUAL)),
    ),
)


def find_dual_architecture(model: object) -> DualArchitecture | None:
    """The declaration for a dual encoder; None for everything else."""
    name = qualified_name(model)
    return next((one for one in DUAL_ARCHITECTURES if name in one.classes), None)


def convert_dual(dual: DualArchitecture, model: nn.Module, processor: Any = None) -> DualEncoder:
    """Translate both towers of a dual encoder, with their projections, scale and bias.

    Args:
        dual: Its declaration.
        model: The live model.
        processor: What turns images and texts into tensors: a processor of transformers, a tokenizer (of
            transformers or open_clip), an image processor, our own descriptions, or a list of these.
    """
    towers = _choose(dual, "image", model), _choose(dual, "text", model)
    if all(tower.path for tower in towers):  # a tower without path of its own looks at the whole model itself
        known = (*(f"{tower.path}." for tower in towers), *_SCALES)
        require_nothing_left([name for name in model.state_dict() if not name.startswith(known)], dual.name)
    scale, bias = (getattr(model, name, None) for name in _SCALES)
    if scale is None:
        raise ConversionError(f"{dual.name}: the model has no logit_scale")
    for name, value in zip(_SCALES, (scale, bias), strict=True):
        if value is not None:
            require_finite(value.detach(), name, dual.name)
    processors = _flat(processor)
    (image, image_projection), (text, text_projection) = (
        _convert_tower(dual, tower, model, processors) for tower in towers
    )
    return DualEncoder(image, text, Projections(image_projection, text_projection), scale, bias).eval()


def _choose(dual: DualArchitecture, kind: str, model: nn.Module) -> Tower:
    options: tuple[Tower, ...] = getattr(dual, kind)
    for tower in options:
        if qualified_name(tower.within(model)) in tower.architecture.classes:
            return tower
    places = {option.path: type(option.within(model)).__name__ for option in options if option.path}
    known = [name for option in options for name in option.architecture.classes]
    raise ConversionError(
        f"{dual.name}: the {kind} tower is a {places or type(model).__name__}; supported are {known}. Convert the "
        "towers on their own where that is possible, and put them together with DualEncoder(image, text, …)"
    )


def _convert_tower(
    dual: DualArchitecture, tower: Tower, model: nn.Module, processors: Sequence[Any]
) -> tuple[Ensemble, GroupedLinear | None]:
    """One tower without classifier, and the projection that its declaration calls one."""
    architecture, module = tower.architecture, tower.within(model)
    config, known = architecture.config(module, None), architecture.metadata(module)
    metadata = replace(
        known,
        source=f"{dual.name} ({qualified_name(model)})",
        preprocessing=_preprocessing(processors, config) or known.preprocessing,
        history=(f"converted from {dual.name}",),
    )
    state = translate(architecture, module, config)
    dtypes = sorted({str(tensor.dtype) for tensor in state.values()})
    if len(dtypes) > 1:
        raise ConversionError(
            f"{architecture.name}: the parameters have different types {dtypes}; convert the model to one of them "
            "first, for example model.float() or model.bfloat16()"
        )
    weight, bias = (state.pop(f"readout.classifier.{leaf}", None) for leaf in ("weight", "bias"))
    config = replace(config, readout=replace(config.readout, num_classes=0, bias=True))
    return Ensemble.from_state(config, state, metadata), None if weight is None else linear(weight, bias)


def _flat(processor: Any) -> list[Any]:
    """All the single processors in what was given: of a list, and of transformers' pair of both."""
    if processor is None:
        return []
    if isinstance(processor, list | tuple):
        return [one for part in processor for one in _flat(part)]
    if hasattr(processor, "image_processor") and hasattr(processor, "tokenizer"):
        return [processor.image_processor, processor.tokenizer]
    return [processor]


def _preprocessing(processors: Sequence[Any], config: EnsembleConfig) -> ImagePreprocessing | TextPreprocessing | None:
    """The description of the one processor that is meant for this tower."""
    for_images = isinstance(config.stem, PatchStemConfig)
    processor = next((one for one in processors if _is_for_images(one) == for_images), None)
    if processor is None:
        return None
    simple = qualified_name(processor) == open_clip.SIMPLE_TOKENIZER
    return read_processor(open_clip.read_simple_tokenizer(processor) if simple else processor, config.stem)


def _is_for_images(processor: Any) -> bool:
    """Whether a processor reads images; what is not known to is taken for a tokenizer, and refused if it is none."""
    known = isinstance(processor, ImagePreprocessing)
    return known or hasattr(processor, "image_mean") or hasattr(processor, "crop_size")
