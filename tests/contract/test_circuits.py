"""The exact method makes the naive method's choices, equal to the last integer; ties by likelihood, two OOD sources."""

import pytest
import torch
from torch import Tensor

from architectures import ArchitectureCase
from circuit_models import Inputs, Problem, evidence
from contract.models import ALL_CASES, base, original
from hydra_ensembles.convert.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore::hydra_ensembles.HydraWarning")  # ID and OOD share samples on purpose


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_exact_circuits_are_the_naive_ones(case: ArchitectureCase) -> None:
    model = base(case)
    if not model.num_classes:
        model = convert(original(case), **{**case.convert_kwargs, "num_labels": 5})
    labels = torch.randint(model.num_classes, (8,), generator=torch.Generator().manual_seed(0))
    labels[:2] = torch.tensor([0, 1])
    inside, outside = varied(case.inputs(), 8, seed=1), varied(case.inputs(), 6, seed=2)
    batches = [({name: one[part] for name, one in inside.items()}, labels[part]) for part in (slice(5), slice(5, 8))]
    others = [{name: one[part] for name, one in outside.items()} for part in (slice(2), slice(2, 6))]
    sources = {"few": others[:1], "more": others[1:]}
    naive, exact = (Problem(model, batches, sources).extract(method=how, budget=2) for how in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)
    assert exact.provenance["ties"] == "likelihood"


def varied(inputs: Inputs, count: int, seed: int) -> dict[str, Tensor]:
    """Varied inputs of the same kind: noisy images, or texts whose words are drawn from their own words."""
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(inputs, dict)
    many = {name: tensor.repeat(count, *[1] * (tensor.dim() - 1))[:count] for name, tensor in inputs.items()}
    if "pixel_values" in many:
        images = many["pixel_values"]
        return {**many, "pixel_values": images + torch.randn(images.shape, generator=generator)}
    ids = many["input_ids"].clone()
    ends = many["attention_mask"].sum(1) if "attention_mask" in many else torch.full((count,), ids.shape[1])
    for row, end in enumerate(ends.tolist()):
        words = ids[row, 1 : end - 1]  # the first and last token may be special
        if len(words):
            ids[row, 1 : end - 1] = words[torch.randint(len(words), words.shape, generator=generator)]
    return {**many, "input_ids": ids}
