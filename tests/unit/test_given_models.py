"""Objects given in place of a model: the error names the call that makes an ensemble of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from checkpoint_models import ensemble, single, text
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import output_width

BATCHES = [(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))]


def masked(model: Any) -> None:
    with he.masked(model, [(0, 0)]):
        pass


ANY_MODEL: dict[str, Callable[[Any], object]] = {
    "prune": lambda model: he.prune(model, [(0, 0)]),
    "fuse": lambda model: he.fuse([model]),
    "extract_circuit": lambda model: he.extract_circuit(model, BATCHES, score="acc", budget=1),
    "masked": masked,
}
ENSEMBLE_ONLY: dict[str, Callable[[Any], object]] = {
    "finetune": lambda model: he.finetune(model, BATCHES, he.Recipe(learning_rate=0.1, steps=1), progress=False),
    "mc_dropout": lambda model: he.mc_dropout(model, 0.1, 2),
    "taylor": lambda model: he.taylor(model, BATCHES, budget=1),
    "calibrate": lambda model: he.calibrate(model, BATCHES),
    "retarget": lambda model: he.retarget(model, ["one", "two"]),
}


GIVEN: dict[str, tuple[object, str]] = {
    "module": (nn.Linear(2, 2), "Linear.*convert"),
    "path": (Path("run"), "from_pretrained.*run"),
    "name": ("run", "from_pretrained.*run"),
    "view": (he.mc_dropout(ensemble(single()), 0.1, 2), "MCDropout"),
    "nothing": (None, "NoneType"),
}


@pytest.mark.parametrize("name", [*ANY_MODEL, *ENSEMBLE_ONLY])
def test_what_is_no_model(name: str) -> None:
    for model, token in GIVEN.values():
        with pytest.raises(ConfigError, match=f"{name} takes.*{token}"):
            (ANY_MODEL | ENSEMBLE_ONLY)[name](model)


@pytest.mark.parametrize("name", ENSEMBLE_ONLY)
def test_a_dual_encoder_where_a_classifier_is_needed(name: str) -> None:
    widths = [output_width(config) for config in (single(), text())]
    dual = he.DualEncoder(ensemble(single()), ensemble(text()), he.Projections.fresh(*widths, 4))
    with pytest.raises(ConfigError, match=r"zero_shot\(\w+, class_names\)"):
        ENSEMBLE_ONLY[name](dual)
