"""The comparison of logits at the end of a conversion: what it detects, reports and skips."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from convert_cases import changed, convert_wrongly, look_for_no_remedy, refused, vit
from torch import nn

import hydra_ensembles as he
from architectures import ArchitectureCase, torchvision_model
from architectures_clip import DUAL_CASES, DualCase, open_clip_model
from architectures_own import ENCODER_VIT, EncoderViT, own
from architectures_transformers import MODERNBERT, TEXT, VISION, transformers_model
from contract.all_architectures import ALL_CASES
from contract.models import original
from hydra_ensembles.convert import probe
from hydra_ensembles.errors import ConversionError


def bare(family: str, settings: dict[str, Any] = VISION) -> Callable[[], Any]:
    return partial(transformers_model, f"{family}Model", settings)


BARE: dict[str, Callable[[], Any]] = {
    "timm": lambda: vit(num_classes=0),
    "torchvision": lambda: changed(torchvision_model(), "heads", nn.Sequential()),
    **{family: bare(family) for family in ("ViT", "Dinov2", "ViTMAE", "CLIPVision")},
    **{family: bare(family, TEXT) for family in ("Bert", "Albert", "Gte")},
    "ModernBert": bare("ModernBert", MODERNBERT),
    "open_clip-text": lambda: open_clip_model(text={"proj_type": "none", "width": 24}, custom=True).text,
}


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Conversions corrupt the parameters whose names are added to this list."""
    names: list[str] = []

    def add_noise(ensemble: he.Ensemble) -> None:
        for parameter in (one for name, one in ensemble.named_parameters() if name in names):
            parameter.add_(torch.linspace(-3, 3, parameter.shape[-1]))

    convert_wrongly(monkeypatch, add_noise)
    look_for_no_remedy(monkeypatch)
    return names


PLACES = (
    ("encoder.layers.1.norm2.weight", r"first differ in .*[._ ]1;"),
    ("encoder.layers.0.norm2.weight", r"first differ in .*[._ ]0;"),
    ("stem.position stem.positions stem.class_token stem.norm.weight", "first differ before"),
)
EACH_IN_TURN = list(zip([*ALL_CASES, *DUAL_CASES], cycle(PLACES), strict=False))


@pytest.mark.parametrize(("case", "place"), EACH_IN_TURN, ids=[str(case) for case, _ in EACH_IN_TURN])
def test_a_wrong_conversion_is_refused_and_the_layer_named(
    case: ArchitectureCase | DualCase, place: tuple[str, str], disturbed: list[str]
) -> None:
    disturbed += place[0].split()
    model = original(case) if isinstance(case, ArchitectureCase) else case.build()
    refused(model, place[1], **getattr(case, "convert_kwargs", {}))


@pytest.mark.parametrize("name", BARE)
def test_features_are_compared_where_the_classifier_is_fresh(name: str, disturbed: list[str]) -> None:
    model = BARE[name]()
    assert he.convert(model, num_labels=3).num_classes == 3
    disturbed.append("encoder.layers.1.norm2.weight")
    refused(model, r"features.*in .*[._ ]1;", num_labels=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_compared_within_their_rounding(dtype: torch.dtype, disturbed: list[str]) -> None:
    model = vit().to(dtype)
    assert he.convert(model).dtype == dtype
    disturbed.append("encoder.layers.1.mlp.down.bias")
    refused(model, r"blocks\.1")


def test_a_small_change_does_not_pass_for_the_rounding_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """On small logits, a tanh changes them by less than rounding does."""
    model = torchvision_model()
    nn.init.normal_(model.heads.head.weight, std=0.02)
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda model, x: forward(model, x).tanh())
    refused(model.to(torch.bfloat16), "of their size")


def test_models_that_cannot_answer_are_clear_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    with torch.no_grad():
        model.head.weight.fill_(3e38)  # finite, but its product with features is not
    refused(model, "NaN or infinite")
    monkeypatch.setattr(type(model), "forward_features", lambda *given, **named: 1 / 0)
    refused(model, r"ZeroDivisionError.*probe=False")
    assert he.convert(model, probe=False).num_classes == 5


@torch.no_grad()
def test_a_classifier_of_zeros_proves_nothing(disturbed: list[str]) -> None:
    model, own_model = torchvision_model(), own(EncoderViT)
    for head in (model.heads.head, own_model.head):
        nn.init.zeros_(head.weight)
    for declaration in (ENCODER_VIT, None):
        refused(own_model, "its classifier are zero", declaration=declaration)
    assert he.convert(model).num_classes == 5
    disturbed.append("encoder.layers.1.norm2.weight")
    refused(model, "in encoder.layers.encoder_layer_1;")


def test_tokens_that_the_blocks_do_not_see_are_compared_before(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_wrongly(monkeypatch, lambda ensemble: ensemble.stem.position[..., -1, :].add_(torch.linspace(-3, 3, 32)))
    monkeypatch.setattr(probe, "_FEW_TOKENS", 2)
    refused(vit(), "first differ before")


def test_a_forward_replaced_on_a_class_is_compared_on_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    block = type(model.blocks[0])
    forward = block.forward
    monkeypatch.setattr(probe, "_FEW_TOKENS", 2)
    monkeypatch.setattr(block, "forward", lambda self, x, **given: forward(self, x[:, :3], **given))
    refused(model, "first differ in blocks.0;")


def test_the_original_and_the_generators_are_as_before_also_after_a_refusal(disturbed: list[str]) -> None:
    disturbed.append("encoder.layers.0.mlp.down.bias")
    model = vit(drop_rate=0.5).train()
    model.blocks[1].eval()
    flags = [module.training for module in model.modules()]
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    np.random.seed(3)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    with pytest.raises(ConversionError):
        he.convert(model)
    assert [module.training for module in model.modules()] == flags
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]
