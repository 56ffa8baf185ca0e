"""Images packed into one file come out as they went in."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hydra_ensembles.demo.packed_images import PackedImage, PackedSet, read_packed, write_packed
from hydra_ensembles.errors import DataError


def some_sets() -> list[PackedSet]:
    first = tuple(PackedImage(bytes([number] * (number + 1)), number % 3, "here/train", number) for number in range(5))
    second = (PackedImage(b"", -1, "there/test", 70_000), PackedImage(b"\xff\xd8 x", -1, "here/train", 9))
    return [PackedSet("known", ("a", "b", "c"), first), PackedSet("foreign", ("a", "b", "c"), second)]


def test_sets_come_back_as_they_were(tmp_path: Path) -> None:
    sets = some_sets()
    write_packed(tmp_path / "images.safetensors", sets)
    assert list(read_packed(tmp_path / "images.safetensors").values()) == sets


def test_the_data_set_knows_labels_and_names(tmp_path: Path) -> None:
    known = some_sets()[0].dataset()
    assert known.labels.tolist() == [0, 1, 2, 0, 1]
    assert known.class_names == ("a", "b", "c")
    with pytest.raises(DataError, match="image 2 of known cannot be decoded"):
        known[2]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as packed images"):
        read_packed(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as packed images"):
        read_packed(tmp_path / "text.safetensors")
    save_file({"a": np.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="has the format None"):
        read_packed(tmp_path / "other.safetensors")
