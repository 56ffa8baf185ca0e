"""Rewriting weights for inference changes no result, and does what it promises."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hydra_ensembles.model.config import EnsembleConfig, KeptHeads, Sharing, TextStemConfig
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.layers import Attention
from hydra_ensembles.optimize.simplify import PlainNorm, blocks, branching_layer, fold_block, simplified
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


def with_random_weights(ensemble: Ensemble) -> Ensemble:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter == 1.0))
    return ensemble.eval()


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
def test_grouped_products_give_the_same(shape: str) -> None:
    parts = SHAPES[shape]
    stem = replace(parts.stem, embedding_width=16) if isinstance(parts.stem, TextStemConfig) else parts.stem
    encoder = replace(parts.encoder, width=16, head_dim=4, mlp_width=16)  # rows of whole 16 bytes, as it wants them
    config = EnsembleConfig(stem, encoder, parts.readout, UNEVEN, SHARINGS["hydra"])
    ensemble = with_random_weights(Ensemble(config))
    batch = random_batches(ensemble, (3,))[0][0]
    inputs = batch.float() if isinstance(batch, Tensor) else batch
    expected = ensemble(inputs)
    assert (ensemble.optimize(plans=["grouped"])(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()


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
    assert all(isinstance(block.norm1, PlainNorm) for block in blocks(simple))
    assert not any(isinstance(block.norm2, PlainNorm) for block in blocks(simple))  # the MLP is shared: it cannot
    fast = ensemble.optimize(plans=["batched"]).module("batched")
    assert [block.attention.one_input for block in blocks(fast)] == [True, False, False]


def test_norms_go_into_mlps_of_their_own() -> None:
    simple = simplified(random_ensemble("image-cls", UNEVEN, SHARINGS["stem"]))
    assert all(isinstance(block.norm2, PlainNorm) for block in blocks(simple))


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
    ensemble = random_ensemble("image-qknorm-gated", UNEVEN)
    config = replace(ensemble.config, encoder=replace(ensemble.config.encoder, qkv_bias=True))
    biased = with_random_weights(Ensemble(config).double())
    attention = blocks(simplified(biased))[0].attention
    assert attention.qkv_bias is not None
    assert attention.qkv_bias[:, 1].abs().min() > 0
    batch = random_batches(biased, (3,))[0][0]
    with torch.no_grad():
        expected = biased(batch)
        for plan in ("batched", "loop"):
            assert same(biased.optimize(plans=[plan])(batch), expected)


def test_folding_a_block_leaves_its_output() -> None:
    ensemble = random_ensemble("image-mean-layerscale", UNEVEN, seed=3)
    block = blocks(ensemble)[1]
    x = torch.randn(3, 2, 7, 10, dtype=torch.float64)
    with torch.no_grad():
        expected = block(x, None)
        fold_block(block)
        assert isinstance(block.attention, Attention)
        assert same(block(x, None), expected)


@torch.no_grad()
def test_heads_in_common_are_found_after_folding() -> None:
    single = random_ensemble("image-cls")
    members = tuple((kept, (0, 1), (2,)) for kept in ((0, 1, 2), (1, 2, 3), (0, 3)))
    state = {}
    for name, tensor in single.state_dict().items():
        layer = int(name.split(".")[2]) if name.startswith("encoder.layers.") else None
        if layer is not None and name.rsplit(".", 1)[1] in ("qkv", "qkv_bias", "out"):
            state[name] = torch.cat([tensor[list(member[layer])] for member in members])
        elif name.startswith("stem."):
            state[name] = tensor
        else:
            state[name] = torch.cat([tensor] * 3)
    ensemble = Ensemble.from_state(replace(single.config, heads=members, sharing=Sharing(stem=True)), state)
    simple = simplified(ensemble)
    assert branching_layer(simple) == 0
    assert len(blocks(simple)[0].attention.qkv) == 4  # of eight
    batch = random_batches(ensemble, (3,))[0][0]
    for plan in ("batched", "loop"):
        assert same(ensemble.optimize(plans=[plan])(batch), ensemble(batch))


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
    fast = ensemble.optimize()
    batch = random_batches(ensemble, (2,))[0][0]
    logits = fast(batch)
    after = ensemble.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    for parameter in ensemble.parameters():
        parameter.zero_()
    assert torch.equal(fast(batch), logits)
