"""Running modules in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module, and every part of it, is in the mode it was in before.

    `train` would not do to put the mode back: it sets all parts alike, also those that someone keeps in evaluation
    mode while the rest trains.
    """
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()  # not set by hand: MC Dropout has its own idea of evaluation mode
        yield
    finally:
        for part, training in before:
            part.training = training
