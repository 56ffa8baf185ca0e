"""The exact method on every architecture of the contract tests."""

import pytest
import torch
from circuit_models import SCORES, Inputs, Problem, evidence

from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.convert.convert import convert


def varied(inputs: Inputs, copies: int, seed: int) -> Inputs:
    """Other inputs of the same kind: noisy images, or texts with some words replaced by others of theirs."""
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(inputs, dict)
    many = {name: tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}
    if "pixel_values" in many:
        images = many["pixel_values"]
        return {**many, "pixel_values": images + torch.randn(images.shape, generator=generator)}
    ids = many["input_ids"].clone()
    ends = many["attention_mask"].sum(1) if "attention_mask" in many else torch.full((len(ids),), ids.shape[1])
    for row, end in enumerate(ends.tolist()):
        words = ids[row, 1 : end - 1]  # first and last token may have a meaning of their own
        ids[row, 1 : end - 1] = (
            words[torch.randint(len(words), words.shape, generator=generator)] if len(words) else words
        )
    return {**many, "input_ids": ids}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_exact_is_naive(case: ArchitectureCase, score: Score) -> None:
    model = convert(case.build(), **case.convert_kwargs)
    if not model.num_classes:
        model = convert(case.build(), **{**case.convert_kwargs, "num_labels": 5})
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(model.num_classes, (12,), generator=generator)
    labels[:2] = torch.tensor([0, 1])
    images = varied(case.inputs(), 4, seed=1)
    problem = Problem(
        model,
        [({name: tensor[part] for name, tensor in images.items()}, labels[part]) for part in (slice(7), slice(7, 12))],
        [varied(case.inputs(), 3, seed=2)],
    )
    naive, exact = (problem.extract(method=method, score=score, budget=2) for method in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)
