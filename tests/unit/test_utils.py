"""Small helpers: modules are left in the mode they were in."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from hydra_ensembles._utils import evaluation_mode


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
