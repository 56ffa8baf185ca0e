"""M members in one pass == each member run alone, for every architecture."""

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from contract.models import stacked, variants

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)


@torch.no_grad()
def test_stacked_models_answer_like_the_models_in_turn(case: ArchitectureCase) -> None:
    inputs, ensemble = case.inputs(), stacked(case)
    expected = torch.cat([member(inputs) for member in variants(case)])
    assert ensemble.num_members == 3
    assert (ensemble(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max()


@torch.no_grad()
def test_a_member_taken_out_is_the_member_put_in(case: ArchitectureCase) -> None:
    for index, member in enumerate(variants(case)):
        taken = stacked(case).member(index).state_dict()
        assert all(torch.equal(tensor, taken[name]) for name, tensor in member.state_dict().items())


def test_every_parameter_of_a_stack_gets_a_gradient(case: ArchitectureCase) -> None:
    ensemble = he.Ensemble.stack(variants(case)).train()
    ensemble(case.inputs()).square().sum().backward()
    for name, parameter in ensemble.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
