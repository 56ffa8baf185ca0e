"""Files: what is written is whole or not there, and what cannot be read or written is named."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hydra_ensembles.errors import CheckpointError, StorageError
from hydra_ensembles.files import read_file, read_json, read_object, write_atomically
from hydra_ensembles.files import write_json as write


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.json"
    write_atomically(path, b"1")

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"a\.json.*No space"):
        write_atomically(path, b"2")
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"1"
    with pytest.raises(StorageError):
        write_atomically(tmp_path / "new", b"a folder is there")


def test_json_comes_back_and_a_missing_file_is_named(tmp_path: Path) -> None:
    path, value = tmp_path / "a.json", {"a": [1, None, "é", {"b": 0.1}]}
    write(path, value)
    assert read_json(path) == read_object(path) == value
    with pytest.raises(ValueError, match="JSON"):
        write(path, float("nan"))
    write(path, [1])
    with pytest.raises(CheckpointError, match="list"):
        read_object(path)
    with pytest.raises(CheckpointError, match="missing"):
        read_file(tmp_path / "missing")
