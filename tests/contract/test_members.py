"""M members in one pass == each member run alone, for every architecture."""

import pytest
import torch

from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from contract.models import stacked, variants


@torch.no_grad()
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_stacked_models_answer_like_the_models_in_turn_and_come_out_as_they_went_in(case: ArchitectureCase) -> None:
    inputs, ensemble = case.inputs(), stacked(case)
    expected = torch.cat([member(inputs) for member in variants(case)])
    assert ensemble.num_members == 3
    assert (ensemble(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max()
    for index, member in enumerate(variants(case)):
        taken = ensemble.member(index).state_dict()
        assert all(torch.equal(tensor, taken[name]) for name, tensor in member.state_dict().items())
