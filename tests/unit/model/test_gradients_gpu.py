"""Logits and gradients of every kind of ensemble on a GPU, compared with plain attention in float32."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he
from hydra_ensembles.model.config import PatchStemConfig
from random_ensembles import noisy, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYERS = 3
BACKENDS = {
    "default": None,
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}
SIZES = {"width": 384, "layers": LAYERS, "heads": 6, "head_dim": 64, "mlp_width": 768, "layer_scale": True}


def image(seed: int = 0, side: int = 8) -> he.Ensemble:
    config = small(classes=10, **SIZES)
    return noisy(replace(config, stem=PatchStemConfig(patch_size=(14, 14), grid=(side, side))), seed, 0.02)


def text(causal: bool = False) -> he.Ensemble:
    words, pool = {"vocabulary": 100, "positions": 64}, {"pool": "last" if causal else "cls"}
    return noisy(small("text", 10, text=words, readout=pool, causal=causal, **SIZES), 0, 0.02)


def fused(model: he.Ensemble, *lost: list[tuple[int, int]]) -> he.Ensemble:
    return he.fuse([he.prune(model, heads) for heads in lost])


def uneven(model: he.Ensemble, first: int = 0) -> he.Ensemble:
    return fused(model, [(first, 0)], [(first, 1), (first, 2), (2, 0)], [(2, 1), (2, 3)])


KINDS: dict[str, Callable[[], he.Ensemble]] = {
    "even": lambda: fused(image(), *([(layer, head) for layer in range(LAYERS)] for head in range(3))),
    "uneven-257": lambda: uneven(image(side=16)),
    "trunk": lambda: uneven(image(), first=1),
    "stacked": lambda: he.Ensemble.stack([image(seed) for seed in range(3)]),
    "text-uneven": lambda: uneven(text()),
    "causal-uneven": lambda: uneven(text(causal=True)),
}


def inputs_of(model: he.Ensemble) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if model.kind == "image":
        side = model.config.stem.image_size[0]
        return {"pixel_values": torch.randn(32, 3, side, side, device="cuda")}
    mask = torch.arange(64, device="cuda")[None] < torch.randint(20, 65, (32, 1), device="cuda")
    return {"input_ids": torch.randint(0, 100, (32, 64), device="cuda"), "attention_mask": mask.long()}


def trained(
    model: he.Ensemble, dtype: torch.dtype | None, backend: list[SDPBackend] | None, run: Any = None
) -> dict[str, Tensor]:
    model.train().zero_grad()
    with (
        torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None),
        nullcontext() if backend is None else sdpa_kernel(backend),
    ):
        logits = (model if run is None else run)(inputs_of(model))
    labels = torch.arange(logits.shape[1], device="cuda") % logits.shape[2]
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.repeat(len(logits))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach().float(), **gradients}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], least: float) -> None:
    """Compare gradients by angle; negligible ones, such as a key bias's, by size."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        angle = torch.nn.functional.cosine_similarity(found[name].double().flatten(), tensor.double().flatten(), 0)
        assert angle >= least if tensor.abs().max() > 1e-7 else found[name].abs().max() < 1e-3, name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_attention_in_float32(kind, backend, dtype):
    model = KINDS[kind]().to("cuda")
    expected = trained(model, None, [SDPBackend.MATH])
    assert_alike(trained(model, dtype, BACKENDS[backend]), expected, 0.999999 if dtype is None else 0.995)


def test_compiled_training_has_the_same_gradients():
    model = uneven(image()).to("cuda")
    expected = trained(model, None, [SDPBackend.MATH])
    assert_alike(trained(model, torch.bfloat16, None, torch.compile(model)), expected, 0.995)
