"""Conversion of a library's live model to the canonical ensemble or dual encoder."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, overload

from torch import nn

from .._utils import unwrapped, warn
from ..arguments import checked
from ..errors import ConversionError
from ..model.config import EnsembleConfig, PatchStemConfig
from ..model.dropout import OurModel
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear, GroupedNorm
from ..model.metadata import Metadata, invalid_names
from ..model.stem_readout import Projections, linear
from ..preprocessing import TextPreprocessing
from . import open_clip, timm, torchvision, transformers, transformers_dual, transformers_rotary
from .altered import MERGE, require_known_parts, require_read_parts, require_unaltered, with_plain_classifier
from .core import Architecture, DualArchitecture, qualified_name, require_all_used, require_finite_weights, translate
from .declared import Declaration
from .guess import infer_declaration, require_proof, suggest_declaration
from .own import warn_of_dropout, warn_of_padding
from .probe import ModelPair, require_same_answers
from .processors import is_for_images, size_of_images, with_changes, with_processor
from .reading import read_declaration, with_size
from .refusals import explain, format_refusal, prefix_errors, refusal
from .sentence_transformers import is_sentence_model, opened

ARCHITECTURES: tuple[Architecture, ...] = (
    *timm.ARCHITECTURES,
    *torchvision.ARCHITECTURES,
    *transformers.ARCHITECTURES,
    *transformers_rotary.ARCHITECTURES,
    *transformers_dual.ARCHITECTURES,
    *open_clip.ARCHITECTURES,
)
DUAL_ARCHITECTURES = (*transformers_dual.DUAL_ARCHITECTURES, *open_clip.DUAL_ARCHITECTURES)
_BY_CLASS: dict[str, Architecture | DualArchitecture] = {name: one for one in ARCHITECTURES for name in one.classes}
_BY_CLASS |= {name: one for one in DUAL_ARCHITECTURES for name in one.classes}
_SPREAD = 0.02  # std of freshly initialised weights in timm and most of transformers
_SCALES = ("logit_scale", "logit_bias")


class TwoTowers(Protocol):
    """A dual encoder of transformers, for type checkers: it has image features and text features."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """Features of images."""

    def get_text_features(self, *args: Any, **kwargs: Any) -> Any:
        """Features of texts."""


@overload
def convert(model: TwoTowers, *, processor: Any = ..., probe: bool = ...) -> DualEncoder: ...
@overload
def convert(
    model: nn.Module,
    *,
    num_labels: int | None = ...,
    labels: Sequence[str] | None = ...,
    processor: Any = ...,
    declaration: Declaration | None = ...,
    preprocessing: Mapping[str, Any] | None = ...,
    probe: bool = ...,
) -> Ensemble | Any: ...  # Any: some dual encoders do not match `TwoTowers`; use `isinstance`
@checked
def convert(
    model: nn.Module | TwoTowers,
    *,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    processor: Any = None,
    declaration: Declaration | None = None,
    preprocessing: Any = None,
    probe: bool = True,
) -> Ensemble | DualEncoder:
    """Convert a model of timm, torchvision, transformers or open_clip, or your own, to an `Ensemble` with one member.

    Predictions do not change: every part of the model is read, and at the end both models answer the same small
    random batch. The result is a copy, in evaluation mode, and independent of the library the model
    came from. Parameters that are frozen in a partly trained model (`requires_grad`) stay frozen.

    Args:
        model: A live model; wrappers of `torch.compile` and of data parallelism are removed.
        num_labels: For a model without classifier: number of classes of a new one.
        labels: Class names in the order of the logits, all different, if the model does not have them.
        processor: What turns raw inputs into tensors: a tokenizer or image processor of transformers, evaluation
            transforms of torchvision, or an `ImagePreprocessing` / `TextPreprocessing`. Saved with the ensemble. For a
            dual encoder also a processor of both, open_clip's tokenizer, or a list of processors.
        declaration: Where the parts of your own model are. A plain classifier around an `nn.TransformerEncoder`,
            or around blocks with an `nn.MultiheadAttention`, needs none: its parts are found, and outputs compared.
        preprocessing: Changes to the preprocessing of the processor or library: `image_size`, `crop`, `mean`, `std`,
            `interpolation`; for a text model `max_length`.
        probe: Compare the answers of both models. False skips the comparison, for a model that cannot be run
            here or whose difference is known and intended.

    Returns:
        An `Ensemble`; for a dual encoder (CLIP) a `DualEncoder`, with the same features.

    Raises:
        ConversionError: The architecture, or this variant of it, is not supported: forward hooks, replaced methods
            and parts, blocks that differ, several labels per input, weights that are not finite, and others; or
            the answers differ, and then it names the first layer where they do.

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
    wrapped: Any = model
    model = unwrapped(wrapped)
    if declaration is not None:
        declaration = with_size(declaration, model, size_of_images(processor, preprocessing))
        architecture: Architecture | DualArchitecture = _read_own(declaration, model)
    elif is_sentence_model(model):
        architecture, model = opened(model, ARCHITECTURES)
    else:
        known = _BY_CLASS.get(qualified_name(model))
        architecture = known or _own_architecture(model, num_labels, size_of_images(processor, preprocessing))
    with prefix_errors(architecture.name):
        require_unaltered(wrapped, model)
    probe = probe and not any(parameter.is_meta for parameter in model.parameters())  # meta parameters cannot be run
    if isinstance(architecture, DualArchitecture):
        if preprocessing is not None:
            raise ConversionError(f"{architecture.name} has two towers; say what each reads with processor=")
        if num_labels is not None or labels is not None:
            raise ConversionError(f"{architecture.name} has no classifier; leave num_labels and labels out")
        return _convert_dual(architecture, model, processor, probe)
    both = _converted(architecture, model, num_labels, labels, processor, preprocessing)
    if not probe:
        return both.ensemble
    if both.own and both.zero_classifier:
        problem = "all weights of its classifier are zero, so comparing its answers proves nothing"
        raise ConversionError(f"{architecture.name}: {problem}; give it other values, or convert with probe=False")
    if declaration is None:
        require_same_answers(both)
    else:
        require_proof(declaration, model, num_labels, both.ensemble.metadata)
    if both.own:
        warn_of_padding(both)
        if declaration is None or declaration.dropout is None:
            warn_of_dropout(both)
    return both.ensemble


def _converted(
    architecture: Architecture,
    model: nn.Module,
    num_labels: int | None,
    labels: Sequence[str] | None,
    processor: Any,
    preprocessing: Mapping[str, Any] | None,
) -> ModelPair:
    """Convert a model, without comparing outputs; the original in the result has a plain classifier."""
    rates: list[float] = []
    with _explain_missing_parts(architecture):
        if architecture.classes:  # for a user's own model, only outputs are compared
            model, rates = with_plain_classifier(model)
            require_known_parts(model)
        _warn_of_projection(architecture, model, num_labels)
        config = _with_dropout(architecture.config(model, num_labels), rates)
        if architecture.classes:
            require_read_parts(model)
    stated = _read_metadata(architecture, config, model, processor)
    metadata = replace(
        stated if preprocessing is None else with_changes(stated, preprocessing, config.stem),
        source=f"{architecture.name} ({qualified_name(model)})",
        labels=_labels(labels, stated, config.readout.num_classes),
        history=(f"converted from {architecture.name}",),
    )
    with _explain_missing_parts(architecture):
        state, fresh, frozen = translate(architecture, model, config, may_be_fresh=num_labels is not None)
    if fresh:
        line = f"a new classifier of {num_labels} classes, untrained"
        metadata = replace(metadata, history=(*metadata.history, line))
    both = ModelPair(architecture, model, Ensemble.from_state(config, state, metadata), fresh)
    for name in frozen:
        both.ensemble.get_parameter(name).requires_grad_(False)
    spread = getattr(getattr(model, "config", None), "initializer_range", _SPREAD)
    if not fresh and _looks_untrained(both.ensemble, spread):
        warn(
            f"{architecture.name}: the classifier looks untrained (no bias, weights as freshly initialised) on top of "
            "trained layers: its answers mean nothing before it is trained, by he.finetune or elsewhere"
        )
    return both


def _warn_of_projection(architecture: Architecture, model: nn.Module, num_labels: int | None) -> None:
    """Warn that a tower's projection is not a classifier; else `predict` would return its largest output as a class."""
    outputs = architecture.config(model, None).readout.num_classes if architecture.projects else 0
    told = f"its {outputs} outputs are a projection into an embedding, not classes"
    way = "convert the tower without it (transformers: CLIPVisionModel, CLIPTextModel; open_clip: visual.proj = None)"
    if outputs and num_labels is not None:
        raise ConversionError(f"{told}, but num_labels={num_labels} was given; {way}")
    if outputs:
        warn(
            f"{architecture.name}: {told}, but predict would name the largest as a class. For a classifier {way}, with "
            "num_labels=...; for classes by their names convert the whole dual encoder (he.zero_shot)"
        )


def _with_dropout(config: EnsembleConfig, rates: Sequence[float]) -> EnsembleConfig:
    """Add dropout before the classifier; several dropouts in a row are combined into one rate."""
    site = "dropout" if config.readout.hidden is None else "hidden_dropout"
    rate = getattr(config.readout, site)
    for more in rates:
        rate += more - rate * more
    return replace(config, readout=replace(config.readout, **{site: rate}))


def convert_if_needed(model: Any) -> Any:
    """Convert a model of another library, unwrap one of ours, and return anything that is not a module unchanged."""
    if not isinstance(model, nn.Module):
        return model
    inner = unwrapped(model)  # removes `torch.compile` and data-parallel wrappers
    return inner if isinstance(inner, OurModel) else convert(model)


def _looks_untrained(ensemble: Ensemble, spread: float) -> bool:
    """Whether the classifier looks freshly initialised (all zeros, or normal with this std) on trained layers."""
    classifier = ensemble.readout.classifier
    if classifier is None or classifier.bias is None or classifier.bias.is_meta or bool(classifier.bias.any()):
        return False
    norms = [module.weight for module in ensemble.encoder.modules() if isinstance(module, GroupedNorm)]
    if all(bool((norm == 1).all()) for norm in norms):
        return False  # the whole model is untrained, as in tests and benchmarks
    weight = classifier.weight.detach().double()
    mean, deviation = (float(value) / spread for value in (weight.mean(), weight.std()))
    errors = 5 / math.sqrt(weight.numel())  # five standard errors of the mean; divided by √2, of the std
    return not bool(weight.any()) or (abs(mean) < errors and abs(deviation - 1) < errors / math.sqrt(2))


def _read_metadata(architecture: Architecture, config: EnsembleConfig, model: nn.Module, processor: Any) -> Metadata:
    """Read the metadata of a model, with its own preprocessing or that of a processor, adjusted to the model."""
    metadata = with_processor(architecture.metadata(model), processor, config.stem)
    texts = metadata.preprocessing
    if not isinstance(texts, TextPreprocessing):
        return metadata
    if not architecture.masks:  # the model attends to padding
        texts = replace(texts, attention_mask=False)
    if config.readout.pool == "final":  # and pools the last position
        texts = replace(texts, pad_to_max=True)
    return replace(metadata, preprocessing=texts)


@contextmanager
def _explain_missing_parts(architecture: Architecture) -> Iterator[None]:
    """Turn an `AttributeError` into a `ConversionError`: a part is missing, as in another release of the library."""
    try:
        with prefix_errors(architecture.name):
            yield
    except AttributeError as error:
        if not architecture.classes:  # the user's own declaration
            raise
        library = architecture.name.rpartition(", ")[2].partition(" ")[0]  # the last one, inside sentence-transformers
        extra = "timm" if library == "torchvision" else library.replace("_", "-")
        release = getattr(sys.modules.get(library), "__version__", "of another kind")
        what = f"{architecture.name}: a part that is needed to read it is missing ({error})"
        why = f"the model was changed, or the installed {library} ({release}) builds it differently"
        way = f"a tested release of {library}, pip install -U 'hydra-ensembles[{extra}]'"
        raise ConversionError(format_refusal(what, why, way)) from error


def require_supported(kind: type, *names: str) -> None:
    """Raise if there is no converter for a class, before its weights are loaded; `names` are other names for it."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _BY_CLASS:
        raise ConversionError(explain(name, *names))


def _own_architecture(model: object, num_labels: int | None, size: tuple[int, int] | None) -> Architecture:
    """Find the parts of a model of no known class, or raise an error that says what it is and what to do."""
    name = qualified_name(model)
    if not isinstance(model, nn.Module):
        got = f"convert needs a live torch.nn.Module, got a {type(model).__name__}"
        raise ConversionError(f"{got}; load it by its library, or by he.load")
    if isinstance(model, Ensemble | DualEncoder):
        raise ConversionError(f"convert needs a model of another library, but this is a {type(model).__name__} already")
    if name.startswith("peft."):
        prompts = "Learned prompts cannot be merged: give the model fine-tuned without them"
        raise ConversionError(f"{name} wraps a model in adapters; {MERGE}. {prompts}")
    declaration = infer_declaration(model, num_labels, size)
    if declaration is not None:
        return _read_own(declaration, model)
    advice = "" if refusal(name) else _supported_inside(model)
    raise ConversionError(advice or explain(name) + suggest_declaration(model))


def _supported_inside(model: nn.Module) -> str:
    """Return advice for a subclass of a supported model, or for a model that contains one; else an empty string."""
    name = qualified_name(model)
    above = next((kind for kind in type(model).__mro__ if f"{kind.__module__}.{kind.__qualname__}" in _BY_CLASS), None)
    if above is not None:
        return format_refusal(
            f"{name} is a subclass of {above.__name__}, which is supported",
            "what a subclass computes is not known",
            f"load its weights into a {above.__name__} of the library, and convert that",
        )
    path = next((path for path, module in model.named_modules() if qualified_name(module) in _BY_CLASS), None)
    if path is None:
        return ""
    expression = f"model.{path}" if all(map(str.isidentifier, path.split("."))) else f"model.get_submodule({path!r})"
    return format_refusal(
        f"{name} holds a {type(model.get_submodule(path)).__name__}, which is supported",
        "what a model around it computes is not known",
        f"the model inside, he.convert({expression}); a trained classifier around it has to be put into it first\n"
        f"(timm: {expression}.head = ...), num_labels=... makes a new one",
    )


def _read_own(declaration: Declaration, model: nn.Module) -> Architecture:
    """Read the declaration of a user's own model; warn if its images are assumed to be square."""
    if "patch" in declaration.names and "position" in declaration.names and declaration.image_size is None:
        warn(
            f"{type(model).__name__}: the shape of its images is not known, so a square is assumed; give image_size= "
            "in the declaration, or the preprocessing"
        )
    return read_declaration(declaration, model)


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
    with prefix_errors(dual.name):
        if len(paths) == len(towers):  # a tower without a path of its own checks all tensors itself
            unused = [name for name in model.state_dict() if not name.startswith((*paths, *_SCALES))]
            require_all_used((), unused)
        scale, bias = (getattr(model, name, None) for name in _SCALES)
        if scale is None:
            raise ConversionError("the model has no logit_scale")
        for name, value in zip(_SCALES, (scale, bias), strict=True):
            if value is not None:
                require_finite_weights(value.detach(), name)
    processors = [] if processor is None else list(processor) if isinstance(processor, list | tuple) else [processor]
    origin = Metadata(source=f"{dual.name} ({qualified_name(model)})", history=(f"converted from {dual.name}",))
    converted = [_convert_tower(architecture, tower, origin, processors) for _, tower, architecture in towers]
    (image, image_projection), (text, text_projection) = converted
    encoder = DualEncoder(image, text, Projections(image_projection, text_projection), scale, bias).eval()
    if probe:
        for (_, tower, architecture), (ours, projection) in zip(towers, converted, strict=True):
            require_same_answers(ModelPair(architecture, tower, ours, projection=projection))
    return encoder


def _find_tower(dual: DualArchitecture, kind: str, model: nn.Module) -> tuple[str, nn.Module, Architecture]:
    """Return the path of a tower in the model, the tower, and its declaration."""
    options: tuple[tuple[str, Architecture], ...] = getattr(dual, kind)
    for path, architecture in options:
        tower: Any = getattr(model, path, None) if path else model
        if qualified_name(tower) in architecture.classes:
            return path, tower, architecture
    found = sorted({type(getattr(model, path, None)).__name__ for path, _ in options if path})
    allowed = [name for _, architecture in options for name in architecture.classes]
    raise ConversionError(f"{dual.name}: the {kind} tower is a {', '.join(found)}; supported are {allowed}")


def _convert_tower(
    architecture: Architecture, tower: nn.Module, origin: Metadata, processors: Sequence[Any]
) -> tuple[Ensemble, GroupedLinear | None]:
    """Convert one tower without classifier, and the projection that is declared as its classifier."""
    with _explain_missing_parts(architecture):
        require_known_parts(tower)
        config = architecture.config(tower, None)
        require_read_parts(tower)
        state, *_ = translate(architecture, tower, config)
    for_images = isinstance(config.stem, PatchStemConfig)
    processor = next((candidate for candidate in processors if is_for_images(candidate) in (for_images, None)), None)
    stated = _read_metadata(architecture, config, tower, processor)
    metadata = replace(origin, preprocessing=stated.preprocessing, preprocessing_from=stated.preprocessing_from)
    weight, bias = (state.pop(f"readout.classifier.{leaf}", None) for leaf in ("weight", "bias"))
    config = replace(config, readout=replace(config.readout, num_classes=0, bias=True))
    return Ensemble.from_state(config, state, metadata), None if weight is None else linear(weight, bias)
