"""Models that compute something else than their class and weights say, and what may be attached to them."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import images, timm_model
from architectures_transformers import transformers_model
from hydra_ensembles.errors import ConversionError

VIT, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"


def vit(**settings: Any) -> Any:
    return timm_model(VIT, **settings)


def hf_vit() -> Any:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    return transformers_model("ViTForImageClassification", "ViTConfig", {**settings, "num_labels": 5}).eval()


# --- hooks and replaced forwards -------------------------------------------------------------------------


def test_forward_hooks_are_refused_wherever_they_are() -> None:
    model = vit()
    wrapped = nn.DataParallel(vit())
    wrapped.register_forward_hook(lambda module, inputs, output: -output)
    inner = model.blocks[1].attn.register_forward_hook(lambda module, inputs, output: output * 2)
    outer = model.register_forward_pre_hook(lambda module, inputs: None)
    for hooked, handle, place in (
        (model, outer, "the model"),
        (model, inner, r"blocks\.1\.attn"),
        (wrapped, None, "DataParallel"),
    ):
        with pytest.raises(ConversionError, match=rf"{place}.*forward hook"):
            he.convert(hooked)
        if handle is not None:
            handle.remove()
    assert he.convert(model).num_classes == 5


def test_a_replaced_forward_is_refused() -> None:
    model = vit()
    original = model.blocks[0].forward

    @functools.wraps(original)
    def doubled(x: Any, *rest: Any, **more: Any) -> Any:
        return 2 * original(x, *rest, **more)

    for replaced in (doubled, torch.compile(doubled)):
        model.blocks[0].forward = replaced
        with pytest.raises(ConversionError, match=r"blocks\.0 \(Block\)"):
            he.convert(model)
    model.blocks[0].forward = original  # put back by assignment
    assert he.convert(model).num_classes == 5


@torch.no_grad()
def test_hooks_that_transformers_attaches_to_read_outputs_are_no_obstacle() -> None:
    model, inputs = hf_vit(), images(32, 32)
    model.enable_input_require_grads()
    model(**inputs, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert torch.allclose(he.convert(model)(inputs)[0], model(**inputs).logits, atol=1e-5)


def test_compiled_forwards_and_models_are_no_obstacle() -> None:
    model = vit()
    model.forward = torch.compile(model.forward)
    for wrapped in (model, torch.compile(vit()), nn.DataParallel(vit())):
        assert he.convert(wrapped).num_classes == 5


def test_what_accelerate_wraps_is_no_obstacle() -> None:
    accelerate = pytest.importorskip("accelerate")
    mixed = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(hf_vit())
    assert "forward" in vars(mixed)
    assert he.convert(mixed).num_classes == 5
    moved = hf_vit()
    accelerate.hooks.add_hook_to_module(moved.vit, accelerate.hooks.AlignDevicesHook("cpu"))
    assert "forward" in vars(moved.vit)
    assert he.convert(moved).num_classes == 5


# --- weights, classifiers, names, channels ---------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float) -> None:
    model = vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = value
    with pytest.raises(ConversionError, match=r"1 of the 4096 values of blocks\.1\.mlp\.fc1\.weight"):
        he.convert(model)


def test_weights_of_another_shape_are_refused_by_name() -> None:
    model = vit()
    model.blocks[1].mlp.fc1 = nn.Linear(32, 100)
    with pytest.raises(ConversionError, match=r"blocks\.1\.mlp\.fc1\.weight.*100"):
        he.convert(model)


@pytest.mark.parametrize(("name", "place"), [(VIT, "head"), (DISTILLED, "head"), (DISTILLED, "head_dist")])
def test_a_timm_classifier_that_is_not_linear_is_refused(name: str, place: str) -> None:
    model = timm_model(name)
    setattr(model, place, nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 5)))
    with pytest.raises(ConversionError, match="Sequential"):
        he.convert(model)


@pytest.mark.parametrize(
    ("model", "token"),
    [(3, "int"), (nn.Linear(2, 2), "Linear.*timm"), (timm_model(VIT, num_classes=1), "one output")],
)
def test_what_is_no_classifier_is_refused(model: Any, token: str) -> None:
    with pytest.raises(ConversionError, match=rf"(?s){token}"):
        he.convert(model)


@pytest.mark.parametrize(
    ("labels", "token"),
    [
        ("abcde", "str"),
        (set("abcde"), "set"),
        (dict.fromkeys("abcde", 0), "dict"),
        (["a", "b", "c", "d"], "4 labels"),
        (["a", "b", "c", "d", "a"], "'a'"),
        (["a", "b", " ", "d", "e"], r"labels\[2\]"),
        ([0, 1, 2, 3, 4], r"labels\[0\]"),
    ],
)
def test_labels_are_checked(labels: Any, token: str) -> None:
    with pytest.raises(ConversionError, match=token):
        he.convert(vit(), labels=labels)
    assert he.convert(vit(), labels=list("abcde")).metadata.labels == tuple("abcde")


@pytest.mark.parametrize(
    ("channels", "mean", "expected"),
    [
        (1, (0.5, 0.5, 0.5), (0.5,)),
        (1, (0.485, 0.456, 0.406), None),
        (3, (0.485, 0.456, 0.406), (0.485, 0.456, 0.406)),
        (3, (0.5,), (0.5, 0.5, 0.5)),
        (4, (0.5, 0.5, 0.5), None),
    ],
)
def test_preprocessing_has_the_channels_of_the_model(channels: int, mean: Any, expected: Any) -> None:
    model = vit(in_chans=channels)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": mean, "std": (0.5,) * len(mean)}
    preprocessing = he.convert(model).metadata.preprocessing
    assert (preprocessing and preprocessing.mean) == expected
    assert preprocessing is None or len(preprocessing.std) == channels
