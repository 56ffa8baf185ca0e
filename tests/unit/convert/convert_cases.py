"""What all tests of conversion say: refused with a token of the error, and answers that are near."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import timm_model
from hydra_ensembles.convert import guess
from hydra_ensembles.errors import ConversionError

VIT = "vit_tiny_patch16_224"
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 60, (3, 11), generator=torch.Generator().manual_seed(2))


def vit(**settings: Any) -> Any:
    return timm_model(VIT, **settings)


def changed(model: Any, place: str, value: Any) -> Any:
    """The model with another part, number or setting in a place."""
    above, _, leaf = place.rpartition(".")
    setattr(attrgetter(above)(model) if above else model, leaf, value)
    return model


def refused(model: Any, token: str, **given: Any) -> None:
    """The model is refused, and the error has the token, a regular expression over all its lines."""
    with pytest.raises(ConversionError, match=f"(?s){token}"):
        he.convert(model, **given)


def around(
    kind: type[Any], before: Callable[..., Any] = lambda model, x: x, after: Callable[[Tensor], Tensor] = lambda x: x
) -> type[Any]:
    """Such a model that does something to its input first, or to its answers."""

    class Around(kind):
        def forward(self, x: Tensor) -> Tensor:
            return after(super().forward(before(self, x)))

    return Around


def look_for_no_remedy(patch: pytest.MonkeyPatch) -> None:
    """Let a declaration be refused without a look at all the settings that might help."""
    patch.setattr(guess, "_changes", lambda *given: ())


def convert_wrongly(patch: pytest.MonkeyPatch, change: Callable[[he.Ensemble], object]) -> None:
    """Let every conversion end with an ensemble that is changed."""
    from_state = he.Ensemble.from_state

    @torch.no_grad()
    def changed(*given: Any) -> he.Ensemble:
        ensemble = from_state(*given)
        change(ensemble)
        return ensemble

    patch.setattr(he.Ensemble, "from_state", changed)


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def alike(found: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    """Measured by the largest of all numbers."""
    assert (found - expected).abs().max() <= within * expected.abs().max()
