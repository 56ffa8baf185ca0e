"""The current model's activations at the input of every block: where all candidates branch off."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...batches import move
from .samples import Samples, parts
from .working_model import WorkingModel


class GroupActivations:
    """Activations of one group of samples in the current model, by level.

    Level l is the input of block l, `[g, T, d]`; level 0 is what the stem gives. Levels that are not kept are
    computed again from the last kept one below.

    Attributes:
        key_mask: `[g, T]`, true where a token may be attended to; None when all may.
        ids: `[g, T]`, the token ids of a text model; None for images.
    """

    def __init__(self, model: WorkingModel, embedded: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> None:
        self.model = model
        self.key_mask, self.ids = key_mask, ids
        self.levels: dict[int, Tensor] = {0: embedded}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.levels[0])

    @property
    def token_shape(self) -> tuple[int, int]:
        """Tokens of a sample, and their width."""
        return self.levels[0].shape[1], self.levels[0].shape[2]

    def at(self, level: int, rows: Tensor) -> Tensor:
        """Inputs of a block for some samples, `[1, S, T, d]`."""
        start = max(kept for kept in self.levels if kept <= level)
        x = self.levels[start].index_select(0, rows)[None]
        mask = self.mask(rows)
        for layer in range(start, level):
            x = self.model.block(layer, x, mask)
        return x

    def mask(self, rows: Tensor) -> Tensor | None:
        """Key mask of some samples, `[S, T]`."""
        return None if self.key_mask is None else self.key_mask.index_select(0, rows)

    def recompute(self, above: int, kept: Sequence[int], batch_size: int) -> Tensor:
        """Bring all levels above one up to date, keep the given ones, and return the pooled features `[g, d]`."""
        device = self.levels[0].device
        for level in kept:
            if level > above and level not in self.levels:
                self.levels[level] = torch.empty_like(self.levels[0])
        fresh = {level: self.levels.pop(level) for level in sorted(self.levels) if level > above}
        features = []
        for part in parts(len(self), batch_size):
            rows = torch.arange(part.start, part.stop, device=device)
            x, mask = self.at(above, rows), self.mask(rows)
            for layer in range(above, self.model.layers):
                x = self.model.block(layer, x, mask)
                if layer + 1 in fresh:
                    fresh[layer + 1][part] = x[0]
            features.append(self.model.features(x, mask, None if self.ids is None else self.ids[rows]))
        self.levels |= fresh
        return torch.cat(features)


def embed(model: WorkingModel, samples: Samples, batch_size: int) -> list[GroupActivations]:
    """Run the stem on all samples."""
    groups = []
    for group in samples.groups:
        pieces, key_mask = [], None
        for rows in parts(len(group), batch_size):
            mask, segments = (
                None if one is None else one[rows] for one in (group.attention_mask, group.token_type_ids)
            )
            inputs = move(group.inputs[rows], model.ensemble.device, model.ensemble.dtype)
            assert isinstance(inputs, Tensor)
            pieces.append(model.ensemble.embed(inputs, mask, segments)[0][0])  # [1, B, T, d] -> [B, T, d]
        if group.attention_mask is not None:
            key_mask = group.attention_mask.bool()
        ids = group.inputs if model.ensemble.kind == "text" else None
        groups.append(GroupActivations(model, torch.cat(pieces), key_mask, ids))
    return groups
