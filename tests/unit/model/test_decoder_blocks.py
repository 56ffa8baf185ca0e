"""Blocks of decoders on tiny random models in float64: every proof of the contract on each of their shapes."""

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from circuit_models import evidence, random_problem
from hydra_ensembles.heads.masking import masked, working_copy
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import DECODERS, WIDTH, random_batches, random_ensemble

pytestmark = pytest.mark.filterwarnings("ignore::hydra_ensembles.HydraWarning")
CHOICES = {
    "even": [[(0, 0), (1, 1)], [(0, 0), (1, 0)], [(0, 0), (2, 2)]],
    "uneven": [[(0, 1), (0, 2), (1, 0)], [(1, 0), (1, 1), (1, 2), (1, 3)], [(0, 0), (0, 1), (2, 3)]],
}


def same(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-10 * expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("shape", DECODERS)
def test_pruned_equals_masked_fused_equals_members_and_every_plan_the_ensemble(shape: str, choice: str) -> None:
    model = random_ensemble(shape)
    inputs = random_batches(model, (4,), ragged=True)[0][0]
    members = [he.prune(model, heads) for heads in CHOICES[choice]]
    for member, heads in zip(members, CHOICES[choice], strict=True):
        with masked(model, heads):
            assert same(member(inputs), model(inputs))
    expected = torch.cat([member(inputs) for member in members])
    own = random_ensemble(shape, seed=1)
    for ensemble, logits in (
        (he.fuse(members), expected),
        (he.fuse([*members, own], stem="mean", mlp="separate"), None),
        (Ensemble.stack([*members, own]), torch.cat([expected, own(inputs)])),
    ):
        answers = ensemble(inputs)
        assert logits is None or same(answers, logits)
        assert all(same(ensemble.member(index)(inputs)[0], answers[index]) for index in range(ensemble.num_members))
        fast = ensemble.optimize(plans=["batched", "loop"])
        assert all(same(fast.module(plan)(inputs), answers) for plan in ("batched", "loop"))


@pytest.mark.parametrize("shape", DECODERS)
def test_a_working_copy_shares_nothing_and_exact_circuits_are_the_naive_ones(shape: str) -> None:
    problem = random_problem(shape)
    inputs = problem.id_batches[0][0]
    copy = working_copy(problem.model)
    assert same(copy(inputs), problem.model(inputs))
    assert copy.encoder.layers[0].attention.qkv is not None
    assert evidence(problem.extract(method="exact", budget=3)) == evidence(problem.extract(method="naive", budget=3))


@torch.no_grad()
@pytest.mark.parametrize("shape", [shape for shape in DECODERS if DECODERS[shape].encoder.causal])
def test_padding_on_either_side_equals_single_rows(shape: str) -> None:
    model = random_ensemble(shape)
    words = [torch.randint(2, 20, (1, length), generator=torch.Generator().manual_seed(length)) for length in (1, 5, 8)]
    alone = torch.cat([model(ids) for ids in words], dim=1)
    for left in (False, True):
        missing = [(8 - ids.shape[1], 0) if left else (0, 8 - ids.shape[1]) for ids in words]
        ids = torch.cat([torch.nn.functional.pad(one, pad, value=1) for one, pad in zip(words, missing, strict=True)])
        masks = [torch.nn.functional.pad(torch.ones_like(one), pad) for one, pad in zip(words, missing, strict=True)]
        batch = {"input_ids": ids, "attention_mask": torch.cat(masks)}
        for one in (model, model.optimize(plans=["loop"])):
            assert same(one(batch), alone)


def test_only_the_token_that_is_read_goes_through_the_last_mlp() -> None:
    model = random_ensemble("text-grouped")
    seen: list[int] = []
    for block in model.encoder.layers:
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[2]))
    model(random_batches(model, (3,))[0][0])
    assert seen == [7, 7, 1]


def test_keys_and_values_are_stored_once_for_each_group_and_go_with_the_last_of_its_heads() -> None:
    model = random_ensemble("text-grouped")
    shapes = {name: list(one.shape) for name, one in model.named_parameters() if ".0.attention." in name}
    assert shapes["encoder.layers.0.attention.query"] == [4, 1, 3, WIDTH]
    assert shapes["encoder.layers.0.attention.key_value"] == [2, 2, 3, WIDTH]
    assert not any("qkv" in name for name in shapes)
    one, both = he.prune(model, [(0, 1)]), he.prune(model, [(0, 0), (0, 1)])
    assert [len(pruned.encoder.layers[0].attention.key_value) for pruned in (one, both)] == [2, 1]
    work = [pruned.describe().multiply_adds for pruned in (model, one, both)]
    tokens = model.config.stem.max_tokens
    head, group = 2 * 3 * (WIDTH * tokens + tokens**2), 2 * 3 * WIDTH * tokens
    assert (work[0] - work[1], work[1] - work[2]) == (head, head + group)
