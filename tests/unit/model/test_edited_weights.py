"""Hooks and computed weights, of which a new model knows nothing; test_ensemble.py shows what counts as an edit."""

from typing import Any

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, HydraWarning
from hydra_ensembles.model.ensemble import with_valid_metadata
from random_ensembles import random_batches, random_ensemble

DEEDS: list[tuple[str, Any]] = [
    ("saved", lambda one, folder: one.save_pretrained(folder)),
    ("optimized", lambda one, _: one.optimize()),
    ("calibrated", lambda one, _: he.calibrate(one, random_batches(one), share=0.5, familiarity=None)),
    ("fitted", lambda one, _: he.fit_familiarity(one, random_batches(one), "knn")),
    ("taken apart", lambda one, _: one.member(0)),
    ("pruned", lambda one, _: he.prune(one, [(0, 0)])),
    ("joined", lambda one, _: he.fuse([one, random_ensemble(seed=1)], stem="separate")),
    ("joined", lambda one, _: he.soup([one, random_ensemble(seed=1)])),
    ("joined", lambda one, _: he.Ensemble.stack([one, random_ensemble(seed=1)])),
]


@pytest.mark.parametrize(("deed", "make"), DEEDS)
@pytest.mark.filterwarnings("ignore:.*one start:hydra_ensembles.HydraWarning")
def test_what_is_made_of_weights_alone_tells_of_hooks_and_refuses_other_weights(deed: str, make: Any, tmp_path) -> None:
    """The result runs no hooks and cannot store computed weights (parametrized, or pruned by torch)."""
    hooked, computed = random_ensemble(), random_ensemble()
    hooked.encoder.layers[1].register_forward_hook(lambda module, given, found: found * 2)
    with pytest.warns(HydraWarning, match=rf"encoder\.layers\.1 has the forward hook .*lambda.* {deed} does not"):
        make(hooked, tmp_path)
    torch.nn.utils.parametrizations.weight_norm(computed.readout.classifier, "weight")
    if deed not in ("calibrated", "fitted"):
        with pytest.raises(ConfigError, match=r"readout\.classifier.*remove_parametrizations"):
            make(computed, tmp_path)
    assert with_valid_metadata(computed, "exported") is computed  # exported files trace the model
    with pytest.raises(ConfigError, match=r"readout\.classifier.*shape none expected, got \[1, 1, 1\]"):
        he.Ensemble.from_state(random_ensemble().config, computed.state_dict())
