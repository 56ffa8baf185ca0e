"""Models that compute something else than their class and weights say, and what may be attached to them."""

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import images, timm_model
from architectures_transformers import VISION, transformers_model
from hydra_ensembles.errors import ConversionError

VIT, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"


def vit(**settings: Any) -> Any:
    return timm_model(VIT, **settings)


def hf_vit() -> Any:
    return transformers_model("ViTForImageClassification", "ViTConfig", VISION)


# --- hooks and replaced forwards -------------------------------------------------------------------------


def test_forward_hooks_are_refused_wherever_they_are() -> None:
    model, wrapped = vit(), nn.DataParallel(vit())
    wrapped.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(ConversionError, match=r"DataParallel.*forward hook"):
        he.convert(wrapped)
    inner = model.blocks[1].attn.register_forward_hook(lambda module, inputs, output: output * 2)
    outer = model.register_forward_pre_hook(lambda module, inputs: None)
    for handle, place in ((outer, "the model"), (inner, r"blocks\.1\.attn")):
        with pytest.raises(ConversionError, match=rf"{place}.*forward hook"):
            he.convert(model)
        handle.remove()
    assert he.convert(model).num_classes == 5


def test_what_libraries_attach_is_no_obstacle() -> None:
    accelerate, inputs = pytest.importorskip("accelerate"), images(32, 32, batch=1)
    read, moved, compiled = hf_vit(), hf_vit(), vit()
    read.enable_input_require_grads()
    read(**inputs, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in read.modules())
    mixed = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(hf_vit())
    accelerate.hooks.add_hook_to_module(moved.vit, accelerate.hooks.AlignDevicesHook("cpu"))
    assert "forward" in vars(mixed)
    assert "forward" in vars(moved.vit)
    compiled.forward = torch.compile(compiled.forward)
    for plain, changed in (
        (hf_vit(), (read, mixed, moved)),
        (vit(), (compiled, torch.compile(vit()), nn.DataParallel(vit()))),
    ):
        expected = he.convert(plain)(inputs)
        assert all(torch.equal(he.convert(model)(inputs), expected) for model in changed)


# --- weights, classifiers, names, channels ---------------------------------------------------------------


def with_value(value: float) -> Any:
    model = vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = value
    return model


def with_part(place: str, part: nn.Module, name: str = VIT) -> Any:
    model = timm_model(name)
    model.set_submodule(place, part)
    return model


def timm_block(name: str) -> Any:
    from timm.models import vision_transformer

    return getattr(vision_transformer, name)


DEEP = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 5))


@pytest.mark.parametrize(
    ("build", "token"),
    [
        (lambda: 3, "int"),
        (lambda: nn.Linear(2, 2), "Linear.*timm"),
        (lambda: vit(num_classes=1), "one output"),
        (lambda: with_value(float("nan")), r"1 of the 4096 values of blocks\.1\.mlp\.fc1\.weight"),
        (lambda: with_value(float("inf")), r"1 of the 4096 values of blocks\.1\.mlp\.fc1\.weight"),
        (lambda: with_part("blocks.1.mlp.fc1", nn.Linear(32, 100)), r"blocks\.1\.mlp\.fc1\.weight.*100"),
        (lambda: with_part("head", DEEP), "Sequential"),
        (lambda: with_part("head", nn.Linear(32, 5).to(torch.float8_e4m3fn)), "float8_e4m3fn.*quantised"),
        (lambda: with_part("blocks.1", vit().blocks[1].to("meta")), r"blocks\.1\..* meta device"),
        (lambda: vit(block_fn=timm_block("ParallelScalingBlock")), "ParallelScalingBlock.*nearest way"),
        (lambda: with_part("head", DEEP, DISTILLED), "Sequential"),
        (lambda: with_part("head_dist", DEEP, DISTILLED), "Sequential"),
    ],
)
def test_what_cannot_be_translated_is_refused(build: Any, token: str) -> None:
    with pytest.raises(ConversionError, match=rf"(?s){token}"):
        he.convert(build())


def test_labels_are_checked() -> None:
    model = vit()
    for labels, token in [
        ("abcde", "labels"),
        (set("abcde"), "labels"),
        (dict.fromkeys("abcde", 0), "labels"),
        (["a", "b", "c", "d"], "4 labels"),
        (["a", "b", "c", "d", "a"], "'a'"),
        (["a", "b", " ", "d", "e"], r"labels\[2\]"),
        ([0, 1, 2, 3, 4], "labels"),
    ]:
        with pytest.raises(he.HydraError, match=token):
            he.convert(model, labels=labels)  # type: ignore[arg-type]
    assert he.convert(model, labels=list("abcde")).metadata.labels == tuple("abcde")


def test_the_names_of_the_model_in_another_order_are_refused() -> None:
    model: Any = transformers_model("ViTForImageClassification", "ViTConfig", VISION)
    names = tuple(model.config.id2label.values())
    model.config.id2label = dict(enumerate(f"class {name}" for name in names))
    known = tuple(model.config.id2label.values())
    with pytest.raises(ConversionError, match=r"labels\[0\].*with_metadata"):
        he.convert(model, labels=known[::-1])
    assert he.convert(model, labels=known).metadata.labels == he.convert(model).metadata.labels == known
    assert he.convert(model, labels=names[::-1]).metadata.labels == names[::-1]  # other names


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
