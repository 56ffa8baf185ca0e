"""Small helpers: modules are left in the mode they were in, warnings go to whom they concern."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from hydra_ensembles._utils import evaluation_mode, noted, warn
from hydra_ensembles.demo import load_backbone
from hydra_ensembles.errors import HydraWarning
from hydra_ensembles.model.metadata import Calibration


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


def test_what_is_noted_is_not_warned_of_and_only_by_this_thread() -> None:
    with noted() as outer:
        warn("one")
        with noted() as inner:
            warn("two")
        with ThreadPoolExecutor(1) as pool, pytest.warns(HydraWarning, match="three"):
            pool.submit(warn, "three").result()
    assert (outer, inner) == (["one"], ["two"])
    with pytest.warns(HydraWarning, match="four"):
        warn("four")


def test_a_warning_names_the_line_of_the_caller_whatever_of_torch_and_python_lies_between() -> None:
    def run(one: he.Ensemble) -> None:
        one.predict(torch.randn(1, 3, 64, 64))  # torch.no_grad is around it

    def mask(one: he.Ensemble) -> None:
        with he.masked(one, [(0, 0)]):  # a generator, which contextlib runs
            pass

    for use in (run, mask):
        base = load_backbone().with_metadata(calibration=Calibration((2.0,), 0.5))
        with torch.no_grad():
            next(base.parameters()).mul_(2.0)
        with pytest.warns(HydraWarning, match="edited") as found:
            use(base)
        assert {one.filename for one in found} == {__file__}
