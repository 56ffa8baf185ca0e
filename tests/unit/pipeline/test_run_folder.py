"""The resumable run folder: products are made once and then loaded; folders of other work are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.errors import CheckpointError, StorageError
from hydra_ensembles.files import sealed
from hydra_ensembles.run_folder import RunFolder, require_own_folder
from processes import by_two_ranks

IDENTITY = {"seed": 1, "model": {"weights": "abc"}}


def never() -> Any:
    raise AssertionError("made again")


def test_products_are_made_once_and_read_afterwards(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2).T}
    run = RunFolder(tmp_path / "new" / "run", IDENTITY)
    made = run.json("deep/facts", lambda: {"pair": (1, 2)})
    stored = run.tensors("weights", lambda: tensors)
    assert made == {"pair": [1, 2]}
    again = RunFolder(tmp_path / "new" / "run", IDENTITY)
    assert again.json("deep/facts", never) == made
    torch.testing.assert_close((again.tensors("weights", never), stored), (tensors, tensors), rtol=0.0, atol=0.0)


def test_without_a_path_nothing_is_kept_and_only_the_first_process_writes(tmp_path: Path) -> None:
    run = RunFolder(None, IDENTITY)
    assert (run.json("a", lambda: 1), run.json("a", lambda: 2)) == (1, 2)
    both = by_two_ranks(lambda rank: RunFolder(tmp_path / str(rank), IDENTITY).json("a", lambda: 1))
    assert [one.result() for one in both] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_other_work_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", IDENTITY)
    for other, token in (({**IDENTITY, "seed": 2}, "seed"), ({"seed": 1}, "model")):
        with pytest.raises(CheckpointError, match=token):
            RunFolder(tmp_path / "run", other)
    RunFolder(tmp_path / "run", IDENTITY)
    folder = tmp_path / "someone's"
    folder.mkdir()
    (folder / "todo.txt").touch()
    with pytest.raises(CheckpointError, match=r"todo\.txt"):
        RunFolder(folder, IDENTITY)
    assert [path.name for path in folder.iterdir()] == ["todo.txt"]


def test_what_a_kill_leaves_is_no_obstacle_and_removed_once_the_folder_is_ours(tmp_path: Path) -> None:
    for name in ("config.yaml", ".config.yaml.x.tmp"):  # left by a command line killed early
        (tmp_path / name).write_text("")
    require_own_folder(tmp_path)
    run = RunFolder(tmp_path, IDENTITY)
    assert (tmp_path / ".config.yaml.x.tmp").exists()  # before `run.json` it might belong to someone else
    (tmp_path / "model" / ".saving-x").mkdir(parents=True)
    (tmp_path / "model" / ".config.json.y.tmp").write_text("{")
    run.json("kept", lambda: 1)
    assert {path.name for path in tmp_path.rglob("*")} == {"config.yaml", "run.json", "kept.json", "model"}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Two runs, each with a finished JSON file."""
    for number in (1, 2):
        RunFolder(tmp_path / f"run{number}", IDENTITY).json("facts", lambda number=number: {"number": number})
    return tmp_path


def test_a_product_of_another_run_is_refused_and_one_that_is_not_finished_is_made_anew(made: Path) -> None:
    shutil.copy(made / "run2" / "facts.json", made / "run1")
    with pytest.raises(CheckpointError, match=r"facts\.json cannot be used: it is not what this run made.*Delete"):
        RunFolder(made / "run1", IDENTITY).json("facts", never)
    (made / "run2" / "run.json").write_text(json.dumps(sealed({**IDENTITY, "products": {}})))
    run = RunFolder(made / "run2", IDENTITY)  # not recorded, so a kill may have left it
    assert run.json("facts", lambda: {"number": 3}) == {"number": 3}


def test_a_changed_record_is_refused_and_a_folder_of_before_is_read_without_digests(made: Path) -> None:
    file = made / "run1" / "run.json"
    written = json.loads(file.read_text())
    for change in ({"products": {}}, {"seed": 2}, {"digest": None}):
        file.write_text(json.dumps({**written, **change}))
        with pytest.raises(CheckpointError, match=r"run\.json was changed"):
            RunFolder(made / "run1", IDENTITY)
    file.write_text(json.dumps(IDENTITY))
    run = RunFolder(made / "run1", IDENTITY)
    assert run.json("facts", never) == {"number": 1}
    assert run.json("more", lambda: 1) == RunFolder(made / "run1", IDENTITY).json("more", never)


def test_two_do_not_work_in_one_folder_and_reading_needs_no_lock(made: Path) -> None:
    folder = made / "run1"
    first, second = RunFolder(folder, IDENTITY), RunFolder(folder, IDENTITY)
    with first.working():
        (folder / ".facts.json.x.tmp").write_text("half of it")  # being written by the first
        with pytest.raises(StorageError, match=rf"another run is using {folder} \(process {os.getpid()}\)"):
            second.json("new", never)
        assert (folder / ".facts.json.x.tmp").exists()
        assert second.json("facts", never) == {"number": 1}
        assert first.json("new", lambda: 1) == 1  # the holder of the lock can work
    assert second.json("other", lambda: 2) == 2
    assert not list(folder.rglob(".*"))
