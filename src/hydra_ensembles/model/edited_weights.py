"""Detect whether a model still has the weights it was measured with: edits are counted, values compared on demand."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._utils import warn
from ..fingerprints import weights_digest
from .dropout import OurModel
from .metadata import Metadata

EDITED = "weights edited", "the weights of this ensemble were edited after it was measured"  # history, warning
_PLACING_HOOKS = ("torch.", "accelerate.")  # their hooks move weights and inputs
DROPPED = "its calibration, familiarity and metrics are dropped; calibrate again"


class Watched(OurModel):
    """A model whose metadata were measured with its weights, and are dropped when the weights change.

    torch counts in-place edits: checking the counters is cheap enough to do before every answer. Edits through `.data`
    and steps of fused optimizers are not counted: `verified_metadata` reads all weights.

    Attributes:
        metadata: Labels, preprocessing, calibration, history; for the current weights.
    """

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata
        self._parts: list[nn.Module] = []  # modules that hold weights and other modules
        self._counted: list[tuple[int, int]] | None = None  # counters when last checked; None: not watched
        self._digest: int | None = None  # of the measured values; None if nothing was measured
        self._masks = 0  # active masks: these change weights on purpose
        self.register_load_state_dict_post_hook(Watched._loaded)  # type: ignore[no-untyped-call]

    @property
    def metadata(self) -> Metadata:
        """Everything known besides the weights; anything measured before the weights were edited is dropped."""
        if not torch.compiler.is_compiling() and self._metadata.measured and self._edited():
            self._forget(*EDITED)
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.take_as_measured()

    def verified_metadata(self) -> Metadata:
        """The metadata, after comparing the weights with those that were measured, unless heads are masked.

        For saving, copying, evaluating or preparing a model, not for every answer.
        """
        compared = self.metadata.measured and self._digest is not None and not self._masks
        if compared and weights_digest(self.parameters()) not in (None, self._digest):
            self._forget(*EDITED)
        return self._metadata

    def take_as_measured(self) -> None:
        """Record the current weights as those that the metadata were measured with."""
        self._count()
        self._digest = weights_digest(self.parameters()) if self._metadata.measured else None

    def leave_unwatched(self) -> None:
        """Stop watching the weights: the metadata stay, whatever is edited."""
        self._parts, self._counted, self._digest = [], None, None

    def _count(self) -> None:
        """Count edits of the weights from now on; the digest of the measured values stays."""
        self._parts = list(self.modules())
        self._counted = self._counters()

    def _counters(self) -> list[tuple[int, int]]:
        """Identities of submodules and parameters, with the number of in-place edits; values are not read."""
        parts = [(id(child), 0) for part in self._parts for child in part._modules.values()]
        weights = (weight for part in self._parts for weight in part._parameters.values() if weight is not None)
        # inference tensors have no version counter: -1
        return parts + [(id(weight), -1 if weight.is_inference() else weight._version) for weight in weights]

    def _edited(self) -> bool:
        """Whether a weight was edited in place, or a weight or submodule replaced, since counting began."""
        before = self._counted
        if before is None:
            return False
        counters = self._counters()
        meant = self._counted is not before  # another thread applied a mask meanwhile
        return counters != before and not meant and -1 not in (count for _, count in counters)

    def _forget(self, line: str, problem: str) -> None:
        self._metadata = self._metadata.after(line)
        self._digest = None  # nothing measured is left to compare with
        warn(f"{problem}: {DROPPED}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by `to`, `half` and the like. A new device keeps the values of weights; a new dtype rounds them."""
        home = next(self.parameters(), None)
        rounded = home is not None and self._digest is not None and fn(home.detach()[:0]).dtype != home.dtype
        if rounded:
            self.verified_metadata()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if rounded and self._digest is not None:
            self._digest = weights_digest(self.parameters())
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *arguments: Any) -> None:
        """Called by `load_state_dict`, also from an enclosing model: other weights drop the calibration."""
        if self._counted is not None and self.verified_metadata().measured:
            for name, old in self.named_parameters():
                new = state_dict.get(prefix + name)
                if isinstance(new, Tensor) and not old.is_meta and not torch.equal(old, new.to(old)):
                    problem = "other weights are loaded into an ensemble that was measured before"
                    self._forget("other weights loaded", problem)
                    break
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _loaded(self, _: object) -> None:
        self.take_as_measured()

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy: it counts edits from scratch, and masked weights were not measured."""
        metadata = valid_metadata(self, "copied")
        digest = None if self._masks else self._digest
        return {**self.__dict__, "_metadata": metadata, "_parts": [], "_masks": 0, "_digest": digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._counted is not None:
            self._count()


def valid_metadata(model: Watched, operation: str) -> Metadata:
    """Metadata that still hold for a copy of the current weights; `operation` names the copy in warnings.

    With heads masked, the weights are not those that were measured, and the copy keeps the mask.
    """
    if operation not in ("copied", "exported"):  # these keep hooks
        _warn_of_hooks(model, operation)
    metadata = model.verified_metadata()
    if not model._masks:
        return metadata
    if metadata.measured:
        warn(f"this ensemble is {operation} with heads masked, but was measured with all of them: {DROPPED}")
    return metadata.after(f"{operation} with heads masked")


def _warn_of_hooks(model: nn.Module, operation: str) -> None:
    """Warn if modules have forward hooks, which do not run in anything made from the weights."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(_PLACING_HOOKS):
                warn(
                    f"{name or 'the ensemble'} has the forward hook {getattr(hook, '__qualname__', hook)}, and what is "
                    f"{operation} does not run it: if the hook changes what is computed, answers differ"
                )
                return


@contextmanager
def masking(*models: Watched, on: bool) -> Iterator[None]:
    """Apply or remove a mask inside: unlike earlier edits, this does not drop the calibration."""
    for model in models:
        _ = model.metadata
    watched = [model for model in models if model._counted is not None]
    for model in watched:
        model._counted = None  # stop counting: other threads must not see these edits
    try:
        yield
    finally:
        for model in models:
            model._masks += 1 if on else -1
        for model in watched:
            model._count()
