"""Logits and gradients of every kind of ensemble on a GPU, against float32 and plain attention."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he
from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, TextStemConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYERS, HEADS = 3, 6
BACKENDS = {
    "default": None,
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


def one(seed: int, stem: PatchStemConfig | TextStemConfig, pool: str, causal: bool = False) -> he.Ensemble:
    torch.manual_seed(seed)
    encoder = EncoderConfig(
        width=384, layers=LAYERS, heads=HEADS, head_dim=64, mlp_width=768, causal=causal, layer_scale=True
    )
    readout = ReadoutConfig(pool=pool, num_classes=10)
    model = he.Ensemble(EnsembleConfig(stem, encoder, readout, encoder.all_heads()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def image(seed: int = 0, side: int = 8) -> he.Ensemble:
    return one(seed, PatchStemConfig(patch_size=(14, 14), grid=(side, side)), "cls")


def text(seed: int = 0, causal: bool = False) -> he.Ensemble:
    stem = TextStemConfig(vocabulary=100, positions=64, embedding_width=384)
    return one(seed, stem, "last" if causal else "cls", causal)


def without(model: he.Ensemble, *heads: tuple[int, int]) -> he.Ensemble:
    return he.prune(model, [he.Head(*head) for head in heads])


def even(make: Callable[[int], he.Ensemble]) -> he.Ensemble:
    return he.fuse([without(make(0), *((layer, lost) for layer in range(LAYERS))) for lost in range(3)])


def uneven(make: Callable[[int], he.Ensemble], first: int = 0) -> he.Ensemble:
    lost = [[(first, 0)], [(first, 1), (first, 2), (2, 0)], [(2, 1), (2, 3)]]
    return he.fuse([without(make(0), *heads) for heads in lost])


KINDS: dict[str, Callable[[], he.Ensemble]] = {
    "single": image,
    "single-257": lambda: image(side=16),
    "pruned": lambda: without(image(), (0, 0), (0, 1), (1, 5)),
    "even": lambda: even(image),
    "uneven": lambda: uneven(image),
    "uneven-257": lambda: uneven(lambda seed: image(seed, 16)),
    "trunk": lambda: uneven(image, first=1),
    "stacked": lambda: he.Ensemble.stack([image(seed) for seed in range(3)]),
    "text": text,
    "text-uneven": lambda: uneven(text),
    "causal": lambda: text(causal=True),
    "causal-uneven": lambda: uneven(lambda seed: text(seed, causal=True)),
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
    """Logits and the gradient of every parameter after one pass."""
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


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_attention_in_float32(kind, backend, dtype):
    model = KINDS[kind]().to("cuda")
    expected = trained(model, None, [SDPBackend.MATH])
    found = trained(model, dtype, BACKENDS[backend])
    assert found.keys() == expected.keys()
    least = 0.999999 if dtype is None else 0.995
    for name, tensor in expected.items():
        if tensor.abs().max() > 1e-7:
            assert cosine(found[name], tensor) >= least, name
        else:  # no gradient to speak of, such as that of a key's bias
            assert found[name].abs().max() < 1e-3, name


def test_compiled_training_has_the_same_gradients():
    model = uneven(image).to("cuda")
    expected = trained(model, None, [SDPBackend.MATH])
    found = trained(model, torch.bfloat16, None, torch.compile(model))
    for name, tensor in expected.items():
        assert tensor.abs().max() <= 1e-7 or cosine(found[name], tensor) > 0.995, name
