"""Small helpers: modules are left in the mode they were in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from hydra_ensembles._utils import evaluation_mode
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.training.text import image_features
from unit.test_calibrate import tiny, validation
from zero_shot_models import NAMES, dual_of


@contextmanager
def partly_frozen(model: nn.Module, *frozen: nn.Module) -> Iterator[None]:
    """A model in training whose frozen parts are in evaluation mode; checked again at the end."""
    model.train()
    for part in frozen:
        part.eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert set(before.values()) == {True, False}
    yield
    assert {name: module.training for name, module in model.named_modules()} == before


def test_inside_everything_is_in_evaluation_mode_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Dropout()))
    with partly_frozen(model, model[1]):
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
        with pytest.raises(RuntimeError, match="stop"), evaluation_mode(model):
            raise RuntimeError("stop")


def test_who_leaves_evaluation_mode_last_puts_the_flags_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with partly_frozen(model, model[0]):
        first, second = evaluation_mode(model), evaluation_mode(model)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not any(module.training for module in model.modules())
        second.__exit__(None, None, None)


@pytest.mark.parametrize(
    "run",
    [
        lambda model: model.predict(validation()[0][0]),
        lambda model: he.calibrate(model, validation()),
        lambda model: evaluate(model, validation(), progress=False),
    ],
    ids=["predict", "calibrate", "evaluate"],
)
def test_frozen_parts_of_an_ensemble_stay_frozen(run: Callable[[he.Ensemble], object]) -> None:
    model = tiny()
    with partly_frozen(model, model.stem, model.encoder.layers[0]):
        run(model)


def test_frozen_parts_of_towers_stay_frozen() -> None:
    dual = dual_of(DUAL_CASES[0])
    with partly_frozen(dual, dual.text.encoder, dual.image.stem):
        he.zero_shot(dual, NAMES)
        image_features(dual, [torch.zeros_like(DUAL_CASES[0].pixels())])
