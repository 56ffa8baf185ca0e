"""Scoring: every item of an archive has one row, with the answer of `predict`, despite interruptions and changes."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, StorageError
from hydra_ensembles.serve import score as score_archive
from hydra_ensembles.serve import scorer
from hydra_ensembles.serve.batcher import Runner
from hydra_ensembles.serve.protocol import columns
from hydra_ensembles.serve.scorer import Scorer
from processes import count_calls, in_a_child
from served_models import served
from serving import opened, picture

pytestmark = pytest.mark.usefixtures("usual_kernels")  # a sample rounds alike in batches of any size


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, array in wanted.items():
        step = 1 / 40 if name in ("p_value", "familiarity") else 1e-5  # rounding may move it past a held-out score
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-4, atol=step, err_msg=name)


def scalars(prediction: Any) -> dict[str, np.ndarray]:
    return {name: array for name, array in columns(prediction).items() if array.ndim == 1}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twenty texts in three files, five of them unreadable."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text("text,id\n" + "".join(f"hello wörld,{row}\n" for row in range(7)) + "short\n")
    lines = [json.dumps({"text": text, "id": {"x": 1}}) for text in ("hello", "half \ud800", "wörld", "hello hello")]
    (folder / "b.jsonl").write_text("\n".join([*lines, "broken", "[]", '{"text": null}', *lines[2:] * 2]))
    (folder / "c.csv").write_text("text,id\nhello,x\n")
    return folder


def score(source: Any, output: Any, model: str = "text", **settings: Any) -> tuple[int, int, int]:
    """Rows, those without an answer, and shards."""
    usual = {"keep": ["id"], "wide": True, "batch_size": 3, "shard_rows": 4, "workers": 0, "progress": False}
    found = score_archive(served(model), source, output, **{**usual, **settings})
    return found.rows, found.unreadable, found.shards


def written(output: Path) -> list[Any]:
    """All rows in order."""
    return [row for file in sorted(output.glob("rows/*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_an_archive_becomes_shards(source: Path, output: Path) -> None:
    assert score(source, output) == (20, 5, 6)
    rows = written(output)
    assert [row["input"] for row in rows[:9]] == [*(f"a.csv:{row}" for row in range(8)), "b.jsonl:0"]
    bad = [row for row in rows if row["error"]]
    assert [row["input"] for row in bad] == ["a.csv:7", "b.jsonl:1", "b.jsonl:4", "b.jsonl:5", "b.jsonl:6"]
    assert [(row["label"], row["accept"], row["class_name"]) for row in bad] == [(-1, False, "")] * 5
    good = [row for row in rows if not row["error"]]
    assert [row["id"] for row in good[6:8]] == ["6", '{"x": 1}']
    texts = ["hello wörld"] * 7 + ["hello", "wörld", "hello hello", *["wörld", "hello hello"] * 2, "hello"]
    p = served("text").predict(texts)
    same({name: [row[name] for row in good] for name in columns(p)}, columns(p))
    assert [row["class_name"] for row in good] == p.names()
    assert len({pq.read_schema(file).remove_metadata() for file in output.glob("rows/*")}) == 1
    assert json.loads((output / "about.json").read_text())["reasons"] == ["", "unsure", "unfamiliar", "alarm"]
    (source / "d.csv").write_text("text,text_pair,label,id\nhello,wörld,7,1\n")
    assert score(source / "d.csv", output / "pair", keep=["label"])[0] == 1  # below another, and on its own
    (row,) = written(output / "pair")
    assert row["kept_label"] == "7"
    assert row["label"] == served("text").predict([("hello", "wörld")]).label.item()
    with pytest.raises(ConfigError, match="kept_label"):
        score(source, output / "x", keep=["label", "kept_label"])


# where the process is killed: before the n-th call (from 1) of a function
POINTS: list[tuple[Any, str, int]] = [(os, "replace", count) for count in range(1, 11)]
POINTS += [(Runner, "run", count) for count in range(1, 7)] + [(Scorer, "answered", count) for count in range(3, 7)]


@pytest.mark.parametrize("points", [POINTS[2::6], pytest.param(POINTS, marks=pytest.mark.slow)])
def test_a_kill_loses_no_row_and_doubles_none(
    points: list[tuple[Any, str, int]], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "_fastest", lambda *_: "batched")  # else each folder may have another, and other bits
    wanted = score(source, tmp_path / "undisturbed")
    files = {file.name: file.read_bytes() for file in (tmp_path / "undisturbed" / "rows").iterdir()}
    for owner, name, count in points:
        output = tmp_path / f"{name}-{count}"

        def work(owner: Any = owner, name: str = name, count: int = count, output: Path = output) -> None:
            calls = iter(range(1, count + 1))
            count_calls(pytest.MonkeyPatch(), owner, name, lambda: next(calls) == count and os._exit(9))
            score(source, output, workers=count % 2)

        assert in_a_child(work) == 9, (name, count)
        assert score(source, output) == wanted, (name, count)
        assert {file.name: file.read_bytes() for file in (output / "rows").iterdir()} == files, (name, count)
        assert not list(output.rglob(".*.tmp")), (name, count)


def test_a_resume_reads_no_file_that_is_done_and_scores_what_was_added_or_changed(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(source, output)
    before = written(output)
    read: list[int] = []
    count_calls(monkeypatch, Scorer, "answered", lambda: read.append(1))
    assert score(source, output) == (20, 5, 6)
    assert not read
    (source / "c.csv").write_text("text,id\nwörld,x\nwörld,y\n")
    (source / "0.txt").write_text("hello\n")
    assert score(source, output) == (22, 5, 7)
    assert len(read) == 2
    rows = {row["input"]: row for row in written(output)}
    assert len(rows) == 22
    assert all(repr(rows[row["input"]]) == repr(row) for row in before if row["input"] != "c.csv:0")
    next(output.glob("rows/b.jsonl*_00001_*")).unlink()
    assert score(source, output) == (22, 5, 7)
    assert {row["input"] for row in written(output)} == rows.keys()


def test_images_of_a_folder_are_shards_too(output: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(6):
        (tmp_path / "in" / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "in" / "5.png").write_bytes(b"no image")
    found = score(tmp_path / "in", output, "image", keep=[], batch_size=2)
    assert found == (6, 1, 2)
    p = scalars(served("image").predict([opened(picture(number)) for number in range(5)]))
    same({name: [row[name] for row in written(output)[:5]] for name in p}, p)
    (tmp_path / "in" / "6.png").write_bytes(picture(6))
    assert score(tmp_path / "in", output, "image", keep=[], batch_size=2) == (7, 1, 2)


def test_another_run_is_refused(source: Path, output: Path, tmp_path: Path) -> None:
    score(source, output)
    for settings in ({"shard_rows": 5}, {"model": "text, bare"}, {"keep": []}):
        with pytest.raises(CheckpointError, match="another run"):
            score(source, output, **settings)


def test_processes_urls_patterns_and_folders_of_datasets(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However an archive is reached, its rows are the same."""
    monkeypatch.setattr(scorer, "_fastest", lambda *_: "batched")
    score(source, output)
    files = fsspec.filesystem("memory")
    for file in source.iterdir():
        files.pipe(f"/archive/{file.name}", file.read_bytes())
    place = f"memory://{tmp_path.name}"
    assert score("memory://archive", place, workers=2) == score("memory://archive", place, workers=2) == (20, 5, 6)
    for file in files.glob(f"/{tmp_path.name}/rows/*.parquet"):
        found = pq.read_table(io.BytesIO(files.cat_file(file))).to_pylist()
        local = next(output.glob(f"rows/{'_'.join(file.split('/')[-1].split('_')[:3])}_*"))
        assert repr(found) == repr(pq.read_table(local).to_pylist())
    with pytest.raises(CheckpointError, match="another run"):
        score("memory://archive", place, shard_rows=5)
    assert score(f"{source}/[ac].csv", tmp_path / "pattern") == (9, 1, 3)
    files.pipe("/pictures/1.png", picture(1))
    assert score("memory://pictures", tmp_path / "pictures", "image", keep=[], workers=2)[:2] == (1, 0)
    datasets.Dataset.from_dict({"text": ["hello", None], "id": [1, 2]}).save_to_disk(tmp_path / "saved")
    assert score(tmp_path / "saved", tmp_path / "of-saved") == (2, 1, 1)


def test_what_a_user_mistakes_is_one_sentence(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, settings, told in (
        (source / "none", {}, "does not exist"),
        (f"{source}/*.tar", {}, "pattern"),
        ("http://127.0.0.1:9/a.csv", {}, "cannot be reached"),
        ("nothing://x", {}, "nothing"),
        (source / "a.csv", {"columns": {"text": "txet"}}, "there is text"),
    ):
        with pytest.raises(DataError, match=told):
            score(given, output, **settings)
    assert not output.exists()
    calls = iter(range(4))

    def full(_: int) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space"):
            score(source, output)
    assert score(source, output) == (20, 5, 6)
    (kept,) = output.glob("rows/c.csv*")
    pq.write_table(pq.read_table(kept).replace_schema_metadata({}), kept)  # as of another model
    with pytest.raises(CheckpointError, match="another model"):
        score(source, output)


def test_the_summary_and_the_function_for_other_engines(source: Path, output: Path) -> None:
    one = served("text")
    found = score_archive(one, source, output, keep=["id"], workers=0, progress=False)
    rows = written(output)
    assert found.accepted == sum(row["accept"] for row in rows)
    assert sum(found.errors.values()) == found.unreadable == 5
    assert found.accepted + sum(found.reasons.values()) == 15
    assert json.loads((output / "summary.json").read_text())["rows"] == 20
    columns_of = Scorer(one, batch_size=3)(["hello", "half \ud800", ("hello", "wörld")])
    assert [bool(error) for error in columns_of["error"]] == [False, True, False]
    assert columns_of["label"].tolist() == [
        one.predict(["hello"]).label.item(),
        -1,
        one.predict([("hello", "wörld")]).label.item(),
    ]
    assert set(columns_of) == set(rows[0]) - {"input", "id"}
