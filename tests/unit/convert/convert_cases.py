"""What all tests of conversion say: refused with a token of the error, and answers that are near."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import ArchitectureCase, timm_model
from hydra_ensembles.convert import guess
from hydra_ensembles.errors import ConversionError

VIT = "vit_tiny_patch16_224"


def vit(**settings: Any) -> Any:
    return timm_model(VIT, **settings)


def refused(model: Any, token: str, **given: Any) -> None:
    """The model is refused, and the error has the token, a regular expression over all its lines."""
    with pytest.raises(ConversionError, match=f"(?s){token}"):
        he.convert(model, **given)


def look_for_no_remedy(patch: pytest.MonkeyPatch) -> None:
    """Let a declaration be refused without a look at all the settings that might help."""
    patch.setattr(guess, "_changes", lambda *given: ())


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def answers_alike(case: ArchitectureCase) -> None:
    """A converted model answers as its original does, for inputs of every shape that a case has."""
    model = case.build()
    converted = he.convert(model)
    for inputs in (case.inputs(), *(make() for make in case.other_inputs)):
        expected = case.logits(model, inputs)
        assert (converted(inputs)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
