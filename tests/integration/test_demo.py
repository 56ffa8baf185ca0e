"""The demo through the command line, as a newcomer runs it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hydra_ensembles as he
from chromium import find_chromium
from hydra_ensembles.demo.embedded import load_backbone, load_sample
from hydra_ensembles.demo.methods import CIRC_AVG, DEEP, HYDRA_CIRC, METHODS, SINGLE

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180  # what the whole demo may take on two cores


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hydra_ensembles", "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def without_times(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert found.pop("measured")["costs"]
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(place: Path) -> subprocess.CompletedProcess[str]:
    """The demo on few images."""
    return demo("--limit", "32", folder=place)


def test_it_shows_every_method_and_says_what_to_do_next(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "circuit/exact avg" in done.stderr  # the progress bar
    for words in (*METHODS, "AUROC", "FPR95", "ECE", "exact", "stored logits", "hydra-ensembles predict"):
        assert words in done.stdout


def test_it_leaves_a_model_that_predicts(done: subprocess.CompletedProcess[str], place: Path) -> None:
    model = he.Ensemble.from_pretrained(place / "hydra-demo" / "model")
    images = [load_sample().test[index][0] for index in range(8)]
    prediction = model.predict(images)
    assert model.num_members == 3
    assert prediction.class_names == load_sample().test.class_names
    assert int((prediction.label == load_backbone().predict(images).label).sum()) >= 6


def test_it_writes_every_number_down(done: subprocess.CompletedProcess[str], place: Path) -> None:
    folder = place / "hydra-demo"
    found = json.loads((folder / "results.json").read_text())
    assert tuple(found["methods"]) == METHODS
    assert found["samples"]["test"] == found["samples"]["River"] == 32
    assert found["samples"]["circuit_id"] == found["samples"]["circuit_ood"] == 32
    assert found["methods"][DEEP]["parameters"] > found["methods"][HYDRA_CIRC]["parameters"]
    assert [cost["name"] for cost in found["measured"]["costs"]] == list(METHODS)
    assert json.loads((folder / "config.json").read_text())["settings"] == found["settings"]
    assert len(list((folder / "evaluations").glob("*.json"))) == len(METHODS) + 1
    assert not (folder / "work").exists()


def test_a_member_by_itself_scores_what_the_table_says(done: subprocess.CompletedProcess[str], place: Path) -> None:
    """The CircAvg row is read off the fused ensemble; the member on its own gives the same answers."""
    folder = place / "hydra-demo"
    member = he.Ensemble.from_pretrained(folder / "model").member(0)
    sample = load_sample()
    images = sample.test.select(range(32))
    fresh = he.evaluate(member, images, {"near": {"River": sample.near["River"].select(range(32))}}, progress=False)
    told = json.loads((folder / "results.json").read_text())["methods"][CIRC_AVG]["numbers"]
    assert fresh.id.accuracy == told["accuracy"]


def test_the_report_opens_in_a_browser(done: subprocess.CompletedProcess[str], place: Path, tmp_path: Path) -> None:
    report = place / "hydra-demo" / "report.html"
    assert all(name in report.read_text() for name in METHODS)
    found = find_chromium().measure(report, tmp_path, 1280)
    assert found["empty"] == 0
    assert found["broken"] == 0
    assert found["images"]
    assert not find_chromium().screenshot(report, tmp_path / "page.png", 1280, 900)


@pytest.mark.slow
def test_a_second_run_has_the_same_numbers(done: subprocess.CompletedProcess[str], place: Path) -> None:
    again = demo("--limit", "32", "--output", "again", folder=place)
    assert again.returncode == 0, again.stderr
    assert without_times(place / "again" / "results.json") == without_times(place / "hydra-demo" / "results.json")


def test_bad_folders_are_refused_in_one_line(done: subprocess.CompletedProcess[str], place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").touch()
    refused = demo("--output", "mine", folder=place)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "was not written by the demo" in refused.stderr
    other = demo("--seed", "3", folder=place)
    assert other.returncode == 2
    assert "other settings" in other.stderr


def test_ctrl_c_leaves_no_half_written_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hydra_ensembles", "demo", "--limit", "32"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder, waited = tmp_path / "hydra-demo", time.perf_counter() + 100
    while not (folder / "work" / "circuit" / "base" / "config.json").exists() and time.perf_counter() < waited:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=100)
    assert running.returncode == 130, said
    assert "the same command goes on from here" in said
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "work"]


@pytest.mark.slow
def test_the_whole_demo_gives_the_published_numbers_in_time(tmp_path: Path) -> None:
    started = time.perf_counter()
    assert demo(folder=tmp_path).returncode == 0
    assert time.perf_counter() - started <= SECONDS
    fresh = without_times(tmp_path / "hydra-demo" / "results.json")
    published = without_times(ROOT / "results" / "demo.json")
    for name in METHODS:
        ours, theirs = (found["methods"][name]["numbers"] for found in (fresh, published))
        assert ours == pytest.approx(theirs, abs=0.02), name  # rounding differs between machines
    assert fresh["methods"][SINGLE]["numbers"]["accuracy"] == published["methods"][SINGLE]["numbers"]["accuracy"]
