"""Detecting models that do not compute what their class does: hooks, replaced methods, replaced or changed parts."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import ConversionError
from .core import ACTIVATIONS, is_identity, qualified_name, refuse

# --- hooks and methods ---------------------------------------------------------------------------------------

# Hooks from these modules only move tensors between devices, collect outputs or enable gradients.
_HARMLESS_HOOKS = ("accelerate.", "transformers.", "torch.nn.parallel.", "timm.models._features")
# Wrappers from these modules only compile a method, move tensors or set the precision.
_HARMLESS_WRAPPERS = ("accelerate.", "torch.")


def require_unaltered(wrapped: nn.Module, model: nn.Module) -> None:
    """Raise if forward hooks (also on wrappers) or methods replaced on an object may change what the model computes."""
    for name, module in wrapped.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            origin = _origin(hook)
            if not origin.startswith(_HARMLESS_HOOKS):
                called = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise ConversionError(
                    f"{name or 'the model'} ({type(module).__name__}) has the forward hook {called} of {origin}, which "
                    "is not converted; remove it first, by its handle's remove() or what torch.nn.utils has for that"
                )
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise ConversionError(f"{name} is compiled on its own; put back the module inside it, its _orig_mod")
        for method, attribute in vars(module).items():
            original = getattr(type(module), method, None)
            if callable(original) and not _is_method(attribute, original):
                raise ConversionError(
                    f"{method} of {name or 'the model'} ({type(module).__name__}) was replaced on the object, but a "
                    f"converted model would compute what its class does; delete it first (del module.{method})"
                )


def _is_method(function: Any, original: Any) -> bool:
    """Whether a function on the object is the method of its class, possibly in wrappers of known libraries."""
    while function is not None:
        if getattr(function, "__func__", function) is original:
            return True
        if not _origin(function).startswith(_HARMLESS_WRAPPERS):
            return False
        function = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)
    return False


def has_foreign_forward(model: nn.Module) -> bool:
    """Whether someone replaced `forward`, or a part of it, of a class of the model, as by `Block.forward = ...`."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        methods = [method for name, method in vars(kind).items() if name.startswith("forward")]
        if any(_origin(method).split(".")[0] != kind.__module__.split(".")[0] for method in methods):
            return True
    return False


def _origin(function: Callable[..., Any]) -> str:
    """Name of the module in which a function was defined, even if `functools.wraps` changed its attributes."""
    if isinstance(function, partial):
        return _origin(function.func)
    if isinstance(function, MethodType):
        return _origin(function.__func__)
    namespace = getattr(function, "__globals__", None)
    return str(type(function).__module__ if namespace is None else namespace["__name__"])


# --- parts ---------------------------------------------------------------------------------------------------

_LIBRARIES = ("torch.nn.modules.", "timm.", "torchvision.", "open_clip.")
_NO_OPS = ("Identity", "Dropout", "DropPath", "PatchDropout", "Sequential", "ModuleList")  # no-ops in evaluation mode
_ACTIVATIONS = frozenset(name for names in ACTIVATIONS.values() for name in names)
MERGE = "merge them first: merge_and_unload() of the peft model"
# What to do about a part, by prefix of its qualified class name.
_REMEDIES = {
    ("peft.",): f"the model without adapters; {MERGE}",
    ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "transformers.integrations."): (
        "the model as it was before it was quantised"
    ),
    ("torch.nn.utils.parametrize.",): (
        "the model with plain weights; torch.nn.utils.parametrize.remove_parametrizations restores them"
    ),
}
# Settings that do not change the output, or are given by the shapes of the tensors.
_IGNORED_ATTRIBUTES = (
    *("training", "inplace", "init_values", "fused_attn", "layer_idx", "num_labels", "name_or_path", "loss_type"),
    *("gradient_checkpointing", "grad_checkpointing", "kernel_config", "in_features", "out_features", "num_embeddings"),
)


def require_known_parts(model: nn.Module) -> None:
    """Raise if a model has custom parts, differs from what its class builds, or has blocks that differ.

    A model of transformers is compared with what its class builds from its configuration. Models of other libraries
    cannot be rebuilt: their parts must be instances of exactly the library's classes (a subclass, as adapters use, or a
    parametrized weight may compute anything), and all blocks like the first. Comparing outputs checks the rest.
    """
    if type(model).__module__.startswith("transformers."):
        try:
            with torch.device("meta"):
                built = type(model)(deepcopy(model.config))
        except Exception as error:  # the library may raise anything
            raise ConversionError(f"no model can be built from its edited configuration ({error})") from error
        agreement = "the model and model.config in agreement: change the one that is wrong"
        _require_alike(model, built, "by its configuration", agreement)
        return
    for name, module in _parts_with_parameters(model):
        kind = qualified_name(module)
        if not kind.startswith(_LIBRARIES):
            raise refuse(f"{name} is a {kind}, and it is not known what that computes", _remedy(kind))
        if re.fullmatch(r"(?!patch_embed)(.*\.)?(blocks|resblocks|layers)", name):
            blocks = list(module.named_children())
            for leaf, part in blocks[1:]:
                _require_alike(part, blocks[0][1], "in the first block", name=f"{name}.{leaf}")


def _parts_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules by name, except in top-level children without parameters, such as an attached loss."""
    for top, part in model.named_children():
        if any(True for _ in part.parameters()):
            yield from part.named_modules(prefix=top)


def require_read_parts(model: nn.Module) -> None:
    """Raise if a model has an unexpected part without parameters that computes something.

    Parts with parameters are found by their unused weights. Models of transformers were compared with their config.
    """
    if type(model).__module__.startswith("transformers."):
        return
    for name, module in _parts_with_parameters(model):
        kind = type(module).__name__
        activates = kind in _ACTIVATIONS and re.fullmatch(r"(.*\.)?(act|gelu|mlp\.1)", name)
        read = activates or kind in _NO_OPS or kind.startswith("RotaryEmbedding")
        if not read and not any(True for _ in (*module.parameters(), *module.children())):
            bare = getattr(module, "elementwise_affine", True) is False
            told = " without weights (elementwise_affine=False)" if bare else ""
            way = "the same with elementwise_affine=True, whose weights of 1 and biases of 0 change no answer"
            raise refuse(f"{name} is an unexpected {qualified_name(module)}{told}", way if bare else None)


def _remedy(name: str) -> str | None:
    return next((remedy for beginnings, remedy in _REMEDIES.items() if name.startswith(beginnings)), None)


def _require_alike(module: nn.Module, like: nn.Module, says: str, remedy: str | None = None, *, name: str = "") -> None:
    """Raise if a module differs from another in its class, its settings or its parts."""
    for path, verb, actual, expected in _differences(module, like):
        where = ".".join(part for part in (name, path) if part) or "the model"
        raise refuse(f"{where}{verb} {actual}, and {expected} {says}", _remedy(str(actual)) or remedy)


def _differences(module: nn.Module, like: nn.Module, path: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Yield path, verb, actual value and value in `like` for each difference."""
    if type(module) is not type(like):
        yield path, " is a", qualified_name(module), f"a {qualified_name(like)}"
        return
    for setting, expected in vars(like).items():
        if setting.startswith("_") or setting in _IGNORED_ATTRIBUTES or not _is_plain(expected):
            continue
        if callable(getattr(type(like), setting, None)):  # a method, assigned to the object
            continue
        actual = vars(module).get(setting)
        if _function(actual) != _function(expected):
            yield f"{path}.{setting}" if path else setting, " is", repr(actual), repr(expected)
    parts = {leaf: part for leaf, part in module._modules.items() if part is not None}  # with modules registered twice
    for leaf, expected in like.named_children():
        inner = f"{path}.{leaf}" if path else leaf
        if leaf in parts:
            removed = is_identity(parts[leaf]) and leaf in _REMOVED
            if not removed and not (_is_drop_path(parts[leaf]) and _is_drop_path(expected)):
                yield from _differences(parts[leaf], expected, inner)
        elif leaf not in _REMOVED and not (leaf == "pooler_activation" and "pooler" not in parts):  # ALBERT's
            yield inner, " is", "missing", f"a {type(expected).__qualname__}"
    if isinstance(module, nn.Sequential | nn.ModuleList) and len(parts) > len(list(like.children())):
        yield path, " has", f"{len(parts)} parts", f"{len(list(like.children()))}"


# Parts that may be missing (`add_pooling_layer=False`), or be an identity in place of a classifier.
_REMOVED = ("pooler", "classifier", "cls_classifier", "distillation_classifier")


def _is_drop_path(part: nn.Module) -> bool:
    """Whether a part is stochastic depth, or an identity (rate 0); its rate is read from every block."""
    return is_identity(part) or type(part).__name__ == "DropPath"


def _function(value: Any) -> Any:
    """Reduce a method or a partial to something comparable; return other values unchanged."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return getattr(value, "__func__", value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str) or callable(value)


# --- classifiers behind dropout ------------------------------------------------------------------------------


def with_plain_classifier(model: nn.Module) -> tuple[nn.Module, list[float]]:
    """Replace a classifier `nn.Sequential(nn.Dropout, …, nn.Linear)` by its linear layer; also return dropout rates.

    Users often replace a library's classifier like this, and torchvision's `heads` also by the linear layer itself. The
    result is a shallow copy that shares all parts, or the model itself if there is no such classifier.
    """
    if not type(model).__module__.startswith(("timm.", "torchvision.", "transformers.")) or hasattr(model, "head_dist"):
        return model, []
    for place in ("head", "classifier", "heads"):
        part = model._modules.get(place)
        if part is None:
            continue
        *dropouts, last = _parts(part) or [part]
        stands_there = part._modules.get("head") if place == "heads" else part
        plain = type(last) is nn.Linear or is_identity(last)
        if plain and last is not stands_there and all(type(one) is nn.Dropout for one in dropouts):
            opened = copy(model)
            opened._modules = {**model._modules, place: nn.Sequential(OrderedDict(head=last))}
            if place != "heads":
                opened._modules[place] = last
            return opened, [one.p for one in dropouts]
    return model, []


def _parts(module: nn.Module) -> list[Any]:
    """Flatten nested `nn.Sequential`s into a list of modules."""
    return [part for one in module for part in _parts(one)] if type(module) is nn.Sequential else [module]
