"""Files are written atomically, JSON is read strictly, and one worker at a time uses a folder, even after a kill."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from hydra_ensembles import files
from hydra_ensembles.errors import CheckpointError, HydraWarning, StorageError
from processes import in_a_child


def test_what_the_disk_refuses_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StorageError, match="free some space"):
        files.write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_write_removes_what_a_killed_one_left_and_nothing_of_a_living_one(moment: str, tmp_path, monkeypatch) -> None:
    path, act = tmp_path / "file", getattr(os, moment)
    for name in (".file.0123.tmp", ".other.0123.tmp"):
        (tmp_path / name).write_bytes(b"half of it")

    def meanwhile(*arguments: object) -> None:
        monkeypatch.setattr(os, moment, act)
        files.write_atomically(path, b"of another writer")
        act(*arguments)

    monkeypatch.setattr(os, moment, meanwhile)
    files.write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert {one.name for one in tmp_path.iterdir()} == {"file", ".other.0123.tmp"}


def test_the_second_worker_is_told_and_the_lock_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with files.locked(folder, "build"), files.locked(tmp_path, "build"), files.locked(folder, "run", file="a"):
        for file in (None, "a"):
            with pytest.raises(StorageError, match=f"another build is using .*process {os.getpid()}"):
                files.locked(folder, "build", file=file).__enter__()
        assert {path.name for path in folder.iterdir()} == {".lock", ".a.lock"}
    with pytest.raises(KeyboardInterrupt), files.locked(folder, "build", wait=True):
        raise KeyboardInterrupt
    assert not list(folder.iterdir())


def test_a_disk_without_locks_is_worked_on_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.warns(HydraWarning, match="no locks"), files.locked(tmp_path, "build", wait=True):
        files.write_atomically(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_killed_worker_holds_nothing_even_if_its_child_lives(tmp_path: Path) -> None:
    lives, born = os.pipe()
    read, write = os.pipe()

    def work() -> None:
        with files.locked(tmp_path, "build"):
            if os.fork() == 0:  # a child, such as a data loader's worker, that outlives its killed parent
                os.close(write)
                os.write(born, b"1")  # by now it has released its parent's lock
                os.read(read, 1)
                os._exit(0)
            os.read(lives, 1)
            os._exit(9)

    assert in_a_child(work) == 9
    assert (tmp_path / ".lock").exists()
    with files.locked(tmp_path, "build"):
        pass
    assert not list(tmp_path.iterdir())
    for end in (write, read, lives, born):  # closing the first ends the grandchild
        os.close(end)


def test_those_who_wait_come_one_at_a_time(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(100):
            with files.locked(tmp_path, "save", wait=True):
                count = int((tmp_path / "count").read_text())
                (tmp_path / "count").write_text(str(count + 1))

    (tmp_path / "count").write_text("0")
    with ThreadPoolExecutor(3) as pool:  # locks belong to open files, so threads act like processes
        for done in [pool.submit(work) for _ in range(3)]:
            done.result()
    assert (tmp_path / "count").read_text() == "300"


@pytest.mark.parametrize(
    ("content", "token"),
    [(b"{", "not valid JSON"), (b"[" * 100_000, "too deeply"), (b'{"a": 1, "a": 2}', "twice"), (b'{"a": NaN}', "NaN")],
)
def test_text_that_is_not_strictly_json(content: bytes, token: str) -> None:
    with pytest.raises(CheckpointError, match=token):
        files.parse_json(content, "file")


def test_json_comes_back_and_only_plain_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "new/file.json"
    value = {"lists": [[0, 1], [], [3]], "empty": {}, "deep": {"words": ["word " * 12] * 3}, "ü": None}
    files.write_json(path, value)
    with pytest.raises(CheckpointError, match="file"):
        files.write_json(path, [float("nan")])
    assert files.read_json(path) == value
    for wrong in (tmp_path / "none.json", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=wrong.name):
            files.read_json(wrong)


def test_a_seal_shows_every_change_of_content_and_none_of_layout() -> None:
    plain = {"a": 1.5, "b": [1, None, "ü"], "c": {"d": True}}
    seal = files.sealed(plain)
    assert files.unsealed(dict(reversed(seal.items())), "file") == plain
    assert files.unsealed(plain, "file", required=False) == plain
    changes: list[dict[str, object]] = [{"a": 1.25}, {"b": [1, "ü"]}, {"c": {"d": 1}}, {"digest": "0"}, {"e": 0}]
    for changed in ({**seal, **change} for change in changes):
        for required in (True, False):
            with pytest.raises(CheckpointError, match="digest"):
                files.unsealed(changed, "file", required=required)
