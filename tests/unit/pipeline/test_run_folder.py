"""The resumable folder: made once and read afterwards, refused where it belongs to other work."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.pipeline.run_folder import RunFolder, require_own_folder

IDENTITY = {"seed": 1, "model": {"weights": "abc"}}


def never() -> Any:
    raise AssertionError("made again")


def test_products_are_made_once_and_read_afterwards(tmp_path: Path) -> None:
    told: list[str] = []
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2).T}
    run = RunFolder(tmp_path / "new" / "run", IDENTITY, announce=lambda name, seconds: told.append(name))
    made = run.json("deep/facts", lambda: {"pair": (1, 2)})
    stored = run.tensors("weights", lambda: tensors)
    assert made == {"pair": [1, 2]}
    assert told == ["deep/facts.json", "weights.safetensors"]
    again = RunFolder(tmp_path / "new" / "run", IDENTITY)
    assert again.json("deep/facts", never) == made
    torch.testing.assert_close((again.tensors("weights", never), stored), (tensors, tensors), rtol=0.0, atol=0.0)


def test_without_a_path_nothing_is_kept_and_only_the_first_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(None, IDENTITY)
    assert (run.json("a", lambda: 1), run.json("a", lambda: 2)) == (1, 2)
    assert run.place("a") is None
    assert not run.has("a")
    monkeypatch.setenv("RANK", "1")
    assert RunFolder(tmp_path, IDENTITY).json("a", lambda: 1) == 1
    assert not list(tmp_path.iterdir())


def test_other_work_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", IDENTITY)
    for other, token in (({**IDENTITY, "seed": 2}, "seed"), ({"seed": 1}, "model")):
        with pytest.raises(CheckpointError, match=token):
            RunFolder(tmp_path / "run", other)
    RunFolder(tmp_path / "run", IDENTITY)
    for name, text in (("todo.txt", ""), ("run.json", "{")):
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=name):
            RunFolder(folder, IDENTITY)
        with pytest.raises(CheckpointError, match="is a file"):
            RunFolder(folder / name, IDENTITY)
        assert [path.name for path in folder.iterdir()] == [name]


def test_what_a_kill_leaves_is_no_obstacle_and_removed_once_the_folder_is_ours(tmp_path: Path) -> None:
    for name in ("config.yaml", ".run.json.x.tmp"):  # of a command line killed early
        (tmp_path / name).write_text("")
    require_own_folder(tmp_path)
    RunFolder(tmp_path, IDENTITY).json("kept", lambda: 1)
    assert (tmp_path / ".run.json.x.tmp").exists()  # before `run.json` it might be anybody's
    (tmp_path / "model" / ".saving-x").mkdir(parents=True)
    (tmp_path / "model" / ".config.json.y.tmp").write_text("{")
    RunFolder(tmp_path, IDENTITY)
    assert {path.name for path in tmp_path.rglob("*")} == {"config.yaml", "run.json", "kept.json", "model"}


def test_a_damaged_product_is_named_and_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path, IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: never())
        with pytest.raises(AssertionError):
            run.json("a", lambda: 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert run.json("a", lambda: 2) == 2
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"Delete .*a\.json"):
        run.json("a", never)
