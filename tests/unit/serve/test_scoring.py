"""Scoring: every item of an archive has one row, with the answer of `predict`, despite interruptions and changes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hydra_ensembles.errors import CheckpointError, ConfigError
from hydra_ensembles.serve import Scored, scoring
from hydra_ensembles.serve import score as score_archive
from hydra_ensembles.serve.batcher import Runner
from hydra_ensembles.serve.protocol import columns
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


def score(source: Path, output: Path, model: str = "text", **settings: Any) -> Scored:
    usual = {"keep": ["id"], "wide": True, "batch_size": 3, "shard_rows": 4, "progress": False}
    found = score_archive(served(model), source, output, **{**usual, **settings})
    return replace(found, alarms=())  # these texts are unlike those of calibration: see test_watch


def written(output: Path) -> list[Any]:
    """All rows in order."""
    return [row for file in sorted(output.glob("rows/*")) for row in pq.read_table(file).to_pylist()]


def test_an_archive_becomes_shards(source: Path, output: Path) -> None:
    assert score(source, output) == Scored(rows=20, unreadable=5, shards=6)
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
    assert len({pq.read_schema(file) for file in output.glob("rows/*")}) == 1
    assert json.loads((output / "about.json").read_text())["reasons"] == ["", "unsure", "unfamiliar", "alarm"]
    (source / "d.csv").write_text("text,text_pair,label,id\nhello,wörld,7,1\n")
    assert score(source / "d.csv", output / "pair", keep=["label"]).rows == 1  # below another, and on its own
    (row,) = written(output / "pair")
    assert row["kept_label"] == "7"
    assert row["label"] == served("text").predict([("hello", "wörld")]).label.item()
    with pytest.raises(ConfigError, match="kept_label"):
        score(source, output / "x", keep=["label", "kept_label"])


# where the process is killed: before the n-th call (from 1) of a function
POINTS: list[tuple[Any, str, int]] = [*((os, "replace", count) for count in (1, 3, 5)), (Runner, "answers", 4)]


def test_a_kill_loses_no_row_and_doubles_none(source: Path, tmp_path: Path) -> None:
    wanted = score(source, tmp_path / "undisturbed")
    rows = written(tmp_path / "undisturbed")
    for owner, name, count in POINTS:
        output = tmp_path / f"{name}-{count}"

        def work(owner: Any = owner, name: str = name, count: int = count, output: Path = output) -> None:
            calls = iter(range(1, count + 1))
            count_calls(pytest.MonkeyPatch(), owner, name, lambda: next(calls) == count and os._exit(9))
            score(source, output)

        assert in_a_child(work) == 9, (name, count)
        assert len(written(output)) < len(rows)
        assert score(source, output) == wanted, (name, count)
        again = written(output)
        assert [row["input"] for row in again] == [row["input"] for row in rows], (name, count)
        same({"probs": [row["probs"] for row in again]}, {"probs": [row["probs"] for row in rows]})
        assert not list(output.rglob(".*.tmp")), (name, count)


def test_a_resume_reads_no_file_that_is_done_and_scores_what_was_added_or_changed(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(source, output)
    before = written(output)
    read: list[int] = []
    count_calls(monkeypatch, scoring, "_answered", lambda: read.append(1))
    assert score(source, output) == Scored(20, 5, 6)
    assert not read
    (source / "c.csv").write_text("text,id\nwörld,x\nwörld,y\n")
    (source / "0.txt").write_text("hello\n")
    assert score(source, output) == Scored(22, 5, 7)
    assert len(read) == 2
    rows = {row["input"]: row for row in written(output)}
    assert len(rows) == 22
    assert all(repr(rows[row["input"]]) == repr(row) for row in before if row["input"] != "c.csv:0")
    next(output.glob("rows/b.jsonl*_00001_*")).unlink()
    assert score(source, output) == Scored(22, 5, 7)
    assert {row["input"] for row in written(output)} == rows.keys()


def test_images_of_a_folder_are_shards_too(output: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(6):
        (tmp_path / "in" / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "in" / "5.png").write_bytes(b"no image")
    found = score(tmp_path / "in", output, "image", keep=[], batch_size=2)
    assert found == Scored(6, 1, 2)
    p = scalars(served("image").predict([opened(picture(number)) for number in range(5)]))
    same({name: [row[name] for row in written(output)[:5]] for name in p}, p)
    (tmp_path / "in" / "6.png").write_bytes(picture(6))
    assert score(tmp_path / "in", output, "image", keep=[], batch_size=2) == Scored(7, 1, 2)


def test_another_run_is_refused(source: Path, output: Path, tmp_path: Path) -> None:
    score(source, output)
    for settings in ({"shard_rows": 5}, {"model": "text, bare"}, {"keep": []}):
        with pytest.raises(CheckpointError, match="another run"):
            score(source, output, **settings)
