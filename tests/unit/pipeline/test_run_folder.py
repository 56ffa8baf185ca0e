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
    assert told == ["deep/facts.json", "weights.safetensors"] == list(run.seconds)
    again = RunFolder(tmp_path / "new" / "run", IDENTITY)
    assert again.json("deep/facts", never) == made
    read = again.tensors("weights", never)
    torch.testing.assert_close((read, stored), (tensors, tensors), rtol=0.0, atol=0.0)
    assert again.seconds == run.seconds


def test_without_a_path_nothing_is_kept() -> None:
    run = RunFolder(None, IDENTITY)
    assert (run.json("a", lambda: 1), run.json("a", lambda: 2)) == (1, 2)
    assert run.place("a") is None
    assert not run.has("a")


def test_seconds_leave_out_what_was_made_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 5.0, 7.0])  # the outer one takes 7 seconds, 4 of them inside
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    run = RunFolder(tmp_path, IDENTITY)
    run.json("outer", lambda: run.json("inner", lambda: 1))
    assert run.seconds == {"inner.json": 4.0, "outer.json": 3.0}


@pytest.mark.parametrize(("other", "token"), [({**IDENTITY, "seed": 2}, "seed"), ({"seed": 1}, "model")])
def test_other_work_is_refused(tmp_path: Path, other: dict[str, Any], token: str) -> None:
    RunFolder(tmp_path, IDENTITY)
    with pytest.raises(CheckpointError, match=token):
        RunFolder(tmp_path, other)
    RunFolder(tmp_path, IDENTITY)


@pytest.mark.parametrize(("name", "text"), [("todo.txt", ""), ("run.json", "{")])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        RunFolder(tmp_path, IDENTITY)
    with pytest.raises(CheckpointError, match="is a file"):
        RunFolder(tmp_path / name, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_a_kill_leaves_is_no_obstacle_and_removed(tmp_path: Path) -> None:
    for name in ("config.yaml", ".run.json.x.tmp"):  # of a command line killed early
        (tmp_path / name).write_text("")
    require_own_folder(tmp_path)
    RunFolder(tmp_path, IDENTITY).json("kept", lambda: 1)
    (tmp_path / "model" / ".saving-x").mkdir(parents=True)
    (tmp_path / "model" / ".config.json.y.tmp").write_text("{")
    RunFolder(tmp_path, IDENTITY)
    names = {"config.yaml", "run.json", "seconds.json", "kept.json", "model"}
    assert {path.name for path in tmp_path.rglob("*")} == names


def test_a_damaged_product_is_named_and_lost_times_do_not_matter(tmp_path: Path) -> None:
    RunFolder(tmp_path, IDENTITY).json("heads", lambda: {"members": [1]})
    (tmp_path / "heads.json").write_text("{")
    for damage in ("[1", "[1]"):
        (tmp_path / "seconds.json").write_text(damage)
        run = RunFolder(tmp_path, IDENTITY)
        assert run.seconds == {}
    with pytest.raises(CheckpointError, match=r"Delete .*heads\.json"):
        run.json("heads", never)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path, IDENTITY)

    def full(*arguments: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="space"):
            run.json("a", lambda: 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert run.json("a", lambda: 2) == 2


def test_of_several_processes_only_the_first_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert RunFolder(tmp_path, IDENTITY).json("a", lambda: 1) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_is_tidied_only_once_it_is_ours(tmp_path: Path) -> None:
    mine = tmp_path / ".cache" / ".mine.tmp"
    mine.parent.mkdir()
    mine.write_text("")
    RunFolder(tmp_path, IDENTITY)
    assert mine.exists()
    RunFolder(tmp_path, IDENTITY)
    assert not mine.exists()
