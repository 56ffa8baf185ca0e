"""Every benchmark runs on a tiny shape; what its numbers depend on is checked against plain computation."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import circuit  # noqa: E402
import coverage  # noqa: E402
import inference  # noqa: E402
import inference_models  # noqa: E402
import inference_report  # noqa: E402
import quoted  # noqa: E402
import serve  # noqa: E402

from studies.measures import Difference  # noqa: E402

del sys.path[:2]

pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning", "ignore:.*CUDA.*:UserWarning")
TINY = ["--dtype", "float32", "--device", "cpu", "--modes", "eager", "--repeats", "2", "--batches", "2"]


def ran(benchmark: Any, folder: Path, *options: str) -> Any:
    path = folder / "results.json"
    benchmark.main([*options, "--output", str(path)])
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-clip"])
def test_every_contender_answers_as_it_should(shape: str, tmp_path: Path) -> None:
    names = inference_models.names_of(inference_models.SHAPES[shape])
    some = [name for name in names if name not in ("hydra-k4", "hydra-k6", "hydra-k10")]  # built like `hydra-k8`
    options = [*TINY, "--shape", shape, "--contenders", *some]
    found = ran(inference, tmp_path, *options)
    rows = {row["contender"]: row for row in found["rows"]}
    assert set(rows) == set(some)
    for name, row in rows.items():
        assert row["error"] is None if name == "mc-dropout" else row["error"] < 1e-5
    assert ran(inference, tmp_path, *options) == found  # existing rows are not measured again


@pytest.mark.slow
def test_two_checkouts_are_timed_side_by_side(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--contenders", "hydra-k8", "--against", str(ROOT)]
    (row,) = ran(inference, tmp_path, *TINY, *options)["rows"]
    assert row["ratio"] == pytest.approx(row["new_ms"] / row["old_ms"])
    assert row["errors"] == [pytest.approx(0.0, abs=1e-5)] * 2


def test_every_contender_and_method_is_counted(tmp_path: Path) -> None:
    names = ["single", "deep-in-turn", *inference_models.METHODS]
    found = ran(inference, tmp_path, *TINY, "--shape", "tiny", "--counts", "--contenders", *names)
    rows = {row["contender"]: row for row in found["rows"]}
    assert set(rows) == set(names)
    assert (rows["single"]["limit"], rows["deep-in-turn"]["limit"]) == (1.0, 3.0)


def test_a_conversion_is_timed(tmp_path: Path) -> None:
    found = ran(inference, tmp_path, "--conversion", "--shape", "tiny", "--device", "cpu", "--repeats", "1")
    assert found["shape"] == "tiny"
    assert 0 < found["convert_seconds"] > found["comparison_seconds"]


def test_intervals_are_asked_whether_they_hold_what_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "ALL", 2000)
    shape = ["--draws", "4", "--resamples", "20", "--samples", "40", "--of-calibration", "60"]
    rows = ran(coverage, tmp_path, *shape)["rows"]
    assert {row["metric"] for row in rows} == {"accuracy", "aurc", "auroc", "fpr95", "aupr", "ece"}
    assert {row["true"] for row in rows if row["metric"] == "ece"} == set(coverage.ERRORS)
    assert 0.5 < sum(row["held"] for row in rows) / len(rows) <= 1


def test_figures_are_drawn_from_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(inference_report, "FIGURES", tmp_path)
    inference_report.main()
    names = {path.name for path in (ROOT / "docs" / "figures").glob("inference_*.svg")}
    assert {path.name for path in tmp_path.iterdir()} == names
    drawn = (tmp_path / "inference_cost.svg").read_text()
    _, _, width, height = map(float, re.findall(r'viewBox="([^"]*)"', drawn)[0].split())
    places = [(float(x), float(y)) for x, y in re.findall(r'<text[^>]* x="([\d.-]+)" y="([\d.-]+)"', drawn)]
    assert len(places) > 10
    assert all(0 < x < width and 0 < y < height for x, y in places)  # including the legend


def test_no_number_of_a_sentence_is_without_its_source() -> None:
    """Pages in UNCHECKED are exempt, with a reason; each of them still needs to be."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {page.relative_to(ROOT).as_posix(): quoted.without_source(page.read_text()) for page in pages}
    assert {name: numbers for name, numbers in found.items() if numbers and name not in quoted.UNCHECKED} == {}
    assert [name for name in quoted.UNCHECKED if not found.get(name)] == []


VALUES = {"A": 0.0, "B": 0.02, "C": 0.005, "D": 0.0}


class MadeUp:
    """A made-up study of three rows: B is 2 ± 1 points better than A, ± 3 after three looks, C not significantly."""

    name, rows = "small", ("A", "B", "C")

    def looks(self, *rows: str) -> int:
        return 3

    def mean(self, row: str, key: str) -> None:
        return None

    def difference(self, first: str, second: str, key: str, looks: int) -> Difference:
        value, seeds = VALUES[first] - VALUES[second], 1 if "D" in (first, second) else 3
        return Difference(-value if key == "calibrated.nll" else value, 0.01 * looks, seeds)


@pytest.mark.parametrize(
    ("text", "source", "token"),
    [
        ("2 points less", "small | A - B | accuracy", "no sign"),
        ("+2", "small | B - A | calibrated.nll | worse", "worse"),
        ("1", "small | C - A | accuracy | better", "± 1.000"),
        ("2", "small | B - A | accuracy | chance", "chance"),
        ("0", "small | D - A | accuracy | chance", "chance"),  # one seed has no interval
        ("2", "small | B - A | accuracy | better, all looks", "± 3.000"),
        ("2", "small | B - A | accuracy | better, 4 looks", "± 4.000"),
        ("3", "small | B | accuracy, all looks", "only differences"),
        ("", "! small | B - A | accuracy | chance, all looks ; ! small | B - A | accuracy | chance", "± 1.000"),
        ("2 of 3", "small | B - A | accuracy", "2 numbers"),
        ("3", "results/inference_counts.json | rows/contender=none/limit", "nothing there"),
        ("3", "missing.json | a/b", "missing.json"),
        ("3", "given 3 ; ! small | B - A | accuracy | lower", "lower"),
    ],
)
def test_a_sentence_that_results_do_not_bear_out_is_refused(text: str, source: str, token: str) -> None:
    given = f"{text}\n<!-- numbers:\n{source}\n-->\n"
    same, (wrong,) = quoted.written(given, {"small": MadeUp()}, ROOT)
    assert same == given
    assert token in wrong


def test_an_interval_is_as_wide_as_all_looks_ask() -> None:
    numbers = "small | B - A | accuracy | better ; small | B - A | ± accuracy ; small | B - A | ± accuracy, all looks"
    claim = "! small | B - A | accuracy | chance, all looks"
    given = f"2 ± 1, with all looks ± 9\n<!-- numbers:\n{numbers}\n{claim}\n-->\n"
    assert quoted.written(given, {"small": MadeUp()}, ROOT) == (given.replace("9", "3"), [])


def test_circuits_by_three_methods(tmp_path: Path) -> None:
    options = ["--tiny", "--samples", "8", "--budget", "3", "--device", "cpu", "--scores", "avg"]
    found = ran(circuit, tmp_path, *options, "--naive-steps", "2", "--naive-heads", "3")
    rows = {row["method"]: row for row in found["results"]}
    assert list(rows) == list(circuit.METHODS)
    assert rows["naive"]["extrapolated"]


@pytest.mark.slow
def test_the_server_is_measured(tmp_path: Path) -> None:
    found = ran(serve, tmp_path, "--uploads", "32", "--turns", "1", "--requests", "100")
    assert found["throughput"]["ratio"] > 0
    assert found["latency"]["even"]["p50_ms"] <= found["latency"]["even"]["p99_ms"]
    assert found["endurance"]["wrong"] == 0, found["endurance"]["first_wrong"]
    assert 0 < found["endurance"]["broken"] < 20
