"""On a GPU, every plan gives the CPU's logits, and training the CPU's gradients, for every architecture."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import ArchitectureCase, Inputs
from contract.models import ALL_CASES, UNEVEN, base

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("case", ALL_CASES, ids=str),
]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """Embed patches in full float32, without TF32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def fused(case: ArchitectureCase) -> tuple[he.Ensemble, he.Ensemble, Inputs, Inputs]:
    """An ensemble of three members and a batch, on the CPU and on the GPU."""
    try:
        case.build()
    except (ImportError, AttributeError, TypeError) as missing:  # older libraries may lack it; CPU tests build all
        pytest.skip(f"the libraries beside this GPU do not have it: {missing}")
    ensemble, inputs = he.fuse([he.prune(base(case), heads) for heads in UNEVEN]), case.inputs()
    there = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    return ensemble, copy.deepcopy(ensemble).to(DEVICE), inputs, there


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float().cpu() - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def test_every_plan_answers_as_on_the_cpu(case: ArchitectureCase) -> None:
    ensemble, moved, inputs, there = fused(case)
    expected = ensemble(inputs)
    assert error(moved(there), expected) < 1e-4
    for plan in ("batched", "loop"):
        fast = moved.optimize(plans=[plan])
        assert max(error(fast(there), expected) for _ in range(2)) < 1e-4  # the first call records, the second replays


@torch.no_grad()
def test_half_precision_stays_within_its_rounding(case: ArchitectureCase) -> None:
    ensemble, moved, inputs, there = fused(case)
    expected = ensemble(inputs)
    rounded = {name: one.to(torch.bfloat16) if one.is_floating_point() else one for name, one in inputs.items()}
    allowed = 0.02 + 3 * error(copy.deepcopy(ensemble).to(torch.bfloat16)(rounded), expected)
    fast = moved.optimize(dtype=torch.bfloat16)
    assert error(fast(there), expected) < allowed


def test_gradients_are_those_of_the_cpu(case: ArchitectureCase) -> None:
    ensemble, moved, inputs, there = fused(case)
    for one, batch in ((ensemble, inputs), (moved, there)):
        one.train()
        one(batch).square().sum().backward()
    found = dict(moved.named_parameters())
    scale = max(parameter.grad.abs().max().item() for parameter in ensemble.parameters() if parameter.grad is not None)
    for name, parameter in ensemble.named_parameters():
        grad, expected = found[name].grad, parameter.grad
        assert grad is not None, name
        assert expected is not None, name
        assert (grad.cpu() - expected).abs().max() <= 1e-3 * scale, name
