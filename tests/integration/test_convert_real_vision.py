"""The real DINOv2 ViT-S/14 through timm: converted == original, on real images."""

import io

import pyarrow.parquet
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import shared

PREPROCESSING = ImagePreprocessing(size=(112, 112), interpolation="bicubic")


@pytest.fixture(scope="module")
def dinov2() -> nn.Module:
    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", img_size=112, num_classes=10, dynamic_img_size=True)
    missing = model.load_state_dict(
        checkpoint_filter_fn({name: tensor.float() for name, tensor in weights.items()}, model), strict=False
    )
    assert set(missing.missing_keys) == {"head.weight", "head.bias"}
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    table = pyarrow.parquet.read_table(shared("data/images/cifar10/test.parquet"), columns=["image"]).slice(0, 8)
    return PREPROCESSING([Image.open(io.BytesIO(row["bytes"])) for row in table["image"].to_pylist()])


@torch.no_grad()
def test_logits_equal(dinov2: nn.Module, images: Tensor) -> None:
    ensemble = he.convert(dinov2)
    expected = dinov2(images)
    assert (ensemble(images)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ensemble.describe().parameters == sum(parameter.numel() for parameter in dinov2.parameters())


@torch.no_grad()
def test_logits_equal_at_another_size(dinov2: nn.Module, images: Tensor) -> None:
    resized = nn.functional.interpolate(images[:4], (140, 98), mode="bilinear")
    expected = dinov2(resized)
    assert (he.convert(dinov2)(resized)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gradients_equal(dinov2: nn.Module, images: Tensor) -> None:
    ensemble = he.convert(dinov2).train()
    labels = torch.arange(4)
    for model, logits in ((dinov2.train(), dinov2(images[:4])), (ensemble, ensemble(images[:4])[0])):
        model.zero_grad()
        nn.functional.cross_entropy(logits, labels).backward()
    dinov2.eval()
    for mine, theirs in (
        ("mlp.up.weight", "mlp.fc1.weight"),
        ("norm2.weight", "norm2.weight"),
        ("mlp.scale", "ls2.gamma"),
    ):
        actual = ensemble.get_parameter(f"encoder.layers.5.{mine}").grad
        expected = dinov2.get_parameter(f"blocks.5.{theirs}").grad
        assert actual is not None
        assert expected is not None
        assert (actual[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.no_grad()
def test_a_fused_ensemble_equals_its_members_in_turn(dinov2: nn.Module, images: Tensor) -> None:
    base = he.convert(dinov2)
    members = [he.prune(base, [(layer, (layer + m) % 6) for layer in range(2 * m, 12)]) for m in range(3)]
    images = images[:2]
    expected = torch.cat([member(images) for member in members])
    fused = he.fuse(members)
    assert (fused(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (fused.optimize()(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
