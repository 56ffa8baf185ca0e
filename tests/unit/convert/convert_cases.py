"""Helpers for tests of conversion: changed models, expected refusals and comparisons of logits."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import timm_model
from hydra_ensembles.errors import ConversionError

VIT = "vit_tiny_patch16_224"
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 60, (3, 11), generator=torch.Generator().manual_seed(2))


def vit(**settings: Any) -> Any:
    return timm_model(VIT, **settings)


def changed(model: Any, place: str, value: Any) -> Any:
    """The model with one part, number or setting replaced."""
    above, _, leaf = place.rpartition(".")
    setattr(attrgetter(above)(model) if above else model, leaf, value)
    return model


def refused(model: Any, token: str, **given: Any) -> None:
    """Check that the model is refused with an error that matches the token, a regular expression over all lines."""
    with pytest.raises(ConversionError, match=f"(?s){token}"):
        he.convert(model, **given)


def around(
    kind: type[Any], before: Callable[..., Any] = lambda model, x: x, after: Callable[[Tensor], Tensor] = lambda x: x
) -> type[Any]:
    """A subclass that applies `before` to its input and `after` to its output."""

    class Around(kind):
        def forward(self, x: Tensor) -> Tensor:
            return after(super().forward(before(self, x)))

    return Around


def convert_wrongly(patch: pytest.MonkeyPatch, change: Callable[[he.Ensemble], object]) -> None:
    """Make every conversion end with an ensemble changed by `change`."""
    from_state = he.Ensemble.from_state

    @torch.no_grad()
    def changed(*given: Any, **how: Any) -> he.Ensemble:
        ensemble = from_state(*given, **how)
        change(ensemble)
        return ensemble

    patch.setattr(he.Ensemble, "from_state", changed)


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def alike(found: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    """Assert that the largest difference is small relative to the largest expected value."""
    assert (found - expected).abs().max() <= within * expected.abs().max()
