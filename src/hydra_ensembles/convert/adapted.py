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
from .core import Architecture, Found, Source
from .folders import opened_source

_CLASSIFIERS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")


Factors = tuple[Tensor, Tensor]  # left and right: their product is what an adapter adds to a canonical parameter


@dataclass(frozen=True)
class Adapted:
    """A model as an ensemble, and the canonical parameters that each of its adapters changes.

    Where an adapter is a plain LoRA, `factors` are what it adds to a parameter.
    """

    base: Ensemble
    changes: Sequence[Mapping[str, Tensor]]
    factors: Sequence[Mapping[str, Factors]]


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
    read = [_changes(found, base, one, f"adapter {number}") for number, one in enumerate(adapters)]
    return Adapted(base, *([one[part] for one in read] for part in range(2)))  # type: ignore[arg-type]


def _changes(base: Found, ensemble: Ensemble, adapter: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """The canonical parameters of a model that an adapter changes, and the factors of these changes."""
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
    changes, factors, state, plain = dict[str, Tensor](), dict[str, Factors](), ensemble.state_dict(), _pairs(loaded)
    for parameter, shape in shapes_of(ensemble.config).items():
        source = found.source(parameter)
        if source is None or changed.isdisjoint(source.names):
            continue
        new = found.read(parameter, shape).to(ensemble.device, ensemble.dtype)
        if torch.equal(new, state[parameter]):
            continue
        changes[parameter] = new
        if changed & set(source.names) <= plain.keys():
            left, right = _factors(parameter, source, shape, plain, found)
            if torch.allclose((state[parameter] + left @ right).float(), new.float(), rtol=1e-2, atol=1e-4):
                factors[parameter] = left.to(new), right.to(new)
    return changes, factors


@dataclass(frozen=True)
class _Pair:
    """What a plain LoRA adds to a weight: `B A`, with B scaled; of a weight stored as `[in, out]`, its transpose."""

    second: Tensor  # [out, r]
    first: Tensor  # [r, in]
    flipped: bool

    @property
    def rank(self) -> int:
        return len(self.first)


def _pairs(loaded: Any) -> dict[str, _Pair]:
    """What a plain LoRA adds to each weight, by its name; other adapters have none."""
    if loaded.active_peft_config.peft_type != "LORA" or len(loaded.active_adapters) > 1:
        return {}
    pairs, (one,) = dict[str, _Pair](), loaded.active_adapters
    for name, part in loaded.get_base_model().named_modules():
        if one in getattr(part, "lora_A", ()) and not part.lora_variant and not part.merged:
            first, second = part.lora_A[one].weight.detach(), part.lora_B[one].weight.detach()
            pairs[f"{name}.weight"] = _Pair(second * part.scaling[one], first, part.fan_in_fan_out)
    return pairs


def _factors(parameter: str, source: Source, shape: torch.Size, pairs: Mapping[str, _Pair], found: Found) -> Factors:
    """Left and right of a canonical parameter, by the table that says how its weights are laid out.

    The table lays out the rows of a weight, whatever its columns are: also those of B. In the output projection of
    attention it lays out the columns, which are heads: also those of A.
    """
    if parameter.endswith("attention.out"):
        (alone,) = (pairs[path] for path in source.names)
        laid_out = torch.Size((*shape[:-1], alone.rank))
        columns = alone.first.t() if alone.flipped else alone.first
        return source.read([columns], laid_out).reshape(laid_out), alone.second.t()
    known = [pairs.get(path) for path in source.names]
    laid_out = torch.Size((*shape[:-1], sum(one.rank for one in known if one is not None)))
    parts, start = list[Tensor](), 0
    for path, one in zip(source.names, known, strict=True):
        flipped = one is not None and one.flipped
        part = found.tensor(path).new_zeros(found.tensor(path).shape[int(flipped)], laid_out[-1])
        if one is not None:
            part[:, start : start + one.rank] = one.second
            start += one.rank
        parts.append(part.t() if flipped else part)
    right = torch.cat([one.first for one in known if one is not None])
    return source.read(parts, laid_out).reshape(laid_out), right


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
