"""Finding out that a live model computes something else than its class does.

A declaration goes by the class of a model and by its weights. A forward hook, or a `forward` set on an
instance, changes the predictions and is in neither of them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from ..errors import ConversionError

# These attach hooks that move tensors between devices, collect outputs or switch gradients on.
_HARMLESS_HOOKS = ("accelerate.", "transformers.", "torch.nn.parallel.", "timm.models._features")
# These wrap a forward to compile it, to move tensors or to choose the precision.
_HARMLESS_WRAPPERS = ("accelerate.", "torch.")


def require_unaltered(wrapped: nn.Module, model: nn.Module, architecture: str) -> None:
    """Refuse a model whose predictions a hook or a replaced forward may change.

    Args:
        wrapped: The model as it was given, perhaps inside `torch.compile` or data parallelism.
        model: The model inside.
        architecture: Its name, for the message.
    """
    for name, module in wrapped.named_modules():
        for hook in _forward_hooks(module):
            if not _origin(hook).startswith(_HARMLESS_HOOKS):
                raise ConversionError(
                    f"{architecture}: {_place(name, module)} has the forward hook {_origin(hook)}."
                    f"{getattr(hook, '__qualname__', type(hook).__name__)}, which a converted model would not run; "
                    "remove it first with the remove() of the handle that registering it returned"
                )
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and not _is_forward_of_class(forward, module):
            raise ConversionError(
                f"{architecture}: the forward of {_place(name, module)} was replaced on the object, and a converted "
                "model would compute what its class does; delete the attribute first (del module.forward)"
            )


def _forward_hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _is_forward_of_class(forward: Any, module: nn.Module) -> bool:
    """Whether a forward on the object is the one of its class, perhaps in the wrappers of known libraries."""
    original = type(module).forward
    while forward is not None:
        if getattr(forward, "__func__", forward) is original:
            return True
        if not _origin(forward).startswith(_HARMLESS_WRAPPERS):
            return False
        inner = getattr(forward, "_torchdynamo_orig_callable", None)
        forward = inner or getattr(forward, "__wrapped__", None)
    return False


def _origin(function: Callable[..., Any]) -> str:
    """The module a function was written in; `functools.wraps` cannot disguise it."""
    if isinstance(function, partial):
        return _origin(function.func)
    if isinstance(function, MethodType):
        return _origin(function.__func__)
    namespace = getattr(function, "__globals__", None)
    return str(type(function).__module__ if namespace is None else namespace["__name__"])


def _place(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"
