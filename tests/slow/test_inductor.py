"""`torch.compile` with its own code generator, where there is a C++ compiler."""

import shutil

import pytest
import torch

import hydra_ensembles as he
from architectures import VISION_CASES
from architectures_transformers import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]


@torch.no_grad()
@pytest.mark.parametrize("case", [VISION_CASES[0], *[c for c in CASES if c.name == "transformers-bert"]], ids=str)
def test_inductor_compiles_a_fused_ensemble(case) -> None:  # type: ignore[no-untyped-def]
    base = he.convert(case.build(), **case.convert_kwargs)
    ensemble = he.fuse([he.prune(base, [(0, 0), (1, 1)]), he.prune(base, [(0, 2)]), he.prune(base, [(1, 3)])])
    inputs = case.inputs()
    torch.compiler.reset()
    compiled = torch.compile(ensemble, fullgraph=True)
    assert torch.allclose(compiled(inputs), ensemble(inputs), rtol=1e-4, atol=1e-5)
