"""An ensemble is one graph: `torch.compile` and `torch.export` take it whole."""

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from contract.models import variants

# One architecture per kind of stem, norm placement, pooling and activation; the rest compile the same code.
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
pytestmark = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in QUICK else pytest.mark.slow) for case in ALL_CASES],
    ids=str,
)


def ensemble_of(case: ArchitectureCase) -> he.Ensemble:
    return he.Ensemble.stack(variants(case)[:2])


@torch.no_grad()
def test_compile_makes_one_graph(case: ArchitectureCase) -> None:
    ensemble, inputs = ensemble_of(case), case.inputs()
    torch.compiler.reset()
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(**_arguments(inputs)), ensemble(inputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_export_takes_the_ensemble(case: ArchitectureCase) -> None:
    ensemble, inputs = ensemble_of(case), case.inputs()
    program = torch.export.export(ensemble, (), _arguments(inputs))
    assert torch.allclose(program.module()(**_arguments(inputs)), ensemble(inputs), rtol=1e-4, atol=1e-5)


def _arguments(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as arguments of `forward`: the main input has a name of ours, the rest keep theirs."""
    names = {"pixel_values": "inputs", "input_ids": "inputs"}
    return {names.get(name, name): tensor for name, tensor in inputs.items()}
