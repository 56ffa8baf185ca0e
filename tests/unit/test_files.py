"""Files appear in one piece, JSON is read strictly, and one worker at a time is in a folder, whatever ends it."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hydra_ensembles.errors import CheckpointError, HydraError, StorageError
from hydra_ensembles.files import (
    checksum,
    digest_of,
    json_bytes,
    locked,
    parse_json,
    read_file,
    read_json,
    read_sealed,
    sealed,
    unsealed,
    write_atomically,
    write_json,
    write_sealed,
    writing,
)
from processes import in_a_child


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_respect_the_umask(tmp_path: Path, mask: int, expected: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "private" / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "private" / "file").stat().st_mode & 0o777 == expected
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "token"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "free some space"),
        (errno.EROFS, "allow writing"),
        (errno.EACCES, "allow writing"),
        (errno.ENOENT, "look"),
        (errno.EIO, "another place"),
    ],
)
def test_what_the_disk_refuses_is_an_error_of_ours(
    number: int, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=token) as caught:
        write_atomically(tmp_path / "file", b"new")
    assert isinstance(caught.value, HydraError)
    assert str(tmp_path / "file") in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_write_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "file", os.fsync
    for name in (".file.0123.tmp", ".other.0123.tmp"):
        (tmp_path / name).write_bytes(b"half of it")

    def write_in_between(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_atomically(path, b"of another writer")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", write_in_between)
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert {one.name for one in tmp_path.iterdir()} == {"file", ".other.0123.tmp"}


def test_a_second_writer_at_the_last_moment_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, met = os.replace, []

    def meanwhile(source: Path, target: Path) -> None:
        if not met:
            met.append(True)
            write_atomically(target, b"second")
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_atomically(tmp_path / "file", b"first")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"first")]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # as a device: whoever may write there must not take it away
    with pytest.raises(StorageError, match="not a plain file"):
        write_atomically(tmp_path / "pipe", b"content")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        write_atomically(tmp_path / "file/inside", b"")
    with pytest.raises(StorageError, match="file"):
        locked(tmp_path / "file", "build").__enter__()
    with pytest.raises(StorageError, match="the rest is safe"), writing(tmp_path, "the rest is safe"):
        (tmp_path / "nothing").rmdir()


def test_the_second_worker_is_told_and_the_lock_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with locked(folder, "build"):
        for _ in range(2):
            with pytest.raises(StorageError, match=f"another build works in .*process {os.getpid()}"):
                locked(folder, "build").__enter__()
    with pytest.raises(KeyboardInterrupt), locked(folder, "build"):
        raise KeyboardInterrupt
    with locked(folder, "build", wait=True), locked(tmp_path, "build"):
        assert (folder / ".lock").is_file()
    assert not list(folder.iterdir())


def test_a_lock_is_not_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="cannot be written"):
        locked(tmp_path / "a", "build").__enter__()
    assert (tmp_path / "precious").read_text() == "text"


def test_a_killed_worker_holds_nothing_even_if_its_child_lives(tmp_path: Path) -> None:
    lives, born = os.pipe()
    read, write = os.pipe()

    def work() -> None:
        with locked(tmp_path, "build"):
            if os.fork() == 0:  # a child, as loaders of data have them, that outlives its killed parent
                os.close(write)
                os.write(born, b"1")  # by now it has let go of what its parent holds
                os.read(read, 1)
                os._exit(0)
            os.read(lives, 1)
            os._exit(9)

    assert in_a_child(work) == 9
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path, "build"):
        pass
    assert not list(tmp_path.iterdir())
    for end in (write, read, lives, born):  # the first of which ends the grandchild
        os.close(end)


def test_those_who_wait_come_one_at_a_time(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(100):
            with locked(tmp_path, "save", wait=True):
                count = int((tmp_path / "count").read_text())
                (tmp_path / "count").write_text(str(count + 1))

    (tmp_path / "count").write_text("0")
    with ThreadPoolExecutor(3) as pool:  # a lock belongs to an open file, so threads are like processes to it
        for done in [pool.submit(work) for _ in range(3)]:
            done.result()
    assert (tmp_path / "count").read_text() == "300"


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 100_000, "too deeply"),
        (b"[" * 500 + b"]" * 500, "too deeply"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"\\udfff": 1}', "surrogates"),
    ],
)
def test_text_that_is_not_strictly_json(content: bytes, token: str) -> None:
    with pytest.raises(CheckpointError, match=token):
        parse_json(content, "file")


def test_json_text_is_readable_and_comes_back() -> None:
    value = {"lists": [[0, 1], [], [3]], "empty": {}, "deep": {"words": ["word " * 12] * 3}, "ü": None}
    content = json_bytes(value, "file")
    assert parse_json(content, "file") == value
    for bad in (float("nan"), {1, 2}, "\ud800"):
        with pytest.raises(CheckpointError, match="file"):
            json_bytes([bad], "file")


def test_json_files_are_read_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "new/file.json"
    write_json(path, {"a": [1]})
    assert read_json(path) == {"a": [1]}
    for wrong, most in ((path, 4), (tmp_path / "new", 99), (tmp_path / "none.json", 99), (Path("/dev/zero"), 99)):
        for read in (read_file, read_json):
            with pytest.raises(CheckpointError, match=wrong.name):
                read(wrong, most)
    os.truncate(path, 1 << 40)  # a hole, which takes no place on the disk
    with pytest.raises(CheckpointError, match="limit"):
        checksum(path, 1 << 20)
    write_json(path, {"a": [1]})
    with pytest.raises(CheckpointError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": [1]}


def test_a_seal_shows_every_change_of_content_and_none_of_layout() -> None:
    plain = {"a": 1.5, "b": [1, None, "ü"], "c": {"d": True}}
    seal = sealed(plain)
    assert unsealed(dict(reversed(seal.items())), "file") == plain
    assert unsealed(plain, "file", required=False) == plain
    changes: list[dict[str, object]] = [{"a": 1.25}, {"b": [1, "ü"]}, {"c": {"d": 1}}, {"digest": "0"}, {"e": 0}]
    for changed in (plain, *({**seal, **change} for change in changes), {k: v for k, v in seal.items() if k != "c"}):
        with pytest.raises(CheckpointError, match="digest"):
            unsealed(changed, "file")
    with pytest.raises(CheckpointError, match="digest"):
        unsealed({**seal, "a": 2}, "file", required=False)
    for bad in (float("inf"), {1}, object()):
        with pytest.raises(CheckpointError, match="digest"):
            digest_of([bad])


def test_one_file_of_a_folder_may_be_locked_alone(tmp_path: Path) -> None:
    with locked(tmp_path, "run", file="a"), locked(tmp_path, "run", file="b"), locked(tmp_path, "run"):
        with pytest.raises(StorageError, match=f"works in {tmp_path / 'a'}"), locked(tmp_path, "x", file="a"):
            pass
        assert {path.name for path in tmp_path.iterdir()} == {".a.lock", ".b.lock", ".lock"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[1]", "5", '{"a": 1, "digest": "0"}', '{"a": 1}'])
def test_a_sealed_file_is_an_object_with_its_digest(tmp_path: Path, content: str) -> None:
    write_sealed(tmp_path / "file", {"a": 1})
    assert read_sealed(tmp_path / "file", required=True) == {"a": 1}
    (tmp_path / "file").write_text(content)
    with pytest.raises(CheckpointError, match="file"):
        read_sealed(tmp_path / "file", required=True)
