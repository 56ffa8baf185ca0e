"""CLIP dual encoders of transformers and open_clip: which towers they are made of, and how both are translated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import ConversionError
from ..model.clip import DualEncoder
from ..model.config import EnsembleConfig, PatchStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear
from ..model.stem_readout import Projections, linear
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from . import open_clip, transformers_clip
from .clip_tokenizer import SIMPLE_TOKENIZER, read_simple_tokenizer
from .core import Architecture, qualified_name, require_finite, translate
from .processors import read_processor

_SCALES = ("logit_scale", "logit_bias")
_CLASSIFIER = "readout.classifier."


@dataclass(frozen=True)
class Tower:
    """A tower of a dual encoder: where it lies in the model, and the declaration for it.

    The path is empty for a tower whose parts lie in the model itself, beside those of the other tower. What
    the declaration calls a classifier is the projection.
    """

    path: str
    architecture: Architecture

    def within(self, model: nn.Module) -> nn.Module | None:
        """The module that holds the tower, or None when this declaration is not for it."""
        module = getattr(model, self.path, None) if self.path else model
        return module if qualified_name(module) in self.architecture.classes else None


@dataclass(frozen=True)
class DualArchitecture:
    """A foreign dual encoder, declared: its classes, and for each tower what it may be."""

    name: str
    classes: tuple[str, ...]
    image: tuple[Tower, ...]
    text: tuple[Tower, ...]


DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (
    DualArchitecture(
        name="transformers CLIP",
        classes=("transformers.models.clip.modeling_clip.CLIPModel",),
        image=(Tower("", transformers_clip.IMAGE_IN_DUAL),),
        text=(Tower("", transformers_clip.TEXT_IN_DUAL),),
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
    _check_complete(dual, model, towers)
    processors = _flat(processor)
    (image, image_projection), (text, text_projection) = (
        _convert_tower(dual, tower, model, processors) for tower in towers
    )
    scale, bias = (getattr(model, name, None) for name in _SCALES)
    if scale is None:
        raise ConversionError(f"{dual.name}: the model has no logit_scale")
    for name, value in zip(_SCALES, (scale, bias), strict=True):
        if value is not None:
            require_finite(value.detach(), name, dual.name)
    return DualEncoder(image, text, Projections(image_projection, text_projection), scale, bias).eval()


def _choose(dual: DualArchitecture, kind: str, model: nn.Module) -> Tower:
    options: tuple[Tower, ...] = getattr(dual, kind)
    for tower in options:
        if tower.within(model) is not None:
            return tower
    places = {option.path: type(getattr(model, option.path, model)).__name__ for option in options if option.path}
    known = [name for option in options for name in option.architecture.classes]
    raise ConversionError(
        f"{dual.name}: the {kind} tower is a {places or type(model).__name__}; supported are {known}. Convert the "
        "towers on their own where that is possible, and put them together with DualEncoder(image, text, …)"
    )


def _check_complete(dual: DualArchitecture, model: nn.Module, towers: tuple[Tower, ...]) -> None:
    """Refuse tensors that belong to no tower; a tower without path of its own checks the whole model itself."""
    if any(not tower.path for tower in towers):
        return
    known = (*(f"{tower.path}." for tower in towers), *_SCALES)
    left = sorted(name for name in model.state_dict() if not name.startswith(known))
    if left:
        raise ConversionError(f"{dual.name}: the model has parameters that have no canonical place: {left[:8]}")


def _convert_tower(
    dual: DualArchitecture, tower: Tower, model: nn.Module, processors: Sequence[Any]
) -> tuple[Ensemble, GroupedLinear | None]:
    """One tower without classifier, and the projection that its declaration calls one."""
    module = tower.within(model)
    if module is None:
        raise ConversionError(f"{dual.name}: no {tower.architecture.name} at {tower.path!r}")
    architecture = tower.architecture
    config = architecture.config(module, None)
    known = architecture.metadata(module)
    metadata = replace(
        known,
        source=f"{dual.name} ({qualified_name(model)})",
        preprocessing=_preprocessing(processors, config) or known.preprocessing,
        history=(f"converted from {dual.name}",),
    )
    state = translate(architecture, module, config, metadata, fresh=False).state_dict()
    _check_dtypes(architecture, {tensor.dtype for tensor in state.values()})
    weight, bias = (state.pop(_CLASSIFIER + leaf, None) for leaf in ("weight", "bias"))
    config = replace(config, readout=replace(config.readout, num_classes=0, bias=True))
    # laid out as a loaded checkpoint is, so that both answer with the same bits
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    return Ensemble.from_state(config, state, metadata), None if weight is None else linear(weight, bias)


def _check_dtypes(architecture: Architecture, dtypes: set[Any]) -> None:
    if len(dtypes) > 1:
        names = sorted(str(dtype) for dtype in dtypes)
        raise ConversionError(
            f"{architecture.name}: the parameters have different types {names}; convert the model to one of them "
            "first, for example model.float() or model.bfloat16()"
        )


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
    for_image = isinstance(config.stem, PatchStemConfig)
    for processor in processors:
        if _is_for_images(processor) != for_image:
            continue
        simple = qualified_name(processor) == SIMPLE_TOKENIZER
        return read_processor(read_simple_tokenizer(processor) if simple else processor, config.stem)
    return None


def _is_for_images(processor: Any) -> bool:
    """Whether a processor reads images; what is not known to is taken for a tokenizer, and refused if it is none."""
    return isinstance(processor, ImagePreprocessing) or any(
        hasattr(processor, attribute) for attribute in ("image_mean", "crop_size")
    )
