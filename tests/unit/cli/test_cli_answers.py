"""Commands that answer, and measure answers."""

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from PIL import Image

import hydra_ensembles as he
from cli_cases import fail, run, succeed


def test_predict_says_what_the_library_says(safe: Path, world: Path) -> None:
    files = sorted((world / "test" / "red").glob("*.png"))
    rows = [json.loads(line) for line in succeed("predict", safe, *files, "--format", "jsonl").splitlines()]
    expected = he.load(safe).predict([Image.open(file) for file in files])
    assert [row["label"] for row in rows] == list(expected.names())
    assert [row["accept"] for row in rows] == expected.accept.tolist()
    assert [row["reason"] for row in rows] == list(expected.reason)
    assert [row["confidence"] for row in rows] == pytest.approx(expected.confidence.tolist(), abs=1e-5)
    whole = succeed("predict", safe, world / "test", "--format", "csv", "-o", world / "answers.csv")
    assert whole == ""
    assert len((world / "answers.csv").read_text().splitlines()) == 13
    assert "verdict" in succeed("predict", safe, world / "dots")


def test_texts_from_options_files_tables_and_standard_input(safe_text: Path, world: Path) -> None:
    def answered(*arguments: object, **settings: object) -> list[str]:
        out = succeed("predict", safe_text, *arguments, "--format", "csv", **settings)
        return [row["input"] for row in csv.DictReader(io.StringIO(out))]

    given = ["-3 degrees", "=good film"]  # text is not changed, as a spreadsheet's formula would be
    assert answered(*(part for text in given for part in ("--text", text))) == given
    assert answered(world / "news.txt") == ["long long film", "the dull plot"]
    assert answered("-", input="good film\nbad plot\n") == ["good film", "bad plot"]
    assert len(answered(world / "test.jsonl")) == 20


def test_what_cannot_be_read_is_named_and_the_others_are_answered(safe: Path, world: Path, tmp_path: Path) -> None:
    for name, size in (("wide.png", (800, 4)), ("good.png", (20, 20))):
        Image.new("RGB", size).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    Image.new("1", (30000, 30000)).save(tmp_path / "bomb.png")
    result = run("predict", safe, tmp_path, "--format", "jsonl")
    assert result.exit_code == 2
    assert [json.loads(line)["input"] for line in result.stdout.splitlines()] == ["good.png"]
    assert "3 of 4 inputs have no answer" in result.stderr


def test_no_threshold_no_verdict_and_inputs_that_are_none(world: Path, safe: Path, safe_text: Path) -> None:
    result = run("predict", world / "base", world / "dots", "--format", "jsonl")
    assert json.loads(result.stdout.splitlines()[0])["accept"] is None
    assert "calibrate" in result.stderr
    for model, arguments in ((safe, ()), (safe, ("--text", "x")), (safe, (world / "none.png",)), (safe_text, ("-",))):
        fail("predict", model, *arguments, input="")


def test_score_has_a_row_for_every_item_and_resumes(safe: Path, world: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    Image.new("RGB", (20, 20)).save(tmp_path / "in" / "good.png")
    found = succeed("score", safe, tmp_path / "in", "-o", output, "-q")
    assert "2 rows" in found
    rows = [row for file in output.rglob("rows/*.parquet") for row in parquet.read_table(file).to_pylist()]
    assert {row["input"]: bool(row["error"]) for row in rows} == {"broken.png": True, "good.png": False}
    assert succeed("score", safe, tmp_path / "in", "-o", output, "-q") == found


def test_export_writes_what_the_library_writes(safe: Path, tmp_path: Path) -> None:
    succeed("export", safe, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()
    fail("export", safe, tmp_path / "model.txt")


def test_serve_takes_settings_from_options_and_a_file(safe: Path, tmp_path: Path, monkeypatch) -> None:
    served = []
    monkeypatch.setattr("hydra_ensembles.serve.app.serve", lambda model, settings: served.append(settings))
    (tmp_path / "serve.yaml").write_text("max_body: 3\nport: 1\n")
    succeed("serve", safe, "--port", 0, "--name", "mine", "--config", tmp_path / "serve.yaml")
    assert (served[0].port, served[0].name, served[0].max_body) == (0, "mine", 3.0)
    assert "max_batch" in fail("serve", safe, "--max-batch", 0)


# --- evaluate and report ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluations(safe: Path, run_folder: Path, world: Path) -> Path:
    """Evaluations of two models, and costs."""
    folder = world / "evaluations"
    sets = ["--id", world / "test", "--ood", f"near:dots={world / 'dots'}", "--ood", f"far:lines={world / 'stripes'}"]
    for model, more in ((safe, []), (run_folder, ["--name", "Hydra"])):
        succeed("evaluate", model, *sets, *more, "-q", "-o", folder)
    succeed("bench", run_folder, "--batch", "1", "--repeats", 1, "-o", folder / "costs.json")
    return folder


def test_an_evaluation_is_what_the_library_measures(evaluations: Path, safe: Path, world: Path) -> None:
    saved = he.Evaluation.load(evaluations / "safe.json")
    assert set(saved.foreign) == {"ood.dots", "ood.lines"}
    assert saved.numbers()["near.auroc"] == saved.numbers()["ood.dots.auroc"]
    assert not list(evaluations.glob("*.run"))
    sets = ["--id", world / "test", "-q", "-o", evaluations]
    succeed("evaluate", safe, *sets, "--name", "again", "--shift", f"odd={world / 'val'}")
    assert "odd" in (evaluations / "again.json").read_text()
    (evaluations / "again.json").unlink()


def test_a_report_in_each_format(evaluations: Path, tmp_path: Path) -> None:
    assert "Hydra" in succeed("report", evaluations)
    for suffix in ("html", "csv", "md"):
        file = tmp_path / f"report.{suffix}"
        succeed("report", evaluations, "-o", file, "--baseline", "safe")
        assert "Hydra" in file.read_text()
    assert "evaluate" in fail("report", tmp_path)


def test_score_and_monitor_say_whether_inputs_have_changed(safe: Path, world: Path, tmp_path: Path) -> None:
    succeed("score", safe, world / "test", "-o", tmp_path / "scores", "--quiet")
    seen = json.loads((tmp_path / "scores" / "monitor.json").read_text())
    shards = sorted((tmp_path / "scores" / "rows").iterdir())
    assert (seen["rows"], seen["alarm"]) == (12, False)
    assert [line["shard"] for line in seen["shards"]] == [shard.name for shard in shards]
    call = ("monitor", safe, *shards, "--state", tmp_path / "watch.json", "--json")
    assert json.loads(succeed(*call))["log_wealth"] == seen["log_wealth"]
    assert json.loads(succeed(*call))["rows"] == 24  # it goes on from its state
    assert "12 rows" in succeed("monitor", safe, *shards)
    changed = parquet.read_table(shards[0])
    for name in ("score", "mahalanobis"):
        place, most = changed.column_names.index(name), max(changed[name].to_pylist())
        changed = changed.set_column(place, name, [[10.0 * most] * len(changed)])
    parquet.write_table(changed, tmp_path / "changed.parquet")
    result = run("monitor", safe, *[tmp_path / "changed.parquet"] * 20)
    assert result.exit_code == 3
    assert "alarm: " in result.stdout
    parquet.write_table(changed.replace_schema_metadata(None), tmp_path / "other.parquet")
    assert "calibration" in fail("monitor", safe, tmp_path / "other.parquet")
