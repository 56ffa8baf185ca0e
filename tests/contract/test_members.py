"""M members in one pass == the members one after another, for every architecture."""

import pytest
import torch
from architectures import ArchitectureCase, perturbed
from contract.cases import ALL_CASES

import hydra_ensembles as he

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)


def three_models(case: ArchitectureCase) -> list[he.Ensemble]:
    """Three models that differ everywhere, stem and readout included."""
    return [he.convert(perturbed(case.build(), seed), **case.convert_kwargs) for seed in (11, 12, 13)]


@torch.no_grad()
def test_stacked_models_answer_like_the_models_in_turn(case: ArchitectureCase) -> None:
    members, inputs = three_models(case), case.inputs()
    stacked = he.Ensemble.stack(members)
    expected = torch.cat([member(inputs) for member in members])
    assert stacked.num_members == 3
    assert (stacked(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max()


@torch.no_grad()
def test_a_member_taken_out_is_the_member_put_in(case: ArchitectureCase) -> None:
    members = three_models(case)
    stacked = he.Ensemble.stack(members)
    for index, member in enumerate(members):
        taken = stacked.member(index).state_dict()
        assert all(torch.equal(tensor, taken[name]) for name, tensor in member.state_dict().items())


def test_every_parameter_of_a_stack_gets_a_gradient(case: ArchitectureCase) -> None:
    stacked = he.Ensemble.stack(three_models(case)).train()
    stacked(case.inputs()).square().sum().backward()
    for name, parameter in stacked.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
