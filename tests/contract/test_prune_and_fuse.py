"""masked == pruned, fused and stacked == each member run alone, saved == loaded, for every architecture."""

from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase, close
from checkpoint_models import same_bits
from contract.models import ALL_CASES, answers, base, members, pruned_variants, stacked, variants
from hydra_ensembles.heads.masking import masked

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)

UNEVEN = [
    [(0, 1), (0, 2), (1, 0)],
    [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)],  # leaves none in the second layer
    [(0, 0), (0, 1), (0, 2), (0, 3)],
]
EVEN = [[(0, 0), (1, 1)], [(0, 1), (1, 2)], [(0, 3), (1, 3)]]


@torch.no_grad()
@pytest.mark.parametrize("heads", UNEVEN[:2], ids=["some", "layer-emptied"])
def test_pruned_equals_masked(case: ArchitectureCase, heads: list[tuple[int, int]]) -> None:
    whole, inputs, before = base(case), case.inputs(), answers(case)
    (pruned,) = members(case, [heads])
    with masked(whole, heads):
        expected = whole(inputs)
    assert close(answers(case, *heads), expected)
    assert not close(expected, before)
    assert torch.equal(whole(inputs), before)
    assert sum(len(layer) for layer in pruned.heads[0]) == 8 - len(heads)


@torch.no_grad()
@pytest.mark.parametrize("choice", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_fused_equals_members_in_turn_when_shared_groups_are_equal(
    case: ArchitectureCase, choice: list[list[tuple[int, int]]]
) -> None:
    inputs, chosen = case.inputs(), members(case, choice)
    expected = torch.cat([answers(case, *heads) for heads in choice])
    for settings in ({}, {"norms": "mean", "readout": "mean"}, {"stem": "separate", "mlp": "separate"}):
        fused = he.fuse(chosen, **settings)
        assert close(fused(inputs), expected)
    assert fused.config.trunk == 0


@torch.no_grad()
def test_a_common_first_layer_becomes_the_trunk(case: ArchitectureCase) -> None:
    choice = [[(0, 1), (1, head)] for head in range(3)]
    inputs, chosen, expected = case.inputs(), members(case, choice), [answers(case, *heads) for heads in choice]
    fused = he.fuse(chosen)
    assert fused.config.trunk == 1
    assert close(fused(inputs), torch.cat(expected))
    taken = [fused.member(index) for index in range(3)]
    assert [member.heads for member in taken] == [member.heads for member in chosen]
    assert all(close(member(inputs), logits) for member, logits in zip(taken, expected, strict=True))


def test_gradients_reach_every_parameter_of_a_fused_ensemble(case: ArchitectureCase) -> None:
    fused = he.fuse(members(case, EVEN)).train()
    fused(case.inputs()).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in fused.parameters())


@torch.no_grad()
def test_stacked_models_answer_like_the_models_in_turn_and_come_out_as_they_went_in(case: ArchitectureCase) -> None:
    inputs, ensemble = case.inputs(), stacked(case)
    expected = torch.cat([member(inputs) for member in variants(case)])
    assert ensemble.num_members == 3
    assert (ensemble(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max()
    for index, member in enumerate(variants(case)):
        taken = ensemble.member(index).state_dict()
        assert all(torch.equal(tensor, taken[name]) for name, tensor in member.state_dict().items())


@torch.no_grad()
def test_a_fused_ensemble_with_uneven_heads_comes_back(case: ArchitectureCase, tmp_path: Path) -> None:
    """Single models of every kind are in `test_saved_models`."""
    ensemble = he.fuse(pruned_variants(case), stem="mean")
    assert (ensemble.num_members, ensemble.config.sharing.mlp, ensemble.config.sharing.norms) == (3, True, False)
    ensemble.save_pretrained(tmp_path)
    loaded = he.Ensemble.from_pretrained(tmp_path)
    assert (loaded.config, loaded.metadata) == (ensemble.config, ensemble.metadata)
    saved, read = ensemble.state_dict(), loaded.state_dict()
    assert list(read) == list(saved)
    assert all(same_bits(tensor, read[name]) for name, tensor in saved.items())
    assert same_bits(loaded(case.inputs()), ensemble(case.inputs()))
