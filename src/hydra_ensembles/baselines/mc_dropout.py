"""MC Dropout as an ensemble: the members are forward passes of one model with different dropout masks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble, build_with_state
from ..model.layers import dropping
from ..settings import Rate, Whole, require
from .building_blocks import View


class MCDropout(View):
    """A view of an ensemble in which every dropout pass is a member; `forward` returns `[M·passes, B, C]`.

    Each pass drops a share `p` of the activations at random, whether the ensemble was trained with dropout or without;
    it is not changed, and its weights are shared. All passes of every member run in one batch.

    Dropout is applied where transformers have it in training: on the embedded tokens and, in each layer, after the
    attention projection, the MLP activation and the MLP output; on attention weights and the input of the classifier
    only if the model has dropout there. The ensemble's calibration is not used: it was fitted to other probabilities.
    Each call uses its own generator, seeded with `seed`, so batches of one size get the same masks.

    Examples:
        >>> he.mc_dropout(base, p=0.1, passes=5)(torch.randn(2, 3, 64, 64)).shape
        torch.Size([5, 2, 7])
    """

    def __init__(self, ensemble: Ensemble, p: float, passes: int, seed: int = 0) -> None:
        super().__init__()
        require_ensemble(ensemble, "mc_dropout")
        self.p, self.passes, self.seed = require("p", p, Rate), require("passes", passes, Whole), seed
        encoder, last = ensemble.config.encoder, ensemble.config.readout
        dropped = replace(encoder, projection_dropout=p, activation_dropout=p, output_dropout=p, drop_path=())
        config = replace(
            ensemble.config,
            stem=replace(ensemble.config.stem, dropout=p),
            encoder=replace(dropped, attention_dropout=p if encoder.attention_dropout else 0.0),
            readout=replace(last, dropout=p if last.dropout else 0.0, hidden_dropout=p if last.hidden_dropout else 0.0),
        )
        self.metadata = replace(ensemble.metadata, calibration=None, familiarity=None)
        weights = ensemble.state_dict()  # shared, not copied
        self.model = build_with_state(lambda: Ensemble(config, self.metadata), weights, ensemble.frozen)
        self.kind, self.num_members = ensemble.kind, self.passes * ensemble.num_members
        self.num_classes = ensemble.num_classes
        self.eval()

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Member logits `[M·passes, B, C]` for the inputs of an ensemble; the passes of a member are consecutive."""
        inputs, *extra = self.model.unpack(*given, **named)
        if self.p == 0.0:  # every pass is the same
            return self.model._forward(inputs, *extra).repeat_interleave(self.passes, dim=0)
        many = torch.cat([inputs] * self.passes)  # [passes·B, …], like the mask and the segments
        extra = [None if x is None else torch.cat([x] * self.passes) for x in extra]
        with dropping(torch.Generator(self.device).manual_seed(self.seed)):
            logits = self.model._forward(many, *extra)  # [M, passes·B, C]
        return logits.unflatten(1, (self.passes, -1)).flatten(0, 1)  # [M·passes, B, C]


mc_dropout = MCDropout
"""A model whose passes with dropout are members; see `MCDropout`."""
