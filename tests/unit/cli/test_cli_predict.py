"""`hydra-ensembles predict`: files, folders and texts in; tables, JSON and CSV out."""

import csv
import json

import pytest

import hydra_ensembles as he
from cli_cases import COLOURS, fail, run, succeed, vit_flags


def test_images_as_a_table(run_folder, world):
    out = succeed("predict", run_folder, world / "test" / "red" / "0.png", world / "dots", env={"COLUMNS": "200"})
    assert out.count(".png") == 13
    for heading in ("input", "label", "confidence", "epistemic", "entropy", "disagree", "verdict"):
        assert heading in out


def test_json_says_what_the_library_says(run_folder, world):
    from PIL import Image

    file = world / "test" / "red" / "0.png"
    (row,) = json.loads(succeed("predict", run_folder, file, "--format", "json"))
    hydra = he.Ensemble.from_pretrained(run_folder / "ensemble")
    expected = hydra.predict(Image.open(file))
    assert row["input"] == str(file)
    assert row["label"] == expected.names()[0]
    for key in ("confidence", "epistemic", "entropy", "disagreement"):
        assert row[key] == pytest.approx(getattr(expected, key).item(), abs=1e-6)
    assert expected.accept is not None
    assert row["verdict"] == ("accept" if expected.accept.item() else "abstain")


def test_lines_of_json_and_csv_to_a_file(run_folder, world, tmp_path):
    lines = succeed("predict", run_folder, world / "dots", "-f", "jsonl", "--batch-size", 5).splitlines()
    assert len(lines) == 12
    assert json.loads(lines[3])["label"] in COLOURS
    assert succeed("predict", run_folder, world / "dots", "-f", "csv", "-o", tmp_path / "out" / "p.csv") == ""
    with (tmp_path / "out" / "p.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == [json.loads(line)["label"] for line in lines]
    succeed("predict", run_folder, world / "dots", "-o", tmp_path / "p.txt")
    assert "confidence" in (tmp_path / "p.txt").read_text()


def test_texts_from_options_arguments_files_tables_and_standard_input(text_folder, world, tmp_path):
    out = succeed("predict", text_folder, "--text", "good", "--text", "a dull film", "-f", "jsonl")
    assert [json.loads(line)["input"] for line in out.splitlines()] == ["good", "a dull film"]
    out = succeed("predict", text_folder, "a dull film", world / "news.txt", world / "test.jsonl", "-f", "json")
    rows = json.loads(out)
    assert [row["input"] for row in rows[:3]] == ["a dull film", "long long film", "the dull plot"]
    assert rows[3]["input"] == f"{world / 'test.jsonl'}:0"
    assert len(rows) == 23
    assert {row["label"] for row in rows} <= {"negative", "positive"}
    out = succeed("predict", text_folder, "-", "-f", "csv", input="good film\n\nbad film\n")
    assert len(out.splitlines()) == 3
    (tmp_path / "one.txt").write_text("good\u2028film\n", encoding="utf-8")  # a line break only to some
    assert len(json.loads(succeed("predict", text_folder, tmp_path / "one.txt", "-f", "json"))) == 1
    (tmp_path / "other.csv").write_text("sentence\na good film\n")
    succeed("predict", text_folder, tmp_path / "other.csv", "--column", "text=sentence")


def test_no_threshold_no_verdict(run_folder, world):
    base, file = run_folder / "base", world / "dots" / "0.png"
    result = run("predict", base, file, "-f", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["verdict"] is None
    assert "no verdict: this model has no calibrated threshold" in result.stderr
    assert "verdict" not in run("predict", base, file).stdout
    for threshold, verdict in ((0.0, "abstain"), (1.0, "accept")):
        (row,) = json.loads(succeed("predict", base, file, "-f", "json", "--threshold", threshold))
        assert row["verdict"] == verdict
    (row,) = json.loads(succeed("predict", base, file, "-f", "json", "--threshold", 5, "--score", "entropy"))
    assert row["score"] == row["entropy"]
    assert "needs a threshold" in fail("predict", base, file, "--score", "entropy")


def test_a_model_without_class_names(world):
    out = succeed("predict", *vit_flags(world / "mine.safetensors"), world / "dots" / "0.png", "-f", "json")
    assert json.loads(out)[0]["label"] in ("0", "1", "2")


def test_what_cannot_be_read(run_folder, text_folder, world, tmp_path):
    bad = tmp_path / "images" / "bad.png"
    bad.parent.mkdir()
    bad.write_bytes(b"not an image")
    assert "bad.png cannot be decoded as an image" in fail("predict", run_folder, bad)
    (bad.parent / "good.png").write_bytes((world / "dots" / "0.png").read_bytes())
    result = run("predict", run_folder, bad.parent, "--skip-unreadable", "-f", "jsonl")
    assert result.exit_code == 0
    assert [json.loads(line)["input"] for line in result.stdout.splitlines()] == [str(bad.parent / "good.png")]
    assert "warning: skipped" in result.stderr
    assert "did you mean good.png" in fail("predict", run_folder, bad.parent / "god.png")


@pytest.mark.parametrize(
    ("kind", "inputs", "says"),
    [
        ("image", ["{empty}"], "has no images in it"),
        ("image", ["--text", "good"], "the model reads images"),
        ("image", [], "got nothing to predict"),
        ("image", ["{world}/val.csv"], "holds texts, but the model reads images"),
        ("text", ["good"], "write --text 'good'"),
        ("text", ["{world}/dots"], "is a folder, but the model reads text"),
        ("text", ["{world}/dots/0.png"], "is not text in UTF-8"),
        ("text", ["-"], "standard input has no text"),
        ("text", ["{world}/val.csv", "--column", "words=text"], "words"),
    ],
)
def test_what_is_no_input_for_the_model(run_folder, text_folder, world, tmp_path, kind, inputs, says):
    given = [one.format(world=world, empty=tmp_path) for one in inputs]
    assert says in fail("predict", run_folder if kind == "image" else text_folder, *given, input="\n")
