"""Every benchmark runs on a tiny shape and writes its table."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import against  # noqa: E402
import circuit  # noqa: E402
import convert  # noqa: E402
import decoders  # noqa: E402
import inference  # noqa: E402
import score  # noqa: E402
import serve  # noqa: E402

from studies.tables import read_csv  # noqa: E402

del sys.path[:2]

from architectures_transformers import TEXT, save_tokenizer, transformers_model  # noqa: E402

TINY = ["--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--batches", "2", "--seconds", "0.01"]


def ran(benchmark: Any, folder: Path, *options: str) -> list[dict[str, str]]:
    benchmark.main([*options, "--output", str(folder / "found.csv")])
    return read_csv(folder / "found.csv")


@pytest.mark.slow
def test_every_contender_answers_as_it_should(tmp_path: Path) -> None:
    rows = {row["contender"]: row for row in ran(inference, tmp_path, *TINY, "--methods")}
    assert set(rows) == set(inference.NAMES)
    assert all(float(row["error"]) < 1e-5 for row in rows.values() if row["error"])
    assert float(rows["deep-in-turn"]["limit"]) == 3


def test_rows_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*TINY, "--contenders", "single", "hydra-k8"]
    found = ran(inference, tmp_path, *options)
    assert [row["contender"] for row in found] == ["hydra-k8", "single"]
    monkeypatch.setattr(inference, "row_of", lambda *_: pytest.fail("measured again"))
    assert ran(inference, tmp_path, *options) == found


def test_half_of_berts_heads_and_a_whole_test(tmp_path: Path) -> None:
    options = [*TINY, "--shape", "bert-tiny-6", "--whole", "5", "--contenders", "single", "pruned", "hydra-k0"]
    rows = {row["contender"]: row for row in ran(inference, tmp_path, *options)}
    assert float(rows["hydra-k0"]["error"]) < 1e-5
    assert all(float(row["whole_test_s"]) > 0 for row in rows.values())
    assert float(rows["pruned"]["limit"]) < 1 < float(rows["hydra-k0"]["limit"])


def test_every_contender_is_counted(tmp_path: Path) -> None:
    found = ran(inference, tmp_path, "--shape", "tiny", "--device", "cpu", "--counts", "--methods")
    rows = {row["contender"]: row for row in found}
    assert set(rows) == set(inference.NAMES)
    assert [float(rows[name]["limit"]) for name in ("single", "deep-in-turn")] == [1.0, 3.0]


def test_decoders_answer_as_they_should_before_they_are_timed(tmp_path: Path) -> None:
    same = {"batch": 2, "tokens": 16, "prefix": 7, "device": "cpu", "dtype": "float32", "seed": 0}
    for name in decoders.CONTENDERS:
        assert decoders.prepare("tiny", name, profile=str(tmp_path), **same)()["ms"] > 0
    assert len(list(tmp_path.iterdir())) == len(decoders.CONTENDERS)


def test_conversions_are_measured_live_and_from_folders(tmp_path: Path) -> None:
    transformers_model("BertModel", TEXT).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    found = ran(convert, tmp_path, str(tmp_path / "model"), "--turns", "1")
    assert [(row["from"], row["dtype"]) for row in found] == [("live", "float32"), ("folder", "float32")]


def test_circuits_of_both_methods_are_equal(tmp_path: Path) -> None:
    options = ["--tiny", "--samples", "8", "--budget", "3", "--device", "cpu", "--scores", "avg"]
    exact, naive = sorted(ran(circuit, tmp_path, *options), key=lambda row: row["method"])
    assert exact["removed"] == naive["removed"]
    few = ran(circuit, tmp_path, *options, "--methods", "naive", "--naive-steps", "2")
    assert {row["method"]: row["extrapolated"] for row in few} == {"exact": "false", "naive": "true"}


@pytest.mark.slow
def test_two_checkouts_are_measured_side_by_side(tmp_path: Path) -> None:
    rows = ran(against, tmp_path, "--against", str(ROOT), "--cases", "import,help,server", "--turns", "1")
    assert {row["case"] for row in rows} == {"import", "help", "server"}
    assert not [row for row in rows if row["verdict"].startswith("failed")]
    again = ran(against, tmp_path, "--against", str(ROOT), "--cases", "import", "--turns", "1")
    assert len(again) == len(rows)  # other lines stay


@pytest.mark.slow
def test_the_server_is_measured(tmp_path: Path) -> None:
    options = ("--kinds", "image", "--turns", "1", "--seconds", "0.5", "--minutes", "0.02")
    assert [row["wrong"] for row in ran(serve, tmp_path, *options)] == ["0"]
    rows = ran(serve, tmp_path, *options[:-2], "--contenders", "hydra", "fastapi", "loop")
    assert [row["contender"] for row in rows] == ["hydra, 0.02 minutes", *["hydra"] * 3, *["fastapi"] * 3, "loop"]
    assert all(float(row["per_second"]) > 0 for row in rows)


@pytest.mark.slow
def test_scoring_is_measured(tmp_path: Path) -> None:
    small = ["--rows", "40", "--turns", "1", "--counts", "3", "--workers", "1", "--model", "vit_tiny_patch16_224"]
    rows = ran(score, tmp_path, "images", "texts", "shards", "memory", "gpu", *small, "--size", "32")
    found = {f"{row['part']}.{row['what']}": row["value"] for row in rows}
    assert float(found["shards.resume_ms_of_3"]) > 0
    assert float(found["gpu.score_per_second"]) > 0
