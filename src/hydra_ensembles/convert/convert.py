"""Conversion of a library's live model to the canonical ensemble or dual encoder: table, weights, equal answers."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch import nn

from .._utils import unwrapped, warn
from ..errors import ConversionError
from ..model.config import EnsembleConfig, PatchStemConfig
from ..model.dropout import OurModel
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear, linear
from ..model.metadata import Metadata, invalid_names
from ..model.stem_readout import Projections
from ..preprocessing import TextPreprocessing
from . import open_clip, timm_torchvision, transformers, transformers_dual, transformers_text
from .compare import ModelPair, require_same_answers
from .core import (
    MERGE,
    WAYS,
    Architecture,
    DualArchitecture,
    is_identity,
    prefix_errors,
    qualified_name,
    require_all_used,
    require_finite_weights,
    translate,
)
from .declared import Declaration, read_declaration
from .processors import is_for_images, size_of_images, with_changes, with_processor
from .transformers_text import is_sentence_model, opened

ARCHITECTURES: tuple[Architecture, ...] = (
    *timm_torchvision.ARCHITECTURES,
    *transformers.ARCHITECTURES,
    *transformers_text.ARCHITECTURES,
    *transformers_dual.ARCHITECTURES,
    *open_clip.ARCHITECTURES,
)
DUAL_ARCHITECTURES = (*transformers_dual.DUAL_ARCHITECTURES, *open_clip.DUAL_ARCHITECTURES)
_BY_CLASS: dict[str, Architecture | DualArchitecture] = {name: one for one in ARCHITECTURES for name in one.classes}
_BY_CLASS |= {name: one for one in DUAL_ARCHITECTURES for name in one.classes}
_SCALES = ("logit_scale", "logit_bias")
# Why common models have no table, by a word in the qualified name of their class.
_REASONS = {
    "swin": "its tokens are merged and its width changes from stage to stage",
    "resnet": "it has no attention heads",
    "convnext": "it has no attention heads",
    "efficientnet": "it has no attention heads",
    "deberta": "its attention scores depend on relative positions",
    "beit": "its attention scores have a relative position bias",
    "mpnet": "its attention scores have a relative position bias",
    "t5": "its attention scores have a relative position bias",
    "gpt": "it is a decoder, whose tokens see only earlier ones",
    "llama": "it is a decoder, whose tokens see only earlier ones",
    "qwen": "it is a decoder, whose tokens see only earlier ones",
    "peft.": f"it is wrapped in adapters. {MERGE}",
    "timm_wrapper": "only the model inside can be converted, model.timm_model",
    "ForMaskedLM": "its head has another task; convert model.base_model, with num_labels=",
}


def convert(
    model: nn.Module,
    *,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    processor: Any = None,
    declaration: Declaration | None = None,
    preprocessing: Any = None,
    probe: bool = True,
) -> Ensemble | Any:  # Any: a dual encoder, by its class; use `isinstance`
    """Convert a model of timm, torchvision, transformers or open_clip, or your own, to an `Ensemble` with one member.

    A table for the class of the model says where each canonical parameter is; every tensor must be used, and at the end
    both models must answer two fixed inputs alike (`compare`), or the model is refused. So hooks, replaced parts and
    subclasses that change an answer are noticed. The result is a copy, in evaluation mode, and independent of the
    library the model came from. Parameters that are frozen in a partly trained model (`requires_grad`) stay frozen.

    Args:
        model: A live model; wrappers of `torch.compile` and of data parallelism are removed.
        num_labels: For a model without classifier: number of classes of a new one, drawn with a fixed seed.
        labels: Class names in the order of the logits, all different, if the model does not have them.
        processor: What turns raw inputs into tensors: a tokenizer or image processor of transformers, evaluation
            transforms of torchvision, or an `ImagePreprocessing` / `TextPreprocessing`. Saved with the ensemble. For a
            dual encoder also a processor of both, open_clip's tokenizer, or a list of processors.
        declaration: Where the parts of your own model are.
        preprocessing: Changes to the preprocessing of the processor or library: `image_size`, `crop`, `mean`, `std`,
            `interpolation`; for a text model `max_length`.
        probe: Compare the answers of both models. False skips the comparison, for a model that cannot be run
            here or whose difference is known and intended.

    Returns:
        An `Ensemble`; for a dual encoder (CLIP) a `DualEncoder`, with the same features.

    Raises:
        ConversionError: There is no table for the model, or it does not fit; or the answers differ, and then it names
            the first layer where they do.

    Examples:
        >>> import timm, torch, hydra_ensembles as he
        >>> model = timm.create_model("test_vit", num_classes=3).eval()  # with pretrained=True, or your own weights
        >>> base = he.convert(model, labels=["forest", "river", "road"])
        >>> images = torch.randn(2, 3, 160, 160)
        >>> torch.allclose(base(images)[0], model(images), atol=1e-5)
        True
    """
    if preprocessing is not None and not isinstance(preprocessing, Mapping):
        given = f"preprocessing takes changes, such as {{'max_length': 64}}, got a {type(preprocessing).__name__}"
        raise ConversionError(f"{given}; a tokenizer or image processor is given by processor=")
    foreign: Any = model
    if not isinstance(foreign, nn.Module):
        raise ConversionError(f"convert needs a live torch.nn.Module, got a {type(model).__name__}; load it first")
    model = unwrapped(foreign)
    architecture: Architecture | DualArchitecture
    if declaration is not None:
        with prefix_errors(type(model).__name__):
            architecture = read_declaration(declaration, model, size_of_images(processor, preprocessing))
    elif is_sentence_model(model):
        architecture, model = opened(model, table_of)
    else:
        architecture = table_of(type(model))
    with prefix_errors(architecture.name):
        probe = probe and not any(parameter.is_meta for parameter in model.parameters())  # these cannot be run
        if isinstance(architecture, DualArchitecture):
            if preprocessing is not None:
                raise ConversionError("it has two towers; say what each reads with processor=")
            if num_labels is not None or labels is not None:
                raise ConversionError("it has no classifier; leave num_labels and labels out")
            return _convert_dual(architecture, model, processor, probe)
        pair = _converted(architecture, model, num_labels, labels, processor, preprocessing)
        if probe:
            require_same_answers(pair)
        return pair.ensemble


def convert_if_needed(model: Any) -> Any:
    """Convert a model of another library, unwrap one of ours, and return anything that is not a module unchanged."""
    if not isinstance(model, nn.Module):
        return model
    inner = unwrapped(model)  # removes `torch.compile` and data-parallel wrappers
    return inner if isinstance(inner, OurModel) else convert(model)


def table_of(kind: type) -> Architecture | DualArchitecture:
    """Return the table for a class, or for the class it is derived from; raise if there is none."""
    for base in kind.__mro__:
        known = _BY_CLASS.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, OurModel):
        raise ConversionError(f"convert needs a model of another library, but this is a {kind.__name__} already")
    reason = next((f": {reason}" for word, reason in _REASONS.items() if word in name), "")
    raise ConversionError(f"there is no table for {name}{reason}. {WAYS}")


def _converted(
    architecture: Architecture,
    model: nn.Module,
    num_labels: int | None,
    labels: Sequence[str] | None,
    processor: Any,
    preprocessing: Mapping[str, Any] | None,
) -> ModelPair:
    """Convert a model, without comparing answers; the original in the result has a plain classifier."""
    plain, rates = with_plain_classifier(model) if architecture.classes else (model, [])
    if architecture.projects:
        _warn_of_projection(architecture, architecture.config(plain, None).readout.num_classes, num_labels)
    config = _with_dropout(architecture.config(plain, num_labels), rates)
    stated = _read_metadata(architecture, config, plain, processor)
    metadata = replace(
        stated if preprocessing is None else with_changes(stated, preprocessing, config.stem),
        source=f"{architecture.name} ({qualified_name(model)})",
        labels=_labels(labels, stated, config.readout.num_classes),
        history=(f"converted from {architecture.name}",),
    )
    state, fresh, frozen = translate(architecture, plain, config, may_be_fresh=num_labels is not None)
    if fresh:
        line = f"a new classifier of {num_labels} classes, untrained"
        metadata = replace(metadata, history=(*metadata.history, line))
    pair = ModelPair(architecture, plain, Ensemble.from_state(config, state, metadata), fresh)
    for name in frozen:
        pair.ensemble.get_parameter(name).requires_grad_(False)
    return pair


def _warn_of_projection(architecture: Architecture, outputs: int, num_labels: int | None) -> None:
    """Warn that a tower's projection is not a classifier; else `predict` would return its largest output as a class."""
    told = f"its {outputs} outputs are a projection into an embedding, not classes"
    way = "convert the tower without it (transformers: CLIPVisionModel, CLIPTextModel; open_clip: visual.proj = None)"
    if outputs and num_labels is not None:
        raise ConversionError(f"{told}, but num_labels={num_labels} was given; {way}")
    if outputs:
        warn(f"{architecture.name}: {told}; for a classifier {way}, with num_labels=, or use he.zero_shot")


def with_plain_classifier(model: nn.Module) -> tuple[nn.Module, list[float]]:
    """Replace a classifier `nn.Sequential(nn.Dropout, …, nn.Linear)` by its linear layer; also return dropout rates.

    Users often replace a library's classifier like this, and torchvision's `heads` also by the linear layer itself. The
    result is a shallow copy that shares all parts, or the model itself if there is no such classifier.
    """
    if hasattr(model, "head_dist"):  # DeiT's two classifiers have no dropout, whatever the model's rate
        return model, []
    for place in ("head", "classifier", "heads"):
        part = model._modules.get(place)
        *dropouts, last = _parts(part)
        stands_there = part._modules.get("head") if place == "heads" and part is not None else part
        plain = type(last) is nn.Linear or is_identity(last)
        if part is not None and plain and last is not stands_there and all(type(one) is nn.Dropout for one in dropouts):
            opened = copy(model)
            opened._modules = {**model._modules, place: last}
            if place == "heads":
                opened._modules[place] = nn.Sequential(OrderedDict(head=last))
            return opened, [one.p for one in dropouts]
    return model, []


def _parts(module: Any) -> list[Any]:
    """Flatten nested `nn.Sequential`s into a list of modules."""
    if type(module) is not nn.Sequential or not len(module):
        return [module]
    return [part for one in module for part in _parts(one)]


def _with_dropout(config: EnsembleConfig, rates: Sequence[float]) -> EnsembleConfig:
    """Add dropout before the classifier; several dropouts in a row are combined into one rate."""
    site = "dropout" if config.readout.hidden is None else "hidden_dropout"
    rate = getattr(config.readout, site)
    for more in rates:
        rate += more - rate * more
    return replace(config, readout=replace(config.readout, **{site: rate}))


def _read_metadata(architecture: Architecture, config: EnsembleConfig, model: nn.Module, processor: Any) -> Metadata:
    """Read the metadata of a model, with its own preprocessing or that of a processor, adjusted to the model."""
    metadata = with_processor(architecture.metadata(model), processor, config, model)
    texts = metadata.preprocessing
    if not isinstance(texts, TextPreprocessing):
        return metadata
    if not architecture.masks:  # the model attends to padding
        texts = replace(texts, attention_mask=False)
    if config.readout.pool == "final":  # and pools the last position
        texts = replace(texts, pad_to_max=True)
    return replace(metadata, preprocessing=texts)


def _labels(labels: Sequence[str] | None, metadata: Metadata, classes: int) -> tuple[str, ...]:
    if labels is None:
        return _disambiguate(metadata.labels) if len(metadata.labels) == classes else ()
    names = tuple(labels)
    if len(names) != classes:
        raise ConversionError(f"{len(names)} labels were given for {classes} classes")
    blank, twice = invalid_names(names)
    if blank is not None:
        raise ConversionError(f"labels[{blank}] is {names[blank]!r}; every class needs a name, which is a string")
    if twice:
        raise ConversionError(f"labels lists {twice[:5]} more than once; names must tell the classes apart")
    theirs = _disambiguate(metadata.labels)
    index = next((at for at, name in enumerate(names) if at < len(theirs) and name != theirs[at]), None)
    if index is not None and set(names) == set(theirs):
        raise ConversionError(
            f"labels[{index}] is {names[index]!r}, but the model has the same names with {theirs[index]!r} there; "
            "leave labels out, or, if the model is wrong, rename its classes afterwards: .with_metadata(labels=...)"
        )
    return names


def _disambiguate(names: tuple[str, ...]) -> tuple[str, ...]:
    """Add the class number to names that are blank or occur twice (ImageNet has two classes `crane`)."""
    again = set(invalid_names(names)[1])
    return tuple(f"{name} ({i})".strip() if name in again or not name.strip() else name for i, name in enumerate(names))


# --- dual encoders -------------------------------------------------------------------------------------------


def _convert_dual(dual: DualArchitecture, model: nn.Module, processor: Any, probe: bool) -> DualEncoder:
    """Convert both towers, with their projections, scale and bias."""
    towers = _find_tower(dual, "image", model), _find_tower(dual, "text", model)
    paths = tuple(f"{path}." for path, _, _ in towers if path)
    if len(paths) == len(towers):  # a tower without a path of its own checks all tensors itself
        require_all_used((), [name for name in model.state_dict() if not name.startswith((*paths, *_SCALES))])
    scale: Any = model.logit_scale
    bias = getattr(model, "logit_bias", None)
    for name, value in zip(_SCALES, (scale, bias), strict=True):
        if value is not None:
            require_finite_weights(value.detach(), name)
    processors = [] if processor is None else list(processor) if isinstance(processor, list | tuple) else [processor]
    origin = Metadata(source=f"{dual.name} ({qualified_name(model)})", history=(f"converted from {dual.name}",))
    pairs = [_convert_tower(architecture, tower, origin, processors) for _, tower, architecture in towers]
    for pair in pairs if probe else ():
        require_same_answers(pair)
    image, text = pairs
    projections = Projections(image.projection, text.projection)
    return DualEncoder(image.ensemble, text.ensemble, projections, scale, bias).eval()


def _find_tower(dual: DualArchitecture, kind: str, model: nn.Module) -> tuple[str, nn.Module, Architecture]:
    """Return the path of a tower in the model, the tower, and its table."""
    options: tuple[tuple[str, Architecture], ...] = getattr(dual, kind)
    for path, architecture in options:
        tower: Any = getattr(model, path, None) if path else model
        if any(f"{base.__module__}.{base.__qualname__}" in architecture.classes for base in type(tower).__mro__):
            return path, tower, architecture
    found = sorted({type(getattr(model, path, None)).__name__ for path, _ in options if path})
    allowed = [name for _, architecture in options for name in architecture.classes]
    raise ConversionError(f"the {kind} tower is a {', '.join(found)}; supported are {allowed}")


def _convert_tower(
    architecture: Architecture, tower: nn.Module, origin: Metadata, processors: Sequence[Any]
) -> ModelPair:
    """Convert one tower without classifier, and the projection that is declared as its classifier."""
    config = architecture.config(tower, None)
    state, *_ = translate(architecture, tower, config)
    for_images = isinstance(config.stem, PatchStemConfig)
    processor = next((candidate for candidate in processors if is_for_images(candidate) in (for_images, None)), None)
    stated = _read_metadata(architecture, config, tower, processor)
    metadata = replace(origin, preprocessing=stated.preprocessing, preprocessing_from=stated.preprocessing_from)
    weight, bias = (state.pop(f"readout.classifier.{leaf}", None) for leaf in ("weight", "bias"))
    config = replace(config, readout=replace(config.readout, num_classes=0, bias=True))
    projection: GroupedLinear | None = None if weight is None else linear(weight, bias)
    return ModelPair(architecture, tower, Ensemble.from_state(config, state, metadata), projection=projection)
