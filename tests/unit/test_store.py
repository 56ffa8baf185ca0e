import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydra_ensembles.errors import CheckpointError, StorageError
from hydra_ensembles.store import TENSORS, Store

IDENTITY = {"model": "abc", "seeds": (1, 2)}
KILLED = """
import os, signal, sys
from hydra_ensembles.store import Store
with Store(sys.argv[1], {"model": "abc", "seeds": (1, 2)}) as run:
    run.step("heads", lambda: [1, 2])
    (run.folder / "half.json").write_text("[1,")  # a product whose writer was killed
    (run.folder / ".half.json.1234.tmp").write_text("[1,")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def never() -> object:
    raise AssertionError("made again")


def test_a_step_is_made_once(tmp_path: Path) -> None:
    for folder in (tmp_path / "run", None):
        with Store(folder, IDENTITY) as run:
            assert run.step("members/heads", lambda: {"a": (1, 2)}) == {"a": [1, 2]}
            run.step("weights", lambda: {"w": torch.ones(2).expand(3, 2)}, TENSORS)
            assert run.has("members/heads") == (folder is not None)
    with Store(tmp_path / "run", IDENTITY) as run:
        assert run.step("members/heads", never) == {"a": [1, 2]}
        assert run.step("weights", never, TENSORS)["w"].equal(torch.ones(3, 2))


def test_after_a_kill_finished_work_is_read_and_the_rest_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with Store(folder, IDENTITY) as run:
        assert run.step("heads", never) == [1, 2]
        assert run.step("half", lambda: [1, 2, 3]) == [1, 2, 3]
        assert not list(folder.glob(".*.tmp"))


def test_the_folder_of_other_work_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "run", IDENTITY):
        pass
    with (
        pytest.raises(CheckpointError, match="model was 'abc' and is 'other'"),
        Store(tmp_path / "run", {**IDENTITY, "model": "other"}),
    ):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(CheckpointError, match="folder"), Store(path, IDENTITY):
            pass


def test_a_changed_product_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path, IDENTITY) as run:
        run.step("heads", lambda: [1, 2])
        (tmp_path / "heads.json").write_text("[1, 3]")
        with pytest.raises(CheckpointError, match="heads"):
            run.step("heads", never)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path, IDENTITY), pytest.raises(StorageError, match="another process"), Store(tmp_path, IDENTITY):
        pass
    with Store(tmp_path, IDENTITY):  # the lock is free again
        pass
