"""Every raw row becomes the input that `predict` would see, or says why not; files and folders in a fixed order."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.serve import rows
from hydra_ensembles.serve.batcher import Runner
from hydra_ensembles.serve.protocol import REASON_WORDS, Answering, columns, output_fields
from hydra_ensembles.serve.rows import Reader, input_fields, sources
from served_models import SCORES, inputs_for, served
from serving import POSTSCRIPT, opened, picture, png, turned


def same(answers: list[Any], expected: dict[str, Any]) -> None:
    assert all(list(answer) == list(expected) for answer in answers)
    for name, column in expected.items():
        near = 0.03 if name in ("p_value", "familiarity") else 2e-4  # they jump at held-out scores
        np.testing.assert_allclose([answer[name] for answer in answers], column, rtol=2e-4, atol=near, err_msg=name)


def test_images_however_they_are_given(tmp_path: Path) -> None:
    one, contents = served("image"), [picture(seed) for seed in range(5)]
    (tmp_path / "4.png").write_bytes(contents[4])
    given = [opened(contents[0]), *contents[1:4], tmp_path / "4.png"]
    read = [Reader(one).read(raw) for raw in given]
    assert [row.error for row in read] == [None] * 5
    expected = columns(one.predict([opened(content) for content in contents]))
    for most in (1, 2, 8):  # batches of every size
        same(Runner(one.optimize(), most).answers(read), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [True, False])
def test_texts_and_pairs_do_not_depend_on_their_neighbours(masked: bool) -> None:
    """Without a mask a model reads padding as text, so nothing is padded."""
    tokenizer = replace(served("text").metadata.preprocessing, attention_mask=masked)
    one = served("text").with_metadata(preprocessing=tokenizer)
    reader, texts = Reader(one), ["hello", "hello wörld", "wörld " * 7, ("hello", "hello"), ["hello", "wörld"]]
    read = [reader.read(text) for text in texts]
    tokens = {len(row.inputs["input_ids"]) for row in read}
    assert tokens == ({9} if masked else {1, 2, 7})
    assert {row.shape for row in read if masked} <= {row.shape for row in reader.examples()}
    answers = Runner(one.optimize(), 4).answers(read)
    for text, answer in zip(texts, answers, strict=True):
        pair = isinstance(text, list | tuple)
        same([answer], columns(one.predict([tuple(text)] if pair else [text])))


def test_what_cannot_be_read_says_so_and_what_was_cut_or_turned_too(tmp_path: Path) -> None:
    images, texts = Reader(served("image")), Reader(served("text"))
    for content, status, token in (
        (png(30_000, 30_000), 413, "large"),  # a picture bomb
        (png(1, 5000, 0, bytes(10_000)), 400, "1 x 5000"),  # resized for the model, it would take gigabytes
        (b"not an image", 415, "PNG"),
        (POSTSCRIPT, 415, "PNG"),
        (picture()[:200], 400, "it"),
        (tmp_path / "none.png", 400, "none.png"),
        (None, 400, "PIL"),
    ):
        error = images.read(content).error
        assert error is not None
        assert (getattr(error, "status", 400), token in str(error)) == (status, True), error
    for text in ("half \ud800", None, 3):
        assert texts.read(text).error is not None
    assert "EXIF" in images.read(turned()).notes[0]
    assert "tokens" in texts.read("wörld " * 30).notes[0]
    assert not texts.read("hello").notes
    (answer,) = Runner(served("image"), 1).answers([images.read(b"no image")])
    assert isinstance(answer, HydraError)


def test_a_model_without_its_preprocessing_reads_tensors_alone() -> None:
    bare = Reader(served("image").with_metadata(preprocessing=None))
    with pytest.raises(DataError, match="pixel_values"):
        bare.read(picture())
    images, texts = Reader(served("image")), Reader(served("text"))
    same(Runner(served("text"), 3).answers(texts.tensors(inputs_for(served("text"), 5))),
         columns(served("text").predict(inputs_for(served("text"), 5))))  # fmt: skip
    for read, given, token in (
        (images.tensors, {"pixel_values": torch.zeros(1, 3, 16, 16)}, r"\[8, 8\]"),
        (images.tensors, {"pixel_values": torch.full((1, 3, 8, 8), torch.nan)}, "NaN"),
        (texts.tensors, {"input_ids": torch.full((1, 3), 99)}, "vocabulary"),
    ):
        with pytest.raises(HydraError, match=token):
            read(given)


def test_a_container_has_fewer_cores_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(rows, "CPU_MAX", tmp_path / "cpu.max")
    assert rows.cores() == 8
    for content, expected in (("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)):
        (tmp_path / "cpu.max").write_text(content)
        assert rows.cores() == expected


# --- files and folders -----------------------------------------------------------------------------------------------


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def read(path: Path, kind: str, **settings: Any) -> list[tuple[str, Any]]:
    items = (item for source in sources(path, kind, **settings) for item in source)
    return [(item.name, (item.error and "!") or item.content) for item in items]


def test_images_of_every_kind_in_one_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.PNG").write_bytes(picture())
    for name in ("a.jpg", "z.png", ".hidden.png"):
        (tmp_path / name).write_bytes(picture())
    (tmp_path / "notes.md").write_text("not an image")
    tar(tmp_path / "c.tgz", {"0/1.png": picture(1), "0/1.json": b"{}", "0/._1.png": b"", "2.jpeg": picture(2)})
    cells = [{"bytes": picture(3), "path": None}, {"bytes": None, "path": "a.jpg"}, None]
    pq.write_table(pa.table({"image": cells, "id": [7, None, 9]}), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl").write_text(json.dumps({"image": "a.jpg"}) + "\n")
    assert read(tmp_path, "image") == [
        ("a.jpg", tmp_path / "a.jpg"),
        ("z.png", tmp_path / "z.png"),
        ("c.tgz/0/1.png", picture(1)),
        ("c.tgz/2.jpeg", picture(2)),
        ("d.parquet:0", picture(3)),
        ("d.parquet:1", tmp_path / "a.jpg"),
        ("d.parquet:2", "!"),
        ("e.jsonl:0", tmp_path / "a.jpg"),
        ("b/deep/x.PNG", tmp_path / "b" / "deep" / "x.PNG"),
    ]
    (table,) = sources(tmp_path / "d.parquet", "image", keep=["id"])
    assert [item.kept["id"] for item in table] == [7, None, 9]
    assert "b/deep/x.PNG" not in dict(read(tmp_path, "image", without=tmp_path / "b"))
    assert [(one.name, one.part) for one in sources(tmp_path, "image", images=1)][:2] == [(".", 0), (".", 1)]


def test_texts_of_every_kind_and_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,text_pair,id\n"two\nlines",with,1\n007,,2\n', encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "text_pair": "three"}\n')
    tar(tmp_path / "e.tar", {"1.txt": b"\xef\xbb\xbfin a tar\n", "1.png": b""})
    (tmp_path / "f.txt").write_text("first\n\n second \n")
    assert read(tmp_path, "text") == [
        ("a.csv:0", ("two\nlines", "with")), ("a.csv:1", ("007", "")), ("c.jsonl:0", "one"),
        ("c.jsonl:1", ("two", "three")), ("e.tar/1.txt", "in a tar"), ("f.txt:0", "first"), ("f.txt:2", "second"),
    ]  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"review": ["a", "b"], "pear": ["c", None]}), other / "a.parquet")
    names = {"text": "review", "text_pair": "pear"}
    assert read(other, "text", columns=names) == [("a.parquet:0", ("a", "c")), ("a.parquet:1", "!")]
    (other / "a.parquet").unlink()
    (other / "a.csv").write_text(f'text\n"{"hello " * 40_000}"\n')  # longer than the csv module's usual limit
    assert read(other, "text") == [("a.csv:0", "hello " * 40_000)]


def test_what_is_broken_is_an_item_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\nfine,1\nshort\nfine,2\n\n")
    (tmp_path / "b.csv").write_text("other\nhello\n")
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n{"text"\n[1]\n{"text": 3}\n{"text": "fine"}\n')
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing PAR1")
    whole = tar(tmp_path / "e.tar", {"1.txt": b"fine", "2.txt": b"x" * 5000}).read_bytes()
    (tmp_path / "e.tar").write_bytes(whole[:2000])
    (tmp_path / "f.tgz").write_bytes(b"no tar")
    (tmp_path / "g.txt").write_text("one\ntwo\n", encoding="utf-16")
    (tmp_path / "h.csv").write_text("text\ncafé\n", encoding="latin-1")
    found = read(tmp_path, "text")
    fine = ["a.csv:0", "a.csv:2", "c.jsonl:0", "c.jsonl:4", "e.tar/1.txt"]
    assert [name for name, content in found if content == "fine"] == fine
    assert [name for name, content in found if content == "!"] == [
        "a.csv:1", "b.csv", "c.jsonl:1", "c.jsonl:2", "c.jsonl:3", "d.parquet", "e.tar", "f.tgz", "g.txt", "h.csv",
    ]  # fmt: skip


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", ["", ", bare"])
@pytest.mark.parametrize("kind", ["image", "text", "zero-shot"])
def test_outputs_are_those_of_the_prediction(kind: str, bare: str) -> None:
    one = served(kind + bare)
    inputs = inputs_for(one, 9)
    p, table = one.predict(inputs), {field.name: field for field in output_fields(one)}
    with torch.no_grad():
        told = Answering(one)(**inputs)
    for found in (columns(p), {name: tensor.numpy() for name, tensor in told.items()}):
        assert list(found) == list(table)
        for name, array in found.items():
            assert (array.shape, str(array.dtype)) == ((9, *table[name].shape), table[name].dtype)
            np.testing.assert_array_equal(array, expected(p, name))
    names = set(SCORES[kind]) | {"accept", "reason", "familiarity", "p_value"}
    assert not names & table.keys() if bare else names <= table.keys()
    assert [field.name for field in input_fields(one)] == list(inputs)


def expected(p: Prediction, name: str) -> np.ndarray:
    if name == "reason":
        return np.array([REASON_WORDS.index(reason or "") for reason in p.reason])
    if name == "member_logits":
        return p.member_logits.numpy().swapaxes(0, 1)
    if p.unfamiliarity is not None and name in p.unfamiliarity.score_names:
        return p.score(name).numpy()
    methods = {"score": p.score, "p_value": p.p_value}
    return (methods[name]() if name in methods else getattr(p, name)).numpy()
