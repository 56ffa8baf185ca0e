"""Weights in eight bits: close to the ensemble, a quarter of the memory."""

import pytest
import torch

from hydra_ensembles.model.config import KeptHeads, Sharing
from hydra_ensembles.model.layers import GroupedLinear
from hydra_ensembles.optimize.freeze import Int8Linear, Int8Weight, dense
from unit.heads.random_ensembles import SHAPES, random_batches, random_ensemble

HEADS: KeptHeads = (((0, 1, 2), (0, 3), ()), ((0, 2), (0, 1, 2, 3), (2, 3)), ((1,), (3,), (0, 1, 2)))


def test_a_weight_is_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(3, 5, 7)
    stored = Int8Weight(weight, summed=2)
    assert stored.values.dtype == torch.int8
    assert stored.scale.shape == (3, 5, 1, 1)
    assert bool(((stored() - weight).abs() <= 0.5001 * stored.scale[..., 0]).all())
    assert torch.equal(dense(stored, 1, 3), stored()[1:3])
    assert torch.equal(dense(weight, 1, 3), weight[1:3])


def test_a_scale_is_for_32_neighbours() -> None:
    weight = torch.ones(2, 96, 4)
    weight[0, 40] = 1000.0  # in the second block of the first row
    stored = Int8Weight(weight, summed=1)
    assert stored.scale.shape == (2, 3, 1, 4)
    off = (stored() - weight).abs().amax(2)  # [2, 96]
    assert float(off[0, 32:64].max()) == 1.0  # lost beside the large number
    assert float(off[0, :32].max()) < 1e-6
    assert float(off[1].max()) < 1e-6


def test_rows_of_zeros_stay_zero() -> None:
    assert torch.equal(Int8Weight(torch.zeros(2, 3), summed=1)(), torch.zeros(2, 3))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("members", [1, 3])
def test_a_linear_layer_takes_every_number_of_members(copies: int, members: int) -> None:
    layer = GroupedLinear(copies, 6, 4)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(members, 2, 5, 6)
    with torch.no_grad():
        expected, actual = layer(x), Int8Linear(layer)(x)
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) < 0.02 * float(expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_stay_close_in_every_architecture(shape: str) -> None:
    ensemble = random_ensemble(shape, HEADS, Sharing(stem=True, mlp=True), dtype=torch.float32)
    fast = ensemble.optimize(weights="int8")
    for batch, _ in random_batches(ensemble, (4, 2)):
        inputs = batch.float() if isinstance(batch, torch.Tensor) else batch
        expected = ensemble(inputs)
        error = (fast(inputs) - expected).norm() / expected.norm()
        assert 0 < float(error) < 0.05


def test_projections_take_a_quarter_of_the_memory() -> None:
    ensemble = random_ensemble("image-cls", HEADS, dtype=torch.float32)
    module = ensemble.optimize(weights="int8").module("loop")
    int8 = [tensor for tensor in module.buffers() if tensor.dtype == torch.int8]
    encoder = ensemble.encoder.named_parameters()
    projections = [p for name, p in encoder if name.endswith((".qkv", ".out", ".weight")) and "norm" not in name]
    assert sum(tensor.nbytes for tensor in int8) * 4 == sum(tensor.nbytes for tensor in projections)
