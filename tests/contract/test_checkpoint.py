"""Saved and loaded == never saved, for every architecture."""

from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from checkpoint_models import same_bits
from contract.all_architectures import ALL_CASES
from contract.models import pruned_variants


@torch.no_grad()
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
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
