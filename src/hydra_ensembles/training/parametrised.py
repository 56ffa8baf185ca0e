"""An ensemble some of whose weights are computed from other parameters, which train in their stead."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..batches import Inputs
from ..model.ensemble import Ensemble


class Parametrised(nn.Module):
    """Low-rank updates, scales, masks: what a method trains instead of the weights themselves.

    The ensemble inside is the one that runs; its own parameters train where they ask for gradients.

    Attributes:
        rates: Learning rates over the recipe's, by name of the parameter, where they are not 1.
        spared: Names of parameters that never decay.
    """

    INNER: ClassVar[str] = "ensemble."  # what names of parameters of the ensemble begin with here

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.rates: dict[str, float] = {}
        self.spared: frozenset[str] = frozenset()
        self.num_members, self.num_classes = ensemble.num_members, ensemble.num_classes

    @abstractmethod
    def computed(self) -> dict[str, Tensor]:
        """Weights of the ensemble, by their names there, in the shapes they have there."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Member logits `[M, B, C]` with the weights as they are computed now, in full precision as in the end."""
        with torch.autocast(self.ensemble.device.type, enabled=False):
            weights = self.computed()
        return functional_call(self.ensemble, weights, (inputs,))

    def prepare(self, inputs: Any) -> Inputs:
        """As `Ensemble.prepare`."""
        return self.ensemble.prepare(inputs)

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """All weights of the ensemble, those that are computed in their place."""
        return {**self.ensemble.state_dict(), **self.computed()}
