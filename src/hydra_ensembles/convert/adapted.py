"""Several adapters of one model: the model as an ensemble, and what each adapter changes in it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import library, unwrapped
from ..errors import ConversionError
from ..model.ensemble import Ensemble, shapes_of
from .adapters import is_adapted, merged, twin
from .convert import architecture_of, convert
from .core import Architecture, Found
from .folders import opened_source

_CLASSIFIERS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")


@dataclass(frozen=True)
class Adapted:
    """A model as an ensemble, and the canonical parameters that each of its adapters changes."""

    base: Ensemble
    changes: Sequence[Mapping[str, Tensor]]


def read_adapters(model: Any, adapters: Sequence[Any], **options: Any) -> Adapted:
    """Convert a model with these `options` of `convert`, and read adapters: folders, or loaded models of peft."""
    labels = options.get("labels")
    if isinstance(model, str | Path):
        language = isinstance(labels, Mapping)
        classes = 0 if language else max(map(_classes, adapters))
        model, tokenizer, _ = opened_source(str(model), language=language, classes=classes)
        options = {"processor": tokenizer} | options
    if not isinstance(model, nn.Module) or is_adapted(model):
        raise ConversionError(f"adapters need the model they are for, or its folder; got a {type(model).__name__}")
    base = convert(model, **options)
    how = options.get("tokenizer") or options.get("processor"), options.get("template"), options.get("declaration")
    architecture, model = architecture_of(unwrapped(model), labels, *how)
    if not isinstance(architecture, Architecture) or not isinstance(base, Ensemble):
        raise ConversionError("adapters of dual encoders are merged one by one: he.convert(peft_model)")
    found = Found(architecture, model)
    return Adapted(base, [_changes(found, base, one, f"adapter {number}") for number, one in enumerate(adapters)])


def _changes(base: Found, ensemble: Ensemble, adapter: Any, name: str) -> dict[str, Tensor]:
    """The canonical parameters of a model that an adapter changes."""
    loaded = adapter if is_adapted(adapter) else _loaded(base.model, Path(adapter), name)
    own = {_plain(key) for key in _stored(loaded)}
    kept = {one.data_ptr() for one in loaded.parameters()}  # of the base, and of what replaces parts of it
    replaced = {one.data_ptr() for key, one in loaded.named_parameters() if "modules_to_save" in key}
    found = Found(base.architecture, merged(loaded))
    if differences := ensemble.config.differences(base.architecture.config(found, None)):
        raise ConversionError(f"{name} is of another base, which differs in {'; '.join(differences[:5])}")
    changed = set[str]()
    for path in found.tensors:
        new, old = found.tensor(path), base.tensor(path)
        if new.data_ptr() not in kept or new.data_ptr() in replaced or path in own:
            changed.add(path)
        elif new.data_ptr() != old.data_ptr() and not torch.equal(new, old.to(new.device)):
            raise ConversionError(f"{name} is of another base: {path} differs, which the adapter does not change")
    changes = dict[str, Tensor]()
    for parameter, shape in shapes_of(ensemble.config).items():
        source = found.source(parameter)
        if source is not None and not changed.isdisjoint(source.names):
            changes[parameter] = found.read(parameter, shape).to(ensemble.device, ensemble.dtype)
    return changes


def _loaded(model: nn.Module, folder: Path, name: str) -> Any:
    """The adapter in a folder, on a twin of the model."""
    peft = library("peft", extra="transformers")
    settings = peft.PeftConfig.from_pretrained(folder)
    theirs, ours = settings.base_model_name_or_path, getattr(model.config, "_name_or_path", None)
    if theirs and ours and Path(theirs).name.lower() != Path(ours).name.lower():
        way = "if it is the same, load it yourself: PeftModel.from_pretrained(model, folder)"
        raise ConversionError(f"{name} is of another base, {theirs}, not {ours}; {way}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of missing tensors, which are an error here
            loaded = peft.PeftModel.from_pretrained(twin(model), folder)
    except (RuntimeError, ValueError) as error:
        raise ConversionError(f"{name} is of another base, which differs in shape: {error!s:.300}") from error
    if odd := sorted(_stored(folder).keys() ^ _stored(loaded).keys()):
        raise ConversionError(f"{name} is of another base: {odd[0]} is in only one of both")
    return loaded.eval()


def _stored(adapter: Any) -> dict[str, Tensor]:
    """The tensors of an adapter, loaded or in a folder, as its file has them."""
    peft = library("peft", extra="transformers")
    if not is_adapted(adapter):
        stored: dict[str, Tensor] = peft.load_peft_weights(str(adapter), device="cpu")
        return stored
    own: dict[str, Tensor] = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
    return own


def _classes(adapter: Any) -> int:
    """How many classes the classifier in an adapter has; 0 if it has none."""
    return max((len(one) for key, one in _stored(adapter).items() if key.endswith(_CLASSIFIERS)), default=0)


def _plain(key: str) -> str:
    """The name in the model itself of a tensor of its adapter."""
    return key.removeprefix("base_model.model.")
