"""Sets that are the same by value: refused where nothing sensible comes of it, else warned of, by every function."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as he
from hydra_ensembles.errors import DataError, HydraWarning
from hydra_ensembles.overlap import keys_at_hand, sample_keys
from unit.pipeline import build_cases as cases

MODEL = cases.image_model()


def copied(batches: list[Any], size: int = 5) -> list[Any]:
    """The same samples in other tensors and other batches."""
    images, labels = (torch.cat(part).clone() for part in zip(*batches, strict=True))
    return list(zip(images.split(size), labels.split(size), strict=True))


ID, OOD = cases.batches(16, seed=1), cases.batches(12, seed=2, shift=1.5)
SAME = {"copies": copied(ID), "a part": copied(ID[1:3]), "one after another": copied(ID[::-1])}
SOME = [*copied(ID[:1]), *OOD]
ONE = [(OOD[0][0][:1], OOD[0][1][:1])]


def build(ood: Any, **sets: Any) -> None:
    he.build(
        MODEL,
        he.HydraConfig(prune=1, shared_layers=0, members=1, calibrate=False),
        **{"id": ID, **sets},
        ood=ood,
        progress=False,
    )


def extract(ood: Any) -> None:
    he.extract_circuit(MODEL, ID, ood, budget=1, layers=[0], progress=False)


def evaluate(ood: Any) -> None:
    he.evaluate(MODEL, ID, {"far": {"other": ood}}, progress=False)


@pytest.mark.parametrize("function", [build, extract, evaluate])
def test_ood_data_that_are_id_data(function: Any) -> None:
    for ood in SAME.values():
        with pytest.raises(DataError, match="same samples"):
            function(ood)
    with pytest.warns(HydraWarning, match="of 16 samples"):
        function(SOME)
    with pytest.warns(HydraWarning, match="one sample"):
        function(ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(OOD)


def test_two_ood_sets_that_are_one() -> None:
    with pytest.raises(DataError, match=r"'b'.*'a'"):
        he.evaluate(MODEL, ID, {"a": OOD, "b": copied(OOD)}, progress=False)


def test_ood_data_that_are_trained_on_and_id_data_that_validate() -> None:
    config = he.HydraConfig(prune=1, shared_layers=0, members=1, recipe=cases.recipe(steps=1))
    with pytest.raises(DataError, match="train"):
        he.build(MODEL, config, train=OOD, id=ID, ood=copied(OOD), progress=False)
    with pytest.warns(HydraWarning, match="validation"):
        build(OOD, validation=copied(ID))


@pytest.mark.parametrize("validation", [cases.batches(16, seed=1), copied(ID)])
def test_validation_data_that_are_trained_on(validation: Any) -> None:
    shuffled = DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*ID, strict=True))), 4, shuffle=True)
    for train in (ID, shuffled):
        with pytest.warns(HydraWarning, match="16 of 16 samples of validation"):
            he.finetune(MODEL, train, cases.recipe(steps=1), validation, progress=False)


def test_members_that_are_equal() -> None:
    pruned = [he.prune(MODEL, [(0, 1)]), he.prune(MODEL, [(0, 2)]), he.prune(MODEL, [(0, 1)])]
    with pytest.warns(HydraWarning, match="members 0 and 2") as caught:
        he.fuse(pruned)
    assert caught[0].filename == __file__  # of whoever called, not of a file in the library
    he.fuse(pruned[:2])


def test_a_key_is_of_values_and_their_places() -> None:
    ids = torch.tensor([[3, 1, 2, 0], [3, 2, 1, 0], [0, 2, 0, 0], [1, 0, 1, 0]])  # the last two: same sum, same moment
    assert len(np.unique(sample_keys(ids))) == 4
    padded = {"input_ids": torch.cat([ids, torch.full((4, 3), 9)], 1), "attention_mask": torch.ones(4, 7).long()}
    padded["attention_mask"][:, 4:] = 0
    assert np.array_equal(sample_keys({"input_ids": ids}), sample_keys(padded))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64):
        values = torch.tensor([[1, 0], [0, 1]]).to(dtype)
        assert len(set(sample_keys({"pixel_values": values}).tolist())) == 2
    many = torch.randn(600, 3, 4)
    assert np.array_equal(sample_keys(many)[500:], sample_keys(many[500:].clone()))
    assert keys_at_hand(iter(())) is None
    assert keys_at_hand([]) is None
