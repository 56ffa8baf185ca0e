"""`hydra-ensembles predict`, `info` and `bench`."""

import csv
import json
import os

import pytest
from PIL import Image
from typer.testing import CliRunner

import hydra_ensembles as he
from cli_cases import APP, COLOURS, fail, run, succeed, vit_flags
from hydra_ensembles.cli.predict_info import KEPT, PRUNED
from hydra_ensembles.report.compare import load_costs


def predicted(*arguments, **settings):
    lines = succeed("predict", *arguments, "-f", "jsonl", **settings).strip().split("\n")
    return [json.loads(line) for line in lines]


def test_predict_says_what_the_library_says(run_folder, world):
    file = world / "test" / "red" / "0.png"
    (row,) = predicted(run_folder, file)
    expected = he.Ensemble.from_pretrained(run_folder / "ensemble").predict(Image.open(file))
    assert (row["input"], row["label"]) == (str(file), expected.names()[0])
    for key in ("confidence", "epistemic", "entropy", "disagreement"):
        assert row[key] == pytest.approx(getattr(expected, key).item(), abs=1e-6)
    assert row["verdict"] == ("accept" if expected.accept.item() else "abstain")
    assert predicted(run_folder, "-", input=file.read_bytes()) == [{**row, "input": "-"}]
    result = run("predict", run_folder, world / "news.txt", file, "-f", "jsonl")  # the image is still answered
    assert (json.loads(result.stdout), result.exit_code) == (row, 2)
    assert "1 of 2 inputs have no answer, the others do; the first: " in result.stderr


def test_predictions_as_a_table_as_csv_without_formulas_and_in_files(run_folder, text_folder, world, tmp_path):
    lines = succeed("predict", text_folder, "-t", "=cmd|' /C calc'!A0", "-t", "@sum", "-t", "a film", "-f", "csv")
    rows = list(csv.reader(lines.splitlines()))[1:]
    assert [row[0] for row in rows] == ["'=cmd|' /C calc'!A0", "'@sum", "a film"]
    assert all(float(number) is not None for row in rows for number in row[2:7])  # numbers stay numbers
    out = succeed("predict", run_folder, world / "test" / "red" / "0.png", world / "dots", env={"COLUMNS": "200"})
    assert out.count(".png") == 7
    shown = ("input", "label", "confidence", "epistemic", "familiarity", "verdict")
    assert out.split()[: len(shown)] == list(shown)
    rows = predicted(run_folder, world / "dots", "--batch-size", 5)
    assert succeed("predict", run_folder, world / "dots", "-f", "csv", "-o", tmp_path / "out" / "p.csv") == ""
    with (tmp_path / "out" / "p.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == [row["label"] for row in rows]


def test_texts_from_options_files_tables_and_standard_input(text_folder, world, tmp_path):
    (tmp_path / "other.csv").write_text("sentence\na good film\n")
    (tmp_path / "two.txt").write_bytes("good\u2028film\rbad film\n".encode())  # U+2028 ends a line only for some
    rows = predicted(text_folder, world / "news.txt", world / "test.jsonl", "--text", "good", "--text", "a dull film")
    assert [row["input"] for row in rows[:2]] == ["long long film", "the dull plot"]
    assert rows[2]["input"] == f"{world / 'test.jsonl'}:0"
    assert [row["input"] for row in rows[22:]] == ["good", "a dull film"]
    assert {row["label"] for row in rows} <= {"negative", "positive"}
    result = run("predict", text_folder, "-", "-f", "jsonl", input="good film\n\n \nbad film\n\n")
    assert len(result.stdout.splitlines()) == 2
    assert "2 blank lines of standard input were skipped" in result.stderr
    assert len(predicted(text_folder, tmp_path / "two.txt")) == 2
    assert len(predicted(text_folder, tmp_path / "other.csv", "--column", "text=sentence")) == 1
    words = ["predict", str(text_folder), "-", "-f", "jsonl"]
    result = CliRunner(charset="latin-1").invoke(APP, words, "café ■".encode())  # of the locale; texts are UTF-8
    assert json.loads(result.stdout_bytes)["input"] == "café ■"


def test_texts_of_similar_length_form_a_batch_and_answers_keep_their_order(text_folder, monkeypatch):
    texts, batches, predict = ["good " * 9, "bad", "good " * 8, "dull"], [], he.Ensemble.predict
    monkeypatch.setattr(he.Ensemble, "predict", lambda self, given: batches.append(given) or predict(self, given))
    flags = [flag for text in texts for flag in ("--text", text)]
    assert [row["input"] for row in predicted(text_folder, *flags, "--batch-size", 2)] == texts
    assert batches == [["bad", "dull"], [texts[2], texts[0]]]


def test_rows_without_text_are_reported_and_the_others_answered(text_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a film"}\n{"text": null}\n{"text": "dull"}\n')
    result = run("predict", text_folder, tmp_path / "rows.jsonl", "-f", "jsonl")
    rows = [json.loads(line)["input"].rpartition(":")[2] for line in result.stdout.splitlines()]
    assert (result.exit_code, rows) == (2, ["0", "2"])
    assert "1 of 3 inputs have no answer, the others do; the first: row 1 of" in result.stderr


def test_neither_inputs_nor_files_of_another_kind_are_replaced(text_folder, tmp_path):
    for name in ("in.csv", "out.csv", "other.json"):
        (tmp_path / name).write_text("text\na good film\n")
    line = ["predict", text_folder, tmp_path / "in.csv", "-f", "csv", "-o"]
    assert "is also an input" in fail(*line, tmp_path / "in.csv")
    assert "is not what" in fail("bench", text_folder, "-o", tmp_path / "other.json")
    (tmp_path / "run.json").write_text('{"format": "hydra_ensembles build 1"}')
    (tmp_path / "run.yaml").write_text("members: 3")
    Image.new("RGB", (8, 8)).save(tmp_path / "image", "png")
    for name in ("run.json", "run.yaml", "image"):
        assert "is not what" in fail(*line, tmp_path / name)
    for name in ("out.csv", "other.json", "answers.json", "answers.ndjson", "2026-01-31", "table.rst"):
        for _ in range(2):
            succeed(*line, tmp_path / name)
        assert "confidence" in (tmp_path / name).read_text()


def test_no_threshold_no_verdict(run_folder, world):
    base, file = run_folder / "base", world / "dots" / "0.png"
    result = run("predict", base, file, "-f", "jsonl")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"] is None
    assert "no verdict: this model has no calibrated threshold; calibrate stores one" in result.stderr
    for threshold, verdict in ((0.0, "abstain"), (1.0, "accept")):
        assert predicted(base, file, "--threshold", threshold)[0]["verdict"] == verdict
    assert predicted(*vit_flags(world / "mine.safetensors"), file)[0]["label"] in ("0", "1", "2")  # without names


@pytest.mark.parametrize(
    ("kind", "inputs", "says"),
    [
        ("image", ["--text", "good"], "the model reads images"),
        ("image", ["{world}/val.csv"], "holds texts, but the model reads images"),
        ("image", ["{world}/news.txt"], "news.txt cannot be decoded as an image (30 bytes): unknown format"),
        ("text", ["good"], "write --text 'good'"),
        ("text", ["{empty}/image"], "is not UTF-8 text"),
        ("text", ["{empty}/lines.json"], ".txt for one text per line"),
        ("image", ["{empty}/pipe.png"], "not a plain file"),
    ],
)
def test_what_is_no_input_for_the_model(run_folder, text_folder, world, tmp_path, kind, inputs, says):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would block forever
    (tmp_path / "image").write_bytes((world / "dots" / "0.png").read_bytes())
    (tmp_path / "lines.json").write_bytes((world / "test.jsonl").read_bytes())
    given = [one.format(world=world, empty=tmp_path) for one in inputs]
    assert says in fail("predict", run_folder if kind == "image" else text_folder, *given, input="\n")


def test_info_of_a_run(run_folder, text_folder):
    out = succeed("info", run_folder)
    shown = ("members        3, shared by all members", "3: blue, green, red", "score msp", "heads kept: 24 of 36")
    assert all(words in out for words in shown)
    rows = [line.split()[1:] for line in out.splitlines() if KEPT in line and "kept" not in line]
    assert len(rows) == 3
    assert [sum(row[member].count(PRUNED) for row in rows) for member in range(3)] == [4, 4, 4]
    found = json.loads(succeed("info", run_folder, "--json"))
    hydra = he.Ensemble.from_pretrained(run_folder / "ensemble")
    assert found["parameters"] == hydra.describe().parameters
    assert found["config"]["heads"] == [[list(layer) for layer in member] for member in hydra.heads]
    assert found["labels"] == list(COLOURS)
    assert found["calibration"]["threshold"] is not None
    assert json.loads(succeed("info", text_folder, "--json"))["preprocessing"]["tokenizer"] is True


def test_bench_beside_baselines(run_folder, tmp_path):
    out = succeed("bench", run_folder, "--batch", "1,2", "--baseline", "single", "--baseline", "deep",
                  "--optimize", "--repeats", 1, "-o", tmp_path / "costs.json")  # fmt: skip
    assert "inputs/s" in out
    costs = load_costs(tmp_path / "costs.json")
    assert [cost.batch for cost in costs] == [1] * 4 + [2] * 4
    single, deep, hydra, optimized = costs[:4]
    assert (single.name, deep.name, hydra.name, optimized.name) == ("single", "deep", "run", "run, optimized")
    base = he.Ensemble.from_pretrained(run_folder / "base").describe().parameters
    assert (single.parameters, deep.parameters) == (base, 3 * base)
    assert base < (hydra.parameters or 0) < 3 * base
    assert single.latency_ratio == 1.0
    assert "whole numbers" in fail("bench", run_folder, "--batch", "many")
