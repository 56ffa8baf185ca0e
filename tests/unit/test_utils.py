"""Small helpers: modules are left in the mode they were in, files appear in one piece."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from hydra_ensembles._utils import evaluation_mode, write_atomically
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


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_respect_the_umask(tmp_path: Path, mask: int, expected: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "private" / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "private" / "file").stat().st_mode & 0o777 == expected
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["file"]
