"""M members in one pass == the members one after another, for every architecture."""

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from contract.models import variants

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)


@torch.no_grad()
def test_stacked_models_answer_like_the_models_in_turn(case: ArchitectureCase) -> None:
    members, inputs = variants(case), case.inputs()
    stacked = he.Ensemble.stack(members)
    expected = torch.cat([member(inputs) for member in members])
    assert stacked.num_members == 3
    assert (stacked(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max()


@torch.no_grad()
def test_a_member_taken_out_is_the_member_put_in(case: ArchitectureCase) -> None:
    members = variants(case)
    stacked = he.Ensemble.stack(members)
    for index, member in enumerate(members):
        taken = stacked.member(index).state_dict()
        assert all(torch.equal(tensor, taken[name]) for name, tensor in member.state_dict().items())


def test_every_parameter_of_a_stack_gets_a_gradient(case: ArchitectureCase) -> None:
    stacked = he.Ensemble.stack(variants(case)).train()
    stacked(case.inputs()).square().sum().backward()
    for name, parameter in stacked.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
