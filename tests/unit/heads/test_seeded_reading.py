"""The seed decides what a ranking reads, also from a loader that draws from a generator of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from circuit_models import random_problem
from random_ensembles import random_batches, random_ensemble
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.data.batching import batches as data_batches
from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.taylor import taylor


def joined(batches: list[Any]) -> TensorDataset:
    return TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))


def loader(kind: str, data: TensorDataset, generator: torch.Generator) -> DataLoader[Any]:
    if kind == "shuffle":
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    sampler = RandomSampler(data, generator=generator)
    if kind == "sampler":
        return DataLoader(data, batch_size=4, sampler=sampler)
    return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
@pytest.mark.parametrize("count", [2, None])
def test_taylor_follows_its_seed_and_leaves_the_generator(kind: str, count: int | None) -> None:
    ensemble = random_ensemble()
    generator = torch.Generator().manual_seed(3)
    source = loader(kind, joined(random_batches(ensemble, (30,))), generator)

    def rank(seed: int) -> Any:
        return taylor(ensemble, source, budget=3, seed=seed, calibration_batches=count)

    state = generator.get_state()
    first = rank(0)
    assert torch.equal(generator.get_state(), state)
    torch.rand(2, generator=generator)
    assert rank(0) == first
    assert rank(1).provenance["data"] != first.provenance["data"]


def test_the_generator_is_put_back_after_an_error() -> None:
    ensemble = random_ensemble()
    generator = torch.Generator().manual_seed(3)
    ((images, labels),) = random_batches(ensemble, (30,))
    source = loader("shuffle", joined([(images, labels + 100)]), generator)
    state = generator.get_state()
    for scope in ("layer", "global"):
        with pytest.raises(DataError, match="labels from"):
            taylor(ensemble, source, budget=3, scope=scope)  # type: ignore[arg-type]
    assert torch.equal(generator.get_state(), state)


def test_taylor_gives_the_batches_of_the_library_a_stream_per_seed() -> None:
    ensemble = random_ensemble()
    ((images, labels),) = random_batches(ensemble, (30,))
    source = data_batches(list(zip(images, labels.tolist(), strict=True)), torch.stack, 4, shuffle=True)

    def rank(seed: int) -> Any:
        return taylor(ensemble, source, budget=3, seed=seed)

    source.set_epoch(2)
    first = rank(0)
    assert (source.epoch, source.stream) == (2, None)
    source.set_epoch(3)
    assert rank(0) == first
    assert rank(1).provenance["data"] != first.provenance["data"]


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_a_circuit_reads_the_same_samples_again(tmp_path: Path, kind: str) -> None:
    problem = random_problem()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    sources = [
        loader(kind, joined(batches), generator)
        for batches, generator in zip((problem.id_batches, problem.ood_batches), generators, strict=True)
    ]
    states = [generator.get_state() for generator in generators]

    def extract() -> Any:
        return extract_circuit(problem.model, *sources, budget=2, journal=tmp_path / "journal.json", progress=False)

    first = extract()
    assert all(torch.equal(one.get_state(), state) for one, state in zip(generators, states, strict=True))
    torch.rand(2, generator=generators[0])
    assert extract().provenance["data"] == first.provenance["data"]
