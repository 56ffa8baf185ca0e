"""Models that compute something else than their class and weights suggest, and what `convert` attaches to them."""

import warnings
from typing import Any

import pytest
import torch
from convert_cases import refused, vit
from torch import nn

import hydra_ensembles as he
from architectures import images
from architectures_transformers import VISION, transformers_model


def hf_vit() -> Any:
    return transformers_model("ViTForImageClassification", VISION)


def test_forward_hooks_are_refused_around_the_model_too() -> None:
    wrapped, model = nn.DataParallel(vit()), vit()
    wrapped.register_forward_hook(lambda module, inputs, output: -output)
    refused(wrapped, r"DataParallel.*forward hook")
    hook = model.register_forward_pre_hook(lambda module, inputs: None)
    refused(model, "the model.*forward hook")
    hook.remove()
    assert he.convert(model).num_classes == 5


def test_what_libraries_attach_is_no_obstacle() -> None:
    accelerate, inputs = pytest.importorskip("accelerate"), images(32, 32, batch=1)
    read, moved, compiled = hf_vit(), hf_vit(), vit()
    read.enable_input_require_grads()
    read(**inputs, output_attentions=True, output_hidden_states=True)
    mixed = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(hf_vit())
    accelerate.hooks.add_hook_to_module(moved.vit, accelerate.hooks.AlignDevicesHook("cpu"))
    compiled.forward = torch.compile(compiled.forward)
    for plain, changed in (
        (hf_vit(), (read, mixed, moved)),
        (vit(), (compiled, torch.compile(vit()), nn.DataParallel(vit()), torch.optim.swa_utils.AveragedModel(vit()))),
    ):
        expected = he.convert(plain)(inputs)
        assert all(torch.equal(he.convert(model)(inputs), expected) for model in changed)


@pytest.mark.parametrize("make", [hf_vit, vit])
def test_what_is_frozen_stays_frozen_unless_all_is(make: Any) -> None:
    """A fused QKV weight is frozen only where all three are."""
    model = make().requires_grad_(False)
    assert all(parameter.requires_grad for parameter in he.convert(model).parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "q_proj" in name)
    trained = {name for name, parameter in he.convert(model).named_parameters() if parameter.requires_grad}
    assert all("norm" in name or (make is hf_vit and ".qkv" in name) for name in trained)
    assert {"encoder.layers.0.norm1.weight", "readout.norm.bias"} <= trained


def test_the_names_of_the_model_in_another_order_are_refused() -> None:
    model, names = hf_vit(), ("ant", "bee", "cat", "dog", "elk")
    known = tuple(f"a {name}" for name in names)
    model.config.id2label = dict(enumerate(known))
    refused(model, r"labels\[0\].*with_metadata", labels=known[::-1])
    assert he.convert(model, labels=known).metadata.labels == he.convert(model).metadata.labels == known
    assert he.convert(model, labels=names[::-1]).metadata.labels == names[::-1]  # different names


def with_classifier(model: Any, change: str) -> Any:
    """A model with trained layers and a classifier as libraries initialise it, or changed."""
    head = model.head
    with torch.no_grad():
        for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
            nn.init.uniform_(norm.weight, *(1.0, 1.0) if change == "all drawn" else (0.5, 1.5))
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        if change == "zeros":
            nn.init.zeros_(head.weight)
        if change == "bias":
            head.bias[1] = 1e-3
    return model


@pytest.mark.parametrize(("change", "said"), [("", True), ("zeros", True), ("bias", False), ("all drawn", False)])
def test_a_classifier_that_nobody_trained_is_warned_of(change: str, said: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        he.convert(with_classifier(vit(), change))
    assert ["looks untrained" in str(one.message) for one in caught] == [True] * said
