"""Rewriting weights for inference changes no result, and does what it promises."""

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.model.config import KeptHeads, Sharing
from hydra_ensembles.optimize.simplify import blocks, simplified
from random_ensembles import SHAPES, random_batches, random_ensemble

UNEVEN: KeptHeads = (((0, 1, 2), (0, 3), (1,)), ((0, 2), (0, 1, 2, 3), (2, 3)), ((1,), (3,), (0, 1, 2)))
WITH_GAPS: KeptHeads = (((), (0, 3), ()), ((0, 2), (), ()), ((1,), (3,), ()))
SHARINGS = {
    "nothing": Sharing(),
    "stem": Sharing(stem=True),
    "hydra": Sharing(stem=True, mlp=True),
    "all-but-heads": Sharing(stem=True, mlp=True, norms=True, readout=True),
}


def same(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-10 * expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("heads", [UNEVEN, WITH_GAPS], ids=["uneven", "gaps"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_stay_for_every_plan_sharing_and_architecture(shape: str, sharing: str, heads: KeptHeads) -> None:
    ensemble = random_ensemble(shape, heads, SHARINGS[sharing])
    inputs = random_batches(ensemble, (3, 1))
    expected = [ensemble(batch) for batch, _ in inputs]
    assert same(simplified(ensemble)(inputs[0][0]), expected[0])
    for plan in ("batched", "loop"):
        fast = ensemble.optimize(plans=[plan])
        assert all(same(fast(batch), logits) for (batch, _), logits in zip(inputs, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_trunk_and_a_single_member_stay_the_same(shape: str) -> None:
    whole = tuple(range(4))
    heads: KeptHeads = tuple((whole, *member[1:]) for member in UNEVEN)
    for ensemble in (random_ensemble(shape), random_ensemble(shape, heads, SHARINGS["hydra"], trunk=1)):
        batch = random_batches(ensemble, (5,))[0][0]
        assert same(ensemble.optimize()(batch), ensemble(batch))


def test_norms_of_members_go_into_their_heads_so_that_one_input_is_left() -> None:
    ensemble = random_ensemble("image-cls", UNEVEN, SHARINGS["hydra"])
    simple = simplified(ensemble)
    assert all(isinstance(block.norm1, nn.LayerNorm) for block in blocks(simple))
    assert not any(isinstance(block.norm2, nn.LayerNorm) for block in blocks(simple))  # the MLP is shared: it cannot
    own_mlps = simplified(random_ensemble("image-cls", UNEVEN, SHARINGS["stem"]))
    assert all(isinstance(block.norm2, nn.LayerNorm) for block in blocks(own_mlps))
    fast = ensemble.optimize(plans=["batched"]).module("batched")
    assert [block.attention.one_input for block in blocks(fast)] == [True, False, False]


def test_only_the_bias_of_the_query_is_left() -> None:
    simple = simplified(random_ensemble("image-mean-layerscale", UNEVEN))
    for block in blocks(simple):
        bias = block.attention.qkv_bias
        assert bias is not None
        assert bias[:, 0].abs().min() > 0
        assert torch.count_nonzero(bias[:, 1:]) == 0
        assert block.attention.scale is None
        assert block.mlp.scale is None


def test_a_norm_on_the_keys_keeps_their_bias() -> None:
    biased = random_ensemble("image-qknorm-cls", UNEVEN)
    attention = blocks(simplified(biased))[0].attention
    assert attention.qkv_bias is not None
    assert attention.qkv_bias[:, 1].abs().min() > 0
    batch = random_batches(biased, (3,))[0][0]
    with torch.no_grad():
        expected = biased(batch)
        for plan in ("batched", "loop"):
            assert same(biased.optimize(plans=[plan])(batch), expected)


@torch.no_grad()
def test_images_of_another_size_and_bad_ones_take_the_usual_way() -> None:
    ensemble = random_ensemble("image-cls", UNEVEN, SHARINGS["hydra"])
    fast = ensemble.optimize()
    other = torch.randn(2, 3, 8, 4, dtype=torch.float64)
    assert same(fast(other), ensemble(other))
    with pytest.raises(ValueError, match="does not divide"):
        fast(torch.randn(2, 3, 5, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected images"):
        fast(torch.randn(3, 4, 6, dtype=torch.float64))


@torch.no_grad()
def test_the_ensemble_itself_is_not_touched() -> None:
    ensemble = random_ensemble("image-mean-layerscale", UNEVEN)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    ensemble.optimize()(random_batches(ensemble, (2,))[0][0])
    after = ensemble.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
