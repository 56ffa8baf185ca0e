"""The derivatives behind the check of Proposition 1 are those of the loss, and its steps are pruning."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import timm_model

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import gate_losses  # noqa: E402

sys.path.remove(BENCHMARKS)

HEADS = [he.Head(0, 1), he.Head(1, 0), he.Head(1, 3)]


@pytest.fixture(scope="module")
def model() -> he.Ensemble:
    ensemble: he.Ensemble = he.convert(timm_model("vit_base_patch16_224")).double()
    with torch.no_grad():
        for layer in ensemble.encoder.layers:
            layer.attention.out.mul_(3)  # let the heads matter
    return ensemble


@pytest.fixture(scope="module")
def batches() -> list[gate_losses.Batch]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64)
    return list(zip(images.split(4), torch.tensor([0, 1, 2, 3, 4, 0]).split(4), strict=True))


def loss_after(model: he.Ensemble, step: Tensor, share: float, batches: list[gate_losses.Batch]) -> float:
    return gate_losses.measure(model, gate_losses.gates_after(model, step, share), batches).loss


def test_a_whole_step_is_pruning(model: he.Ensemble, batches: list[gate_losses.Batch]) -> None:
    pruned = he.prune(model, HEADS)
    with torch.no_grad():
        losses = [F.cross_entropy(pruned(images)[0], labels, reduction="sum") for images, labels in batches]
    gated = loss_after(model, gate_losses.pruning_step(model, HEADS), 1.0, batches)
    torch.testing.assert_close(gated, float(sum(losses)) / 6, rtol=1e-10, atol=1e-12)


def test_what_the_expansion_leaves_is_of_third_order(model: he.Ensemble, batches: list[gate_losses.Batch]) -> None:
    expansion, step = gate_losses.expand(model, batches), gate_losses.pruning_step(model, HEADS)

    def left(share: float) -> float:
        second = share * expansion.gradient @ step + share**2 * (step @ expansion.hessian @ step) / 2
        return abs(loss_after(model, step, share, batches) - expansion.value - second.item())

    assert expansion.value == pytest.approx(loss_after(model, step, 0.0, batches), rel=1e-12)
    assert left(0.1) > 1e-10  # there is something left to measure
    assert left(0.1) / left(0.05) == pytest.approx(8.0, rel=0.25)  # halving the step leaves an eighth
