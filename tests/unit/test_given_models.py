"""Objects given in place of a model: the error names the call that makes an ensemble of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from checkpoint_models import ensemble, single, text
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import output_width

BATCHES = [(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))]
FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "finetune": lambda model: he.finetune(model, BATCHES, he.Recipe(learning_rate=0.1, steps=1), progress=False),
    "mc_dropout": lambda model: he.mc_dropout(model, 0.1, 2),
    "taylor": lambda model: he.taylor(model, BATCHES, budget=1),
    "calibrate": lambda model: he.calibrate(model, BATCHES),
    "retarget": lambda model: he.retarget(model, ["one", "two"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_classifier_is_told_how_to_become_one(name: str) -> None:
    widths = [output_width(config) for config in (single(), text())]
    dual = he.DualEncoder(ensemble(single()), ensemble(text()), he.Projections.fresh(*widths, 4))
    for model, token in (
        (dual, r"zero_shot\(\w+, class_names\)"),
        (nn.Linear(2, 2), f"{name} takes.*Linear.*convert"),
        ("run", f"{name} takes.*load.*run"),
        (he.mc_dropout(ensemble(single()), 0.1, 2), f"{name} takes.*MCDropout"),
    ):
        with pytest.raises(ConfigError, match=token):
            FUNCTIONS[name](model)
