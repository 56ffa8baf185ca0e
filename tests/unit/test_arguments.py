"""Errors about arguments: where, what is accepted, and what was probably meant; settings that do not go together.

The values each setting accepts are listed in `attack/bad_settings.py`, which tries all that must be refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.arguments import Checked, Range, checked
from hydra_ensembles.data.batching import TrainTransform
from hydra_ensembles.demo import DemoSettings
from hydra_ensembles.errors import ConfigError
from unit.pipeline.build_cases import recipe


@dataclass(frozen=True)
class Settings(Checked):
    members: Annotated[int, Range(2, 9)] = 3


@checked
def made(
    model: Tensor, ood: Mapping[str, Any] | None = None, *, average: int = 0, settings: Settings | None = None
) -> int:
    return average


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: made(x, averge=2), r"made\(\) got an unexpected .*'averge'; did you mean 'average'\?"),
        (
            lambda x: made(x, members=5),
            r"made\(\) .*'members' is a setting of Settings: settings=Settings\(members=5\)",
        ),
        (lambda x: made(), r"made\(\) missing a required argument: 'model'$"),
        (lambda x: he.Prediction.from_logits(x, score_name="msp"), "did you mean 'score'"),  # not of Prediction
    ],
)
def test_a_call_that_does_not_fit_names_the_function_and_what_may_be_meant(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(torch.zeros(2))


GOOD: dict[Any, dict[str, Any]] = {
    he.Recipe: {"learning_rate": 0.1, "steps": 10},
    he.HydraConfig: {"prune": 4},
    he.ImagePreprocessing: {"size": (8, 8)},
    TrainTransform: {"size": (8, 8)},
}
WHOLE = recipe(train_groups=("stem", "attention", "mlp", "norms", "readout"))


@pytest.mark.parametrize(
    ("kind", "changes", "token"),
    [
        (he.Recipe, {"warmup": 10}, "warmup"),  # all of the steps
        (he.Recipe, {"epochs": 2}, "epochs"),  # in addition to steps
        (he.Recipe, {"grid": (0.1,)}, "grid"),  # in addition to a learning rate
        (he.Recipe, {"train_groups": ("mlp",), "reinit_classifier": "zeros"}, "reinit_classifier"),
        (he.HydraConfig, {"pool": 4}, "pool"),  # equal to the number of pruned heads
        (he.HydraConfig, {"recipe": WHOLE}, "stem"),
        (he.HydraConfig, {"strategy": "branches", "prune": None}, "training"),
        (he.HydraConfig, {"whole": True, "members": 1}, "members"),
        (he.HydraConfig, {"average_trunk": True, "training": "together"}, "average_trunk"),
        (DemoSettings, {"shared_layers": 6}, "last_blocks"),
        (he.ImagePreprocessing, {"mean": (0.0, 0.0)}, "mean"),
        (TrainTransform, {"crop_scale": (0.9, 0.5)}, "crop_scale"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(kind: Any, changes: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        kind(**{**GOOD.get(kind, {}), **changes})
