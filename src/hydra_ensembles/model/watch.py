"""Whether a model still has the weights it was measured with: edits are counted, and values compared where asked."""

from collections.abc import Callable

from torch import Tensor, nn

from .states import weights_digest


class WeightWatch:
    """The weights that a model was measured with, and whether they changed since; what follows from it, others say.

    Edits in place are counted by torch: looking at the counters is cheap, so that every answer can be preceded by it.
    No counter shows edits through `.data` and steps of fused optimizers: `values_differ` reads all weights.

    The model is handed to whatever looks at it anew, and not kept: copies and pickles of a model hold no second one.

    Attributes:
        masks: How many masks are on the weights now: they are not what was measured, and that is meant.
    """

    def __init__(self) -> None:
        self.masks = 0
        self._places: list[nn.Module] = []  # all parts of the model: where weights and further parts lie
        self._counted: list[tuple[int, int]] | None = None  # the weights as they were last seen; None: not watched
        self._digest: int | None = None  # of the values that were measured; None where nothing was

    @property
    def on(self) -> bool:
        """Whether anything is watched: not while a model is built, nor where it was told to `stop`."""
        return self._counted is not None

    def take(self, model: nn.Module, measured: bool) -> None:
        """What is known is of the weights as they are now; where something was `measured`, of their values too."""
        self.count(model)
        self._digest = weights_digest(model.parameters()) if measured else None

    def count(self, model: nn.Module) -> None:
        """Edits of the weights count from now on; what was measured with which values stays as it is."""
        self._places = list(model.modules())
        self._counted = self._counters()

    def forget(self) -> None:
        """Nothing measured is left to compare values with."""
        self._digest = None

    def stop(self) -> None:
        """Edits are not looked for any more."""
        self._places, self._counted, self._digest = [], None, None

    def edited(self) -> bool:
        """Whether a weight was edited in place, or it or a part replaced, since counting began; no value is read."""
        if self._counted is None:
            return False
        now = self._counters()
        return now != self._counted and -1 not in (count for _, count in now)

    def values_differ(self, model: nn.Module) -> bool:
        """Whether the weights have other values than those that were measured; masks are no other values."""
        if self._digest is None or self.masks:
            return False
        return weights_digest(model.parameters()) not in (None, self._digest)

    def rounded_by(self, change: Callable[[Tensor], Tensor], model: nn.Module) -> bool:
        """Whether a change of dtype gives the weights that were measured other bits; another device has the same."""
        home = next(model.parameters(), None)
        return home is not None and self._digest is not None and change(home.detach()[:0]).dtype != home.dtype

    def take_rounded(self, model: nn.Module) -> None:
        """The same weights have other bits now, unless what was measured with them was forgotten."""
        if self._digest is not None:
            self._digest = weights_digest(model.parameters())

    def for_copy(self) -> "WeightWatch":
        """What a copy of the model takes along; it counts anew. With masks on, its weights were not measured."""
        found = WeightWatch()
        found._counted = self._counted
        found._digest = None if self.masks else self._digest
        return found

    def _counters(self) -> list[tuple[int, int]]:
        """Which parts and parameters there are, and how often each was edited in place: without a look at values."""
        parts = [(id(one), 0) for place in self._places for one in place._modules.values()]
        parameters = (one for place in self._places for one in place._parameters.values() if one is not None)
        return parts + [
            (id(one), -1 if one.is_inference() else one._version) for one in parameters
        ]  # -1: nobody counts
