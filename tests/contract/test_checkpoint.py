"""Saved and loaded == never saved, for every architecture."""

from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from checkpoint_models import same_bits
from contract.all_architectures import ALL_CASES
from contract.models import base, pruned_variants

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)


@torch.no_grad()
def assert_comes_back(ensemble: he.Ensemble, case: ArchitectureCase, folder: Path) -> None:
    ensemble.save_pretrained(folder)
    loaded = he.Ensemble.from_pretrained(folder)
    assert loaded.config == ensemble.config
    assert loaded.metadata == ensemble.metadata
    saved, read = ensemble.state_dict(), loaded.state_dict()
    assert list(read) == list(saved)
    assert all(same_bits(tensor, read[name]) for name, tensor in saved.items())
    assert same_bits(loaded(case.inputs()), ensemble(case.inputs()))


def test_a_single_model_comes_back(case: ArchitectureCase, tmp_path: Path) -> None:
    assert_comes_back(base(case), case, tmp_path)


def test_a_fused_ensemble_with_uneven_heads_comes_back(case: ArchitectureCase, tmp_path: Path) -> None:
    fused = he.fuse(pruned_variants(case), stem="mean")
    assert (fused.num_members, fused.config.sharing.mlp, fused.config.sharing.norms) == (3, True, False)
    assert_comes_back(fused, case, tmp_path)
