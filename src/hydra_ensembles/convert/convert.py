"""From a library's live model to the canonical ensemble."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

from torch import nn

from ..errors import ConversionError
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata, odd_names
from . import clip, open_clip, timm, torchvision, transformers
from .clip import DUAL_ARCHITECTURES, DualArchitecture, convert_dual, find_dual_architecture
from .core import Architecture, qualified_name, require_unaltered, translate
from .processors import read_processor

ARCHITECTURES: tuple[Architecture, ...] = (
    *timm.ARCHITECTURES,
    *torchvision.ARCHITECTURES,
    *transformers.ARCHITECTURES,
    *clip.ARCHITECTURES,
    *open_clip.ARCHITECTURES,
)


def convert(
    model: nn.Module,
    *,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    processor: Any = None,
) -> Any:
    """Translate a model of timm, torchvision, transformers or open_clip into one of ours, with one member.

    The predictions do not change. The result is a copy, in evaluation mode, and independent of the library
    the model came from.

    Args:
        model: A live model; wrappers of `torch.compile` and of data parallelism are looked through.
        num_labels: For a model without classifier: size of a fresh one.
        labels: Class names in the order of the logits, all different, where the model does not know them.
        processor: What turns raw inputs into tensors: a tokenizer or image processor of transformers, or an
            `ImagePreprocessing` / `TextPreprocessing`. Saved with the ensemble. For a dual encoder also a
            processor of both, open_clip's tokenizer, or a list of processors.

    Returns:
        An `Ensemble`; for a dual encoder (CLIP), whose features stay the same instead, a `DualEncoder`.

    Raises:
        ConversionError: The architecture, or this variant of it, is not supported: forward hooks, a replaced
            `forward`, several labels per input, and weights that are not finite among others.
    """
    given, model = model, unwrap(model)
    dual = find_dual_architecture(model)
    if dual is not None:
        if num_labels is not None or labels is not None:
            raise ConversionError(f"{dual.name} has no classifier; leave num_labels and labels out")
        require_unaltered(given, model, dual.name)
        return convert_dual(dual, model, processor)
    architecture = find_architecture(model)
    require_unaltered(given, model, architecture.name)
    config = architecture.config(model, num_labels)
    known = architecture.metadata(model)
    metadata = replace(
        known,
        source=f"{architecture.name} ({qualified_name(model)})",
        labels=_labels(labels, known, config.readout.num_classes),
        preprocessing=known.preprocessing if processor is None else read_processor(processor, config.stem),
        history=(f"converted from {architecture.name}",),
    )
    state = translate(architecture, model, config, fresh=num_labels is not None)
    return Ensemble.from_state(config, state, metadata)


def find_architecture(model: object) -> Architecture:
    """The declaration for a live model, or an error that lists what is supported and how to add one."""
    name = qualified_name(model)
    for architecture in ARCHITECTURES:
        if name in architecture.classes:
            return architecture
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert needs a live torch.nn.Module, got a {type(model).__name__}")
    if name.startswith("peft."):
        raise ConversionError(f"{name} wraps a model in adapters; merge them first: model.merge_and_unload()")
    declared: list[Architecture | DualArchitecture] = [*ARCHITECTURES, *DUAL_ARCHITECTURES]
    known = "\n  ".join(f"{one.name}: {', '.join(one.classes)}" for one in declared)
    raise ConversionError(
        f"{name} is not a supported architecture. Supported are\n  {known}\n"
        "To add one, write a declaration (hydra_ensembles.convert.core.Architecture) and list it in "
        "hydra_ensembles.convert.convert.ARCHITECTURES"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, `DataParallel` or `DistributedDataParallel`."""
    wrappers = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
    while type(model).__name__ in wrappers:
        inner: Any = getattr(model, "_orig_mod", None) or model.module
        model = cast(nn.Module, inner)
    return model


def _labels(given: Sequence[str] | None, known: Metadata, classes: int) -> tuple[str, ...]:
    if given is None:
        return known.labels if len(known.labels) == classes else ()
    if isinstance(given, str | Mapping | Set):
        raise ConversionError(f"labels is a {type(given).__name__}; give a list of names in the order of the logits")
    names = tuple(given)
    if len(names) != classes:
        raise ConversionError(f"{len(names)} labels were given for {classes} classes")
    blank, twice = odd_names(names)
    if blank is not None:
        raise ConversionError(f"labels[{blank}] is {names[blank]!r}; every class needs a name, which is a string")
    if twice:
        raise ConversionError(f"labels lists {twice[:5]} more than once; names must tell the classes apart")
    return names
