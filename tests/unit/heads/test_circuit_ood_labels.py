"""Circuits look at OOD inputs alone: whatever stands beside them changes nothing."""

from typing import Any

import pytest
import torch
from circuit_models import evidence, random_problem

from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.errors import DataError


@pytest.mark.parametrize(
    "beside",
    [(), (("a.png",),), (torch.tensor([0.5]),), (torch.zeros(1, 4, 6, dtype=torch.long),), (torch.tensor([-1]),)],
    ids=["nothing", "file names", "floating point", "masks", "out of range"],
)
def test_labels_of_ood_batches_are_not_read(beside: tuple[Any, ...]) -> None:
    problem = random_problem()
    ood: list[Any] = [[inputs, *beside] for inputs, _ in problem.ood_batches]
    found = extract_circuit(problem.model, problem.id_batches, ood, budget=2, dtype=torch.float64, progress=False)
    expected = problem.extract(budget=2)
    assert evidence(found) == evidence(expected)
    assert found.provenance["data"] == expected.provenance["data"]


def test_labels_of_id_batches_are() -> None:
    problem = random_problem()
    named: list[Any] = [(inputs, ["a"] * len(labels)) for inputs, labels in problem.id_batches]
    with pytest.raises(DataError, match="labels in batch 0 of id_batches must be whole numbers"):
        extract_circuit(problem.model, named, problem.ood_batches, budget=1, progress=False)
