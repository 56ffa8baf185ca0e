"""The order of classes: finding their names, and checking sets against the model and each other, in every function."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import hydra_ensembles as he
from hydra_ensembles.batches import renumbered, same_names
from hydra_ensembles.data import BatchLoader, ImageDataset, batches
from hydra_ensembles.errors import DataError
from random_ensembles import noisy, small

NAMES = ("neg", "neu", "pos")


@pytest.mark.parametrize(
    "data",
    [
        SimpleNamespace(features={"image": object(), "label": SimpleNamespace(names=["dog", "cat"])}),  # as `datasets`
        ConcatDataset([Subset(ImageDataset([], [], names), []) for names in (["cat", "dog"], ["dog", "cat"])]),
    ],
)
def test_names_of_classes_are_found_wherever_libraries_keep_them(data: Any) -> None:
    source: Any = SimpleNamespace(dataset=data)
    with pytest.raises(DataError, match=r"class 0 of data is 'dog', .* class 1"):
        renumbered({"data": source}, ("cat", "dog"), 2)
    if hasattr(data, "datasets"):  # without known labels of the model, the parts are compared with each other
        with pytest.raises(DataError, match="class 0 of data is 'dog', which data has as class 1"):
            renumbered({"data": source}, (), 2)
    else:
        assert renumbered({"data": source}, (), 2) == {"data": source}


def test_spelling_makes_no_other_class() -> None:
    """File names on a Mac have decomposed accents, which sort differently: summer and hospital once were swapped."""
    apart, capitals = ("e\u0301te\u0301", "ho\u0302pital"), ("Hôpital", "ÉTÉ")
    assert same_names(apart, capitals) == {0: 1, 1: 0}
    assert same_names(("us", "US"), ("US", "us")) == {0: 1, 1: 0}  # two different classes
    assert same_names(["crane", "dog", "crane"], ["crane", "dog", "crane"]) == {0: 0, 1: 1, 2: 2}  # as in ImageNet
    data = ImageDataset([0, 0], [0, 1], apart)  # type: ignore[list-item]
    assert renumbered({"data": data}, capitals, 2)["data"].labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("names", "labels", "token"),
    [
        (("cat", "dog"), ("Hund", "Katze"), "cat, dog"),  # other words, or other classes
        (("neg", "other"), NAMES, "other"),
        (("neg", "pos"), (), "2 classes"),
        (("0", "10", "2"), (), "places"),  # the order of folders
    ],
)
def test_what_would_be_a_guess_is_refused(names: tuple[str, ...], labels: tuple[str, ...], token: str) -> None:
    data = ImageDataset([0, 0], [0, 1], names)  # type: ignore[list-item]
    with pytest.raises(DataError, match=token):
        renumbered({"data": data}, labels, 3)
    assert renumbered({"data": list(data)}, labels, 3)  # without names, numbers are taken as they are


def answered(model: he.Ensemble, names: tuple[str, ...], called: Callable[[int], str], seed: int) -> ImageDataset:
    """Images that the model assigns to the classes of these names, labelled in the order of the names."""
    images = torch.randn(400, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    found = [called(label) for label in model(images)[0].argmax(-1).tolist()]
    rows = [row for row, name in enumerate(found) if name in names]
    return ImageDataset([images[row] for row in rows], [names.index(found[row]) for row in rows], names, f"set {seed}")


def given(data: ImageDataset) -> BatchLoader:
    return batches(data, torch.stack, 50)


def foreign(data: Any) -> DataLoader[Any]:
    """A loader of another library, whose labels cannot be renumbered."""
    return DataLoader(data, 50)


@pytest.fixture(scope="module")
def model() -> he.Ensemble:
    return noisy(small(classes=3), 1)


@pytest.fixture(scope="module")
def whole(model: he.Ensemble) -> ImageDataset:
    found = answered(model, NAMES, NAMES.__getitem__, 1)
    assert set(found.labels.tolist()) == {0, 1, 2}
    return found


@pytest.fixture(scope="module")
def part(model: he.Ensemble) -> ImageDataset:
    """A set in which `pos` is class 1."""
    return answered(model, ("neg", "pos"), NAMES.__getitem__, 2)


STILL = he.Recipe(learning_rate=1e-12, steps=1, train_groups=("attention", "mlp", "norms", "readout"))


def test_validation_is_numbered_as_train(model: he.Ensemble, whole: ImageDataset, part: ImageDataset) -> None:
    tuned = he.finetune(model, given(whole), STILL, given(part), progress=False)
    assert (tuned.metadata.labels, tuned.metadata.metrics["validation/accuracy"]) == (NAMES, 1.0)
    with pytest.raises(DataError, match=r"class 1 of validation is 'pos', which train has as class 2"):
        he.finetune(model, given(whole), STILL, foreign(part), progress=False)
    with pytest.raises(DataError, match="train has 2 classes"):  # would train pos as class 1
        he.finetune(model, given(part), STILL, progress=False)


def test_sets_of_an_evaluation_are_numbered_alike(model: he.Ensemble, whole: ImageDataset, part: ImageDataset) -> None:
    for function in (model, lambda images: model(images)):
        found = he.evaluate(function, given(whole), shift={"v": given(part)}, progress=False)
        assert [found.numbers()[name] for name in ("accuracy", "shift.v.accuracy")] == [1.0, 1.0]
        with pytest.raises(DataError, match=r"class 1 of .*set 'v' is 'pos'"):
            he.evaluate(function, given(whole), shift={"v": foreign(part)}, progress=False)
    with pytest.raises(DataError, match=r"2 classes \(neg, pos\), but the model has 3 without names"):
        he.evaluate(model, given(part), progress=False)
    named = model.with_metadata(labels=NAMES)
    assert he.evaluate(named, given(part), progress=False).numbers()["accuracy"] == 1.0
    assert he.calibrate(named, given(part), familiarity=None).metadata.metrics["validation/accuracy"] == 1.0


def test_classes_are_put_in_order_by_name(part: ImageDataset) -> None:
    other = part.with_classes(("pos", "x", "neg"))
    assert other.class_names == ("pos", "x", "neg")
    assert other.labels.tolist() == [2 - 2 * label for label in part.labels.tolist()]
    with pytest.raises(DataError, match="classes pos, not among neg, neu"):
        part.with_classes(("neg", "neu"))
