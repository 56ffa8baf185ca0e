"""The comparison of answers: a model that computes something else than its table says is refused, not converted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_cases import changed, convert_wrongly, refused, vit
from torch import nn

import hydra_ensembles as he
from architectures import images, torchvision_model
from architectures_clip import DUAL_CASES
from architectures_transformers import MODERNBERT, VISION, transformers_model
from contract.models import ALL_CASES

KNOWN: dict[str, Any] = {str(case): case for case in (*ALL_CASES, *DUAL_CASES)}


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Conversions corrupt the parameters whose names are added to this list."""
    names: list[str] = []

    def add_noise(ensemble: he.Ensemble) -> None:
        for parameter in (one for name, one in ensemble.named_parameters() if name in names):
            parameter.add_(torch.linspace(-3, 3, parameter.shape[-1]))

    convert_wrongly(monkeypatch, add_noise)
    return names


@pytest.mark.parametrize(
    "name",
    [
        *(
            "timm-vit",
            "torchvision-vit",
            "transformers-albert",
            "transformers-modernbert",
            "sentence-transformers-bert",
        ),
        *("own-vit", "own-rope-bert", "transformers-siglip", "open_clip-plain"),
    ],
)
def test_a_wrong_conversion_is_refused(name: str, disturbed: list[str]) -> None:
    case = KNOWN[name]
    model, given = case.build(), getattr(case, "convert_kwargs", {})
    disturbed += ["encoder.layers.1.norm2.weight"]
    refused(model, "answers.*differ by", **given)
    disturbed[:] = ["stem.words", "stem.position"]
    refused(model, "answers.*differ by", **given)


@pytest.mark.parametrize(
    "build",
    [
        lambda: vit(num_classes=0),
        lambda: changed(torchvision_model(), "heads", nn.Sequential()),
        lambda: transformers_model("Dinov2Model", VISION),
        lambda: transformers_model("ModernBertModel", MODERNBERT),
    ],
)
def test_features_are_compared_where_the_classifier_is_new(build: Callable[[], Any], disturbed: list[str]) -> None:
    """Its new classifier is the same whenever it is drawn."""
    model = build()
    first, again = (he.convert(model, num_labels=3) for _ in range(2))
    assert first.num_classes == 3
    assert torch.equal(first.readout.classifier.weight, again.readout.classifier.weight)
    disturbed.append("encoder.layers.1.norm2.weight")
    refused(model, "features.*differ by", num_labels=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_compared_as_sharply(dtype: torch.dtype, disturbed: list[str]) -> None:
    model = vit().to(dtype)
    assert he.convert(model).dtype == dtype
    disturbed.append("encoder.layers.1.mlp.down.bias")
    refused(model, "differ by")


def test_models_that_cannot_answer_are_clear_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(changed(vit(), "head.bias", nn.Parameter(torch.full((5,), float("nan")))), "differ by nan")
    model = vit()
    monkeypatch.setattr(type(model), "forward_features", lambda *given, **named: 1 / 0)
    refused(model, r"ZeroDivisionError.*probe=False")
    assert he.convert(model, probe=False).num_classes == 5


# --- altered models ------------------------------------------------------------------------------------------


# Model, change, and a token of the error; None where the conversion succeeds, and answers alike.
def test_what_libraries_attach_is_no_obstacle() -> None:
    """Hooks that change nothing, wrappers, and what transformers' Trainer leaves after training in half precision."""
    accelerate, inputs = pytest.importorskip("accelerate"), images(32, 32, batch=1)
    build: Any = lambda: transformers_model("ViTForImageClassification", VISION)  # noqa: E731
    read, moved, compiled = build(), build(), vit()
    read.enable_input_require_grads()
    read(**inputs, output_attentions=True, output_hidden_states=True)
    mixed = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(build())
    accelerate.hooks.add_hook_to_module(moved.vit, accelerate.hooks.AlignDevicesHook("cpu"))
    compiled.forward = torch.compile(compiled.forward)
    for plain, altered in (
        (build(), (read, mixed, moved)),
        (vit(), (compiled, torch.compile(vit()), nn.DataParallel(vit()), torch.optim.swa_utils.AveragedModel(vit()))),
    ):
        expected = he.convert(plain)(inputs)
        assert all(torch.equal(he.convert(model)(inputs), expected) for model in altered)
    assert "autocast" in repr(mixed.forward) or mixed.forward is not mixed._original_forward  # it is as before
