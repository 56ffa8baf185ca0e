"""Building blocks of the methods: joining copies of one model, fresh weights, views."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._utils import torch_seeded
from ..batches import Inputs
from ..model.config import GROUPS, EnsembleConfig, Sharing
from ..model.ensemble import Ensemble, singles
from ..model.layers import GroupedLinear, OurModel
from ..model.member_states import join_states, warn_if_equal
from ..model.metadata import Calibration, Metadata
from ..prediction import Prediction
from ..training.recipe import Recipe


def joined(members: Sequence[Ensemble], sharing: Sharing, trunk: int = 0) -> Ensemble:
    """Join single models into one ensemble; parts in `sharing` must be equal and are stored once, others per member."""
    if len(members) == 1:
        return Ensemble.from_state(members[0].config, members[0].state_dict(), members[0].metadata)
    states, heads, metadata = singles(members)
    config = replace(members[0].config, heads=heads, sharing=sharing, trunk=trunk)
    return Ensemble.from_state(config, join_states(config, states), metadata)


def warn_equal(ensemble: Ensemble) -> Ensemble:
    """Return the result of a method; warns if two members are equal after training."""
    states, heads, _ = singles([ensemble])
    warn_if_equal(states, heads, "(shuffle data, or let dropout or classifiers, reinit_classifier='random', differ)")
    return ensemble


class View(OurModel):
    """A view of a model: it answers like an `Ensemble`, uncalibrated, and cannot be saved."""

    model: Ensemble  # prepares inputs
    metadata: Metadata  # has the class names

    @torch.no_grad()
    def predict(self, *given: Any, check_finite: bool = True, **named: Any) -> Prediction:
        """Like `Ensemble.predict`, uncalibrated."""
        return Calibration().prediction(self(self.prepare(*given, **named)), self.metadata.labels or None, check_finite)

    def prepare(self, *given: Any, **named: Any) -> Inputs:
        """Like `Ensemble.prepare`."""
        return self.model.prepare(*given, **named)


def shared_parts(model: Ensemble, recipe: Recipe) -> tuple[Sharing, int]:
    """What separately trained members share under a recipe, and the number of layers in their common trunk."""
    above = recipe.last_blocks is not None  # then the stem is frozen, too
    shared = {group: group not in recipe.train_groups or (above and group == "stem") for group in GROUPS}
    return Sharing(**shared), 0 if recipe.last_blocks is None else model.num_layers - recipe.last_blocks


def fresh(config: EnsembleConfig, seed: int, metadata: Metadata) -> Ensemble:
    """An untrained ensemble, its weights drawn with the seed."""
    with torch_seeded(seed, torch.device("cpu")):
        return Ensemble(config, metadata).eval()


# --- a linear map with its bias --------------------------------------------------------------------------------------


def append_one(features: Tensor, biased: bool) -> Tensor:
    """Append a one to the inputs `[B, d]` of a biased linear map, so that the bias is one more weight."""
    return torch.cat([features, torch.ones_like(features[:, :1])], dim=1) if biased else features


def with_bias(linear: GroupedLinear) -> Tensor:
    """A copy of the map `[e, d (+ 1)]` of one member, a bias as its last column, in float64 on the CPU."""
    weight, bias = linear.weight[0].detach().cpu().to(torch.float64, copy=True), linear.bias
    return weight if bias is None else torch.cat([weight, bias[0].detach().cpu().to(weight)[:, None]], dim=1)
