"""Output vectors of single heads, and how well they separate ID from OOD data."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..arguments import checked
from ..batches import Batches, Inputs, iterate
from ..errors import DataError
from ..metrics.inputs import check_finite
from ..model.dropout import dropping
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..model.layers import Block, Context
from .masking import attention_of, existing_heads
from .ranking import Head

SHRINKAGE = 1e-6  # share of the mean variance added to the diagonal, to make a covariance invertible


@checked
def head_vectors(ensemble: Ensemble, batches: Batches, layers: Iterable[int] | None = None) -> dict[Head, Tensor]:
    """Return the output of each head for each input, `[N, d_k]` in float32 on the CPU, before the output projection.

    It is the vector of the class token; for models without one, the mean over all tokens except padding.

    Args:
        ensemble: A model with one member; pruned heads are not included.
        batches: Inputs; labels are not read.
        layers: Layers whose heads to return; None for the last one.

    Raises:
        DataError: There are no batches, or the output of a head is not finite.
    """
    require_single(ensemble, "head_vectors", classifies=False)
    heads = existing_heads(ensemble.config, (ensemble.num_layers - 1,) if layers is None else layers)
    by_layer: dict[int, list[Head]] = {}
    for head in heads:
        by_layer.setdefault(head.layer, []).append(head)
    collected: dict[Head, list[Tensor]] = {head: [] for head in heads}
    with dropping(False), torch.no_grad():
        for index, inputs, _ in iterate(batches, "batches", labelled=False):
            for layer, vectors in _vectors_of(ensemble, inputs, by_layer):  # [B, H, d_k]
                for head, vector in zip(by_layer[layer], vectors.float().cpu().unbind(1), strict=True):
                    check_finite(vector, f"vectors of head {head}, batch {index},", "batches")
                    collected[head].append(vector)
    return {head: torch.cat(parts) for head, parts in collected.items()}


def _vectors_of(ensemble: Ensemble, inputs: Inputs, layers: Collection[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each layer with the vectors of its heads for one batch, `[B, H, d_k]`."""
    has_class_token = ensemble.config.readout.pool in ("cls", "distilled", "cls_mean")
    x, context = ensemble.embed(*ensemble.unpack(ensemble.prepare(inputs)))  # [1, B, T, d]
    for layer in range(min(max(layers, default=-1) + 1, ensemble.num_layers)):
        block = cast(Block, ensemble.encoder.layers[layer])
        if layer in layers:
            z = attention_of(ensemble, layer).mix(block.attention_input(x), context)  # [B, T, H, d_k]
            yield layer, z[:, 0] if has_class_token else _mean_token(z, context.key_mask)
        x = block(x, context)
    pooling = ensemble.readout.map
    if pooling is not None and ensemble.num_layers in layers:
        tokens = ensemble.readout.before_pool(x)
        yield ensemble.num_layers, pooling.attention.mix(tokens, Context(), pooling.query(tokens))[:, 0]


def _mean_token(z: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of `[B, T, H, d_k]` over tokens, ignoring padding."""
    if key_mask is None:
        return z.mean(1)
    weight = key_mask[:, :, None, None].to(z.dtype)
    return (z * weight).sum(1) / weight.sum(1)


@dataclass(frozen=True)
class CentroidDistance:
    """Distance between the means of ID and OOD vectors: Euclidean, and Mahalanobis with the ID covariance."""

    euclidean: float
    mahalanobis: float


@checked
def centroid_distance(inside: Tensor, outside: Tensor) -> CentroidDistance:
    """Distance between the mean of ID vectors `[N, d]` and that of OOD vectors `[K, d]`; computed in float64."""
    for name, vectors in (("inside", inside), ("outside", outside)):
        if vectors.dim() != 2 or not len(vectors) or not bool(vectors.isfinite().all()):
            raise DataError(f"{name} must be one or more finite vectors [N, d]; got {list(vectors.shape)}")
    if len(inside) < 2 or inside.shape[1] != outside.shape[1]:
        shapes = f"ID vectors {list(inside.shape)} and OOD vectors {list(outside.shape)}"
        raise DataError(f"got {shapes}; give at least two ID vectors, and the same width for both")
    inside, outside = inside.double(), outside.double()
    gap = outside.mean(0) - inside.mean(0)  # [d]
    covariance = torch.atleast_2d(inside.T.cov())
    covariance.diagonal().add_(SHRINKAGE * covariance.diagonal().mean().clamp(min=1e-300))
    squared = gap @ torch.linalg.lstsq(covariance, gap[:, None], driver="gelsd").solution[:, 0]
    return CentroidDistance(float(gap.norm()), float(squared.clamp(min=0).sqrt()))
