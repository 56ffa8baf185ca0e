"""Scoring: batches are answered as by `predict`, and each item of an archive is scored once, despite interruptions."""

import json
import os
import pickle
import shutil
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hydra_ensembles import Ensemble
from hydra_ensembles.data.loading import Columns
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, StorageError
from hydra_ensembles.serve import scoring
from hydra_ensembles.serve.archives import Archive
from hydra_ensembles.serve.outputs import columns
from hydra_ensembles.serve.scoring import Scored, Scorer, score_archive
from pictures import encoded
from processes import count_calls, in_a_child
from served_models import inputs_for, served
from serving import POSTSCRIPT, opened, picture, png, turned

pytestmark = pytest.mark.usefixtures("usual_kernels")  # a sample rounds alike in batches of any size


def pictures(count: int) -> list[Image.Image]:
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 256, (9 + row, 12, 3), dtype=np.uint8)) for row in range(count)]


def same(found: dict[str, Any], wanted: dict[str, Any], rows: Any = slice(None)) -> None:
    for name, array in wanted.items():
        step = 1 / 40 if name in ("p_value", "familiarity") else 1e-5  # rounding may move it past a held-out score
        np.testing.assert_allclose(np.asarray(found[name])[rows], array, rtol=1e-5, atol=step, err_msg=name)


def test_images_however_they_are_given(tmp_path: Path) -> None:
    one, images = served("image"), pictures(5)
    images[4].save(tmp_path / "4.png")
    given = [images[0], encoded(images[1]), {"bytes": encoded(images[2]), "path": None}, np.asarray(images[3]),
             str(tmp_path / "4.png")]  # fmt: skip
    for workers in (1, 3):
        scorer = Scorer(one, wide=True, keep=["id"], workers=workers)
        found = scorer({"image": given, "id": [3, 1, 4, 1, 5], "other": [0] * 5, scorer.columns.text_pair: None})
        same(found, columns(one.predict(images)))
    assert found["id"].tolist() == [3, 1, 4, 1, 5]
    assert (found["class_name"].tolist(), set(found["error"])) == (one.predict(images).names(), {""})
    assert "other" not in found
    assert not {"probs", "member_logits"} & Scorer(one)({"image": images}).keys()


def test_texts_pairs_and_prepared_inputs() -> None:
    one = served("text")
    texts, pairs = ["hello", "wörld hello", "hello hello"], ["wörld", "wörld", "hello"]
    same(Scorer(one)({"text": np.array(texts, dtype=object)}), scalars(one.predict(texts)))
    both = Scorer(one, columns=Columns(text="a", text_pair="b"))
    same(both({"a": np.array(texts), "b": pairs}), scalars(one.predict(list(zip(texts, pairs, strict=True)))))
    with pytest.raises(DataError, match="no column 'b'"):
        both({"a": texts, "c": pairs})
    for wrong, words in (
        ({"b": pairs[:1]}, "different lengths"),
        ({"a": "abc", "b": pairs}, "must be a list"),  # as long as the other column
        ({"input_ids": [[1], [1, 2], [1]], "b": pairs}, "pad texts"),
    ):
        with pytest.raises(DataError, match=words):
            both({"a": texts, **wrong})
    assert [bool(error) for error in both({"a": texts, "b": ["wörld", None, "hello"]})["error"]] == [False, True, False]
    found = Scorer(one)({"text": ["hello", "hello", "half \ud800"], "text_pair": ["wörld", None, "hello"]})
    assert [token in said for token, said in zip(("", "'text_pair'", "the text has"), found["error"], strict=True)]
    assert found["error"][0] == ""
    same(found, scalars(one.predict([("hello", "wörld")])), [0])
    inputs = inputs_for(one, 4)
    rows = {name: list(tensor.numpy()) for name, tensor in inputs.items()}
    same(Scorer(one)(rows), scalars(one.predict(inputs)))
    image = inputs_for(served("image"), 4)
    objects = np.empty(4, dtype=object)
    objects[:] = list(image["pixel_values"].numpy())
    same(Scorer(served("image"))({"pixel_values": objects}), scalars(served("image").predict(image)))


def scalars(prediction: Any) -> dict[str, np.ndarray]:
    return {name: array for name, array in columns(prediction).items() if array.ndim == 1}


@pytest.mark.parametrize("good", [[1, 3], []])
def test_what_cannot_be_read_has_a_row_and_a_reason(good: list[int]) -> None:
    bad = [row for row in range(4) if row not in good]
    for column, items, broken in (
        ("image", pictures(4), [b"no image", None]),
        ("text", ["hello", "wörld", "hello wörld", "hello"], ["half \ud800", None]),
    ):
        one = served(column)
        found = Scorer(one)({column: [items[row] if row in good else broken[row % 2] for row in range(4)]})
        assert [bool(error) for error in found["error"]] == [row in bad for row in range(4)]
        if good:
            same(found, scalars(one.predict([items[row] for row in good])), good)
        assert np.isnan(found["confidence"][bad]).all()
        assert (found["label"][bad] == -1).all()
        assert not found["accept"][bad].any()
        assert set(found["class_name"][bad]) == {""}
    pixels = inputs_for(served("image"), 3)["pixel_values"]
    pixels[1] = torch.inf
    found = Scorer(served("image"))({"pixel_values": pixels})
    assert ["not finite" in error for error in found["error"]] == [False, True, False]
    assert found["label"].tolist()[1] == -1


def test_what_was_cut_or_turned_says_so_in_its_row_and_bright_images_that_are_prepared_here_say_nothing() -> None:
    with warnings.catch_warnings(action="error"):
        found = Scorer(served("text"))({"text": ["hello", "hello " * 500, "half \ud800"]})
        seen = Scorer(served("image"))({"image": [encoded(pictures(1)[0]), turned(), opened(turned())]})
    assert ["tokens" in note for note in found["note"]] == [False, True, False]
    assert ["EXIF" in note for note in seen["note"]] == [False, True, True]
    one, half = served("image, bare"), (0.5,) * 3
    metadata = replace(one.metadata, preprocessing=replace(one.metadata.preprocessing, mean=half, std=half))
    grey = Ensemble.from_state(one.config, one.state_dict(), metadata)
    assert Scorer(grey)({"image": [Image.fromarray(np.uint8([[[140] * 3, [250] * 3]]))]})["note"].tolist() == [""]


def test_no_image_ends_the_work_and_whatever_a_decoder_raises_is_the_error_of_its_row(monkeypatch) -> None:
    decode = scoring.decode_image

    def raising(content: bytes, *more: Any) -> Any:
        if content == b"codec":
            raise RuntimeError("broken\ncodec")
        return decode(content, *more)

    monkeypatch.setattr(scoring, "decode_image", raising)
    broken = {"900000": png(900_000, 1, 0, bytes(900_001)), "unknown": POSTSCRIPT, "null": "nul\0.png", "plain": "."}
    found = Scorer(served("image"))({"image": [pictures(1)[0], *broken.values(), b"codec"]})
    said = zip(("", *broken, "broken codec"), found["error"], strict=True)
    assert [token in error for token, error in said] == [True] * 6
    same({name: found[name][:1] for name in found}, scalars(served("image").predict(pictures(1))))


@pytest.mark.parametrize("masked", [False, True])
def test_texts_do_not_depend_on_their_neighbours(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask a model reads padding as text; with one, short texts still need not be run as long ones."""
    monkeypatch.setattr(scoring, "SHORTEST", 2)
    tokenizer = replace(served("text").metadata.preprocessing, attention_mask=masked)
    one = served("text").with_metadata(preprocessing=tokenizer)
    texts: list[Any] = ["hello", "hello wörld hello wörld", "half \ud800", "wörld", None, "hello"]
    good = [0, 1, 3, 5]
    alone = [scalars(one.predict([texts[row]])) for row in good]
    wanted = {name: np.concatenate([row[name] for row in alone]) for name in alone[0]}
    found = Scorer(one)({"text": texts})
    same(found, wanted, good)
    assert [bool(error) for error in found["error"]] == [row not in good for row in range(6)]
    parts = Scorer(one).prepare({"text": [texts[row] for row in good]}).parts
    assert {inputs["input_ids"].shape[1]: rows for inputs, rows in parts} == {1: [0, 2, 3], 4: [1]}
    padded = replace(tokenizer, pad_to_max=True)
    one = one.with_metadata(preprocessing=padded)
    assert len(Scorer(one).prepare({"text": [texts[row] for row in good]}).parts) == 1


def test_columns_to_keep_with_the_name_of_an_answer(tmp_path: Path) -> None:
    batch = {"text": ["hello"], "label": [7], "error": ["mine"], "id": [[1, 2]]}  # a list has no plain NumPy dtype
    found = Scorer(served("text"), keep=["label", "error", "id", "text"])(batch)
    kept = [found[name].tolist() for name in ("kept_label", "kept_error", "error", "id", "text")]
    assert kept == [[7], ["mine"], [""], [[1, 2]], ["hello"]]
    same(found, scalars(served("text").predict(["hello"])))
    (tmp_path / "in.csv").write_text("input,text\nI,hello\n")
    score(tmp_path / "in.csv", tmp_path / "out", scorer=Scorer(served("text"), keep=["input"]))
    (row,), _ = written(tmp_path / "out")
    assert (row["input"], row["kept_input"]) == ("in.csv:0", "I")
    with pytest.raises(ConfigError, match="kept_label"):
        Scorer(served("text"), keep=["label", "kept_label"])({**batch, "kept_label": [0]})


def test_it_is_pickled_without_the_model_loads_it_again_and_takes_no_other_for_it(tmp_path: Path) -> None:
    one, batch = served("text"), {"text": ["hello"]}
    wanted = scalars(one.predict(["hello"]))
    one.save_pretrained(tmp_path / "model")
    scorer, second = (Scorer(tmp_path / "model", device="cpu") for _ in range(2))
    before = pickle.dumps(scorer)
    assert before == pickle.dumps(second)
    same(scorer(batch), wanted)
    assert pickle.dumps(scorer) == before
    same(pickle.loads(before)(batch), wanted)
    served("text, bare").save_pretrained(tmp_path / "model")
    assert pickle.dumps(Scorer(tmp_path / "model", device="cpu")) != before
    with pytest.raises(CheckpointError, match="has changed"):
        pickle.loads(before)(batch)
    assert Scorer(one, dtype="bfloat16")(batch)["confidence"].dtype == np.float32
    assert one.dtype == torch.float32  # the given model is not changed


def test_datasets_map_takes_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    one, images = served("image"), pictures(5)
    made = datasets.Dataset.from_dict({"image": images, "id": range(5)}).cast_column("image", datasets.Image())
    made.save_to_disk(tmp_path / "data")
    data = datasets.load_from_disk(tmp_path / "data")  # with a cache on disk

    def scored() -> Any:
        scorer = Scorer(tmp_path / "model", wide=True, keep=["id"])
        return data.map(scorer, batched=True, batch_size=2, remove_columns=data.column_names)

    for model in (one, served("image, bare")):  # one after the other in the same folder
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        model.save_pretrained(tmp_path / "model")
        found, wanted = scored(), columns(model.predict(images))
        same(found.with_format("numpy", columns=list(wanted))[:], wanted)
        assert found["id"][:] == list(range(5))


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


def score(source: Path, output: Path, **settings: Any) -> Scored:
    scorer = settings.pop("scorer", None) or Scorer(served("text"), keep=["id"], wide=True)
    return score_archive(scorer, source, output, **{"batch_size": 3, "shard_rows": 4, "progress": False, **settings})


def written(output: Path) -> tuple[Any, list[Any]]:
    """All rows in order, and all unreadable items."""
    rows = [row for file in sorted(output.glob("rows/*")) for row in pq.read_table(file).to_pylist()]
    lines = [line for file in sorted(output.glob("unreadable/*")) for line in file.read_text().splitlines()]
    return rows, [json.loads(line) for line in lines]


def same_rows(rows: list[Any], wanted: dict[str, Any]) -> None:
    same({name: [row[name] for row in rows] for name in wanted}, wanted)


def test_an_archive_becomes_shards(source: Path, output: Path) -> None:
    found = score(source, output)
    assert found == Scored(rows=15, unreadable=5, ignored=0, shards=5)
    rows, unreadable = written(output)
    assert [row["input"] for row in rows[:8]] == [*(f"a.csv:{row}" for row in range(7)), "b.jsonl:0"]
    assert [line["input"] for line in unreadable] == ["a.csv:7", "b.jsonl:1", "b.jsonl:4", "b.jsonl:5", "b.jsonl:6"]
    assert all(line["reason"] for line in unreadable)
    assert [row["id"] for row in rows[6:8]] == ["6", '{"x": 1}']
    texts = ["hello wörld"] * 7 + ["hello", "wörld", "hello hello", *["wörld", "hello hello"] * 2, "hello"]
    p = served("text").predict(texts)
    same_rows(rows, columns(p))
    assert [row["class_name"] for row in rows] == p.names()
    assert len({pq.read_schema(file) for file in output.glob("rows/*")}) == 1
    assert json.loads((output / "about.json").read_text())["reasons"] == ["", "unsure", "unfamiliar"]
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    assert score(source, output) == found
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == before
    (source / "notes.md").write_text("of another kind")
    for _ in range(2):  # the output may be inside the archive
        assert score(source, source / "out") == replace(found, ignored=1)


def test_pairs_stay_pairs_however_batches_are_cut(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,text_pair\nhello,\nhello,wörld\nwörld,\n")
    p = served("text").predict([("hello", ""), ("hello", "wörld"), ("wörld", "")])
    for size in (1, 3):
        score(tmp_path / "in.csv", tmp_path / str(size), scorer=Scorer(served("text")), batch_size=size)
        same_rows(written(tmp_path / str(size))[0], scalars(p))


# where the process is killed: before the n-th call (from 1) of a function
POINTS: list[tuple[Any, str, int]] = [
    *((os, "replace", count) for count in (1, 3, 5)),  # writes of identity, shards, unreadable items
    *((Scorer, "answer", 6), (scoring, "_parquet", 5), (scoring, "_summary", 1)),
]


def test_a_kill_loses_no_row_and_doubles_none(source: Path, tmp_path: Path) -> None:
    scorer = Scorer(served("text"), keep=["id"], wide=True)
    wanted = score(source, tmp_path / "undisturbed", scorer=scorer)
    rows, unreadable = written(tmp_path / "undisturbed")
    for owner, name, count in POINTS:
        output = tmp_path / f"{name}-{count}"

        def work(owner: Any = owner, name: str = name, count: int = count, output: Path = output) -> None:
            calls = iter(range(1, count + 1))
            count_calls(pytest.MonkeyPatch(), owner, name, lambda: next(calls) == count and os._exit(9))
            score(source, output, scorer=scorer)

        assert in_a_child(work) == 9, (name, count)
        assert len(written(output)[0]) < len(rows) or name in ("replace", "_summary")
        assert score(source, output, scorer=scorer) == wanted, (name, count)
        assert written(output) == (rows, unreadable), (name, count)
        assert not list(output.rglob(".*")), (name, count)


def test_another_run_is_refused(source: Path, output: Path, tmp_path: Path) -> None:
    score(source, output)
    other = served("text").with_metadata(calibration=None)
    for settings in ({"shard_rows": 5}, {"scorer": Scorer(other, keep=["id"])}, {"scorer": Scorer(served("text"))}):
        with pytest.raises(CheckpointError, match="another run"):
            score(source, output, **settings)
    about = json.loads((output / "about.json").read_text())
    (output / "about.json").write_text(json.dumps({**about, "made_by": "hydra_ensembles 0.0.9"}))
    score(source, output)  # finished, so nothing is mixed
    (output / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="another run"):
        score(source, output)
    (output / "about.json").write_text(json.dumps(about))
    (output / "rows" / "part-00001.parquet").write_bytes(b"changed")
    with pytest.raises(CheckpointError, match="part-00001"):
        score(source, output)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="letter"):
        score(source, tmp_path / "mine")
    (source / "c.csv").write_text("text,id\nhello,other\n")
    with pytest.raises(CheckpointError, match="archive"):
        score(source, output)


def test_a_disk_that_fails_ends_the_work_and_nothing_moves(source, output, tmp_path: Path, monkeypatch) -> None:
    """A missing item would shift all later ones into other shards than a resumed run expects."""
    wanted, item = score(source, tmp_path / "undisturbed"), Archive._item
    failures = iter([False] * 5 + [True] + [False] * 99)

    def failing(self: Archive, *given: Any) -> Any:
        if next(failures):
            raise OSError(5, "Input/output error")
        return item(self, *given)

    monkeypatch.setattr(Archive, "_item", failing)
    with pytest.raises(StorageError, match=r"a\.csv"):
        score(source, output)
    assert len(list(output.glob("rows/*"))) == 1
    assert score(source, output) == wanted
    assert written(output) == written(tmp_path / "undisturbed")


def test_an_image_that_the_disk_does_not_give_is_not_called_broken(output, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.png").write_bytes(picture(number))
    scorer, failures = Scorer(served("image")), iter([False, True])

    def failing(path: Path) -> Path:
        if path.suffix == ".png" and next(failures, False):
            raise OSError(5, "Input/output error")
        return path

    monkeypatch.setattr("hydra_ensembles.files.plain_file", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        score(tmp_path / "in", output, scorer=scorer)
    assert score(tmp_path / "in", output, scorer=scorer).rows == 3


def test_an_archive_that_reads_otherwise_than_before_is_refused(source: Path, output: Path, monkeypatch) -> None:
    """As when part of a file was unreadable before, or was skipped by an earlier version."""
    every = Archive.__iter__
    score(source, output)
    (output / "rows" / "part-00004.parquet").unlink()
    monkeypatch.setattr(Archive, "__iter__", lambda self: islice(every(self), 1, None))
    with pytest.raises(CheckpointError, match="elsewhere"):
        score(source, output)


def test_what_another_version_began_is_not_gone_on_with(source: Path, output: Path) -> None:
    score(source, output)
    about = output / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "made_by": "hydra_ensembles 0.0.9"}))
    score(source, output)  # finished, so nothing is mixed
    (output / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="another run"):
        score(source, output)


def test_a_deleted_shard_is_made_anew_in_its_place_and_no_other(source: Path, output: Path, monkeypatch) -> None:
    wanted, before, calls = score(source, output), written(output), []
    (output / "rows" / "part-00001.parquet").unlink()  # as the error about a changed shard advises
    count_calls(monkeypatch, Ensemble, "predict", lambda: calls.append(None))
    assert score(source, output) == wanted
    assert written(output) == before
    assert len(calls) == 1  # three rows; the fourth item is unreadable
