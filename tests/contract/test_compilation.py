"""An ensemble is one graph: `torch.compile` and `torch.export` trace all of it."""

from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from contract.models import ALL_CASES, variants

# One architecture per kind of stem, norm placement, pooling and activation; the others compile the same code.
QUICK = {
    "timm-vit",
    "timm-augreg-qknorm-avg",
    "timm-deit-distilled",
    "timm-dinov2-swiglu",
    "timm-siglip",
    "transformers-dinov2",
    "transformers-bert",
    "transformers-roberta",
    "transformers-electra-projected",
    "transformers-modernbert",
    "transformers-clip-text",
}
# The steps after tracing take as long again: one case per kind of input; `export` runs them for the others.
THROUGH = {"timm-vit", "transformers-bert"}
TRACED = {"timm-augreg-qknorm-avg", "timm-siglip", "transformers-electra-projected", "transformers-modernbert"}


def params(quick: set[str], *more: str) -> list[Any]:
    marks = {case: () if case.name in quick else pytest.mark.slow for case in ALL_CASES}
    return [pytest.param(case, *more, marks=mark, id=case.name) for case, mark in marks.items()]


FIRST_STEP = [one for one in params(TRACED, "eager") if one.id in QUICK - THROUGH]


def ensemble_of(case: ArchitectureCase) -> he.Ensemble:
    return he.Ensemble.stack(variants(case)[:2])


@torch.no_grad()
@pytest.mark.parametrize(("case", "backend"), [*params(THROUGH, "aot_eager"), *FIRST_STEP])
def test_compile_makes_one_graph(case: ArchitectureCase, backend: str) -> None:
    ensemble, inputs = ensemble_of(case), case.inputs()
    torch.compiler.reset()
    compiled = torch.compile(ensemble, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(**_arguments(inputs)), ensemble(inputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", params(QUICK))
def test_export_takes_the_ensemble(case: ArchitectureCase) -> None:
    ensemble, inputs = ensemble_of(case), case.inputs()
    program = torch.export.export(ensemble, (), _arguments(inputs))
    assert torch.allclose(program.module()(**_arguments(inputs)), ensemble(inputs), rtol=1e-4, atol=1e-5)


def _arguments(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as arguments of `forward`, which calls the main input `inputs`; other names stay."""
    names = {"pixel_values": "inputs", "input_ids": "inputs"}
    return {names.get(name, name): tensor for name, tensor in inputs.items()}
