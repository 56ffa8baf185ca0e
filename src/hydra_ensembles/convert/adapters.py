"""Adapters of peft: merged into a copy of their model that shares all weights that they leave alone."""

from copy import deepcopy
from typing import Any

from torch import nn

from ..errors import ConversionError


def is_adapted(model: object) -> bool:
    """Whether it is a model of peft."""
    return type(model).__module__.startswith("peft.")


def merged(adapted: Any) -> nn.Module:
    """The model inside, with its active adapters merged; the given one is not changed."""
    _require_floating(adapted)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type
        raise ConversionError(f"an adapter of the type {kind} has no weights to merge; LoRA and its kin have")
    try:
        model: nn.Module = twin(adapted).merge_and_unload(safe_merge=True)  # does not change weights in place
    except ValueError as error:
        raise ConversionError(f"peft cannot merge the adapter: {error}") from error
    return model.eval().requires_grad_(True)  # frozen were those that the adapter left alone


def twin(model: nn.Module) -> Any:
    """A copy of the modules around the same tensors, in parameters of its own."""
    shared: dict[int, Any] = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()}
    return deepcopy(model, shared)


def _require_floating(model: Any) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        way = "load its base without quantisation, and the adapter on that: PeftModel.from_pretrained(base, folder)"
        raise ConversionError(f"the base of the adapter is quantised; {way}")
