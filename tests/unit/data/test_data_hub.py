"""The hub, with a stand-in for the `datasets` library (which the tests do not need)."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import picture

from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.data.loading import Columns, load
from hydra_ensembles.errors import DataError, MissingExtraError


class StandInDataset:
    """Behaves like `datasets.Dataset`: rows as dictionaries, columns by name, features."""

    def __init__(self, columns: dict[str, list[Any]], names: list[str] | None = None) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.features = {"label": SimpleNamespace(names=names), "text": SimpleNamespace()}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    texts = {"text": ["a", "b"], "label": [1, 0]}
    known = {
        "owner/reviews": {"test": StandInDataset(texts, ["neg", "pos"]), "train": StandInDataset(texts)},
        "pictures": {"test": StandInDataset({"image": [picture(1, mode="L")], "label": [0]}, ["cat"])},
        "translations": {"test": StandInDataset({"translation": [{"en": "dog"}]})},
    }

    def load_dataset(name: str, config: str | None, split: str | None = None) -> Any:
        made.append((name, config, split))
        if name not in known:
            raise FileNotFoundError(f"Couldn't find a dataset {name}")
        if split is None:
            return known[name]
        if split not in known[name]:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(known[name])}.')
        return known[name][split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return made


def test_texts_with_their_class_names(calls: list[tuple[Any, ...]]) -> None:
    data = load("owner/reviews", "test", config="plain")
    assert calls == [("owner/reviews", "plain", "test")]
    assert list(data) == [("a", 1), ("b", 0)]
    assert data.class_names == ("neg", "pos")


def test_images_become_rgb(calls: list[tuple[Any, ...]]) -> None:
    data = load("hub:pictures")  # one split needs no choosing
    assert isinstance(data, ImageDataset)
    assert data[0][0].mode == "RGB"
    assert np.array_equal(np.asarray(data[0][0])[..., 1], np.asarray(picture(1, mode="L")))


def test_nested_columns(calls: list[tuple[Any, ...]]) -> None:
    data = load("translations", "test", columns=Columns(text="translation.en"), labels="optional")
    assert data[0] == ("dog", -1)


def test_what_is_missing(calls: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\]; choose one"):
        load("owner/reviews")
    with pytest.raises(DataError, match="split 'dev', cannot be loaded: Unknown split"):
        load("owner/reviews", "dev")
    with pytest.raises(DataError, match="Couldn't find a dataset"):
        load("owner/nothing", "test")
    with pytest.raises(DataError, match=r"row 0 of hub data set 'translations'.*holds a dict"):
        load("translations", "test", columns=Columns(image="translation"), labels="optional")[0]


@pytest.mark.parametrize("path", ["./here", "a/b/c", "/no/where", "a.parquet", "x/b.csv", "~/data"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(calls: list[tuple[Any, ...]], path: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(path)
    with pytest.raises(DataError, match=r"reviews does not exist; check the path, or write 'hub:owner/name'"):
        load("owner/reviews", "test", root="nowhere")
    assert calls == []


def test_without_the_library_the_error_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"'images/cifar10' is not a file or folder here.*datasets"):
        load("images/cifar10", "test")
