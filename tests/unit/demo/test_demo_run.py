"""The demo, on few images: interrupted, resumed, refused; and the published numbers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from cli_cases import fail, run, succeed
from hydra_ensembles.demo import DemoSettings, load_deep_logits, load_sample
from hydra_ensembles.demo.run import CIRC_AVG, DEEP, HYDRA_CIRC, METHODS, SINGLE
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.schema import to_plain

ROOT = Path(__file__).resolve().parents[3]
FEW = {"limit": 24, "shared_layers": 4, "prune": 3, "bootstrap": 10, "latency_repeats": 1}


def without_times(folder: Path, name: str = "results.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    assert found.pop("measured")["costs"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo on few images through the command line: interrupted when a ranking is about to get its name, resumed."""
    place, replace = tmp_path_factory.mktemp("demo") / "few", os.replace

    def interrupted(source: Any, target: Any, **options: Any) -> None:
        if str(target).endswith("rankings/acc.json"):
            raise KeyboardInterrupt
        replace(source, target, **options)

    command = ["demo", *(f"--set={name}={value}" for name, value in FEW.items()), "--output", place]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        stopped = run(*command)
    assert stopped.exit_code == 130
    assert "the same command goes on from here" in stopped.stderr
    assert sorted(path.name for path in place.iterdir()) == ["run.json", "work"]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "circuit/exact ood" in done.stderr  # the progress bar
    assert "circuit/exact avg" not in done.stderr  # that was done
    for words in (*METHODS, "AUROC", "FPR95", "ECE", "exact", "stored logits", "hydra-ensembles predict"):
        assert words in done.stdout
    assert "seed was 0 and is 3" in fail(*command, "--seed", 3)
    return place


def test_it_writes_every_number_down(folder: Path) -> None:
    found = json.loads((folder / "results.json").read_text())
    assert tuple(found["methods"]) == METHODS
    assert set(found["samples"].values()) == {24}
    assert found["methods"][DEEP]["parameters"] > found["methods"][HYDRA_CIRC]["parameters"]
    assert [cost["name"] for cost in found["measured"]["costs"]] == list(METHODS)
    assert json.loads((folder / "run.json").read_text())["settings"] == found["settings"]
    names = {path.name for path in (folder / "evaluations").glob("*.json")}
    assert names == {"single.json", "taylor.json", "circavg.json", "hydra_taylor.json", "hydra_circ.json",
                     "deep_ensemble.json", "costs.json"}  # fmt: skip
    assert not (folder / "work").exists()
    assert all(name in (folder / "report.html").read_text() for name in METHODS)
    # without fine-tuning, the first member of the fused ensemble is CircAvg
    member = he.Ensemble.from_pretrained(folder / "model").member(0)
    fresh = he.evaluate(member, load_sample().test.select(range(24)), progress=False)
    assert fresh.id.accuracy == found["methods"][CIRC_AVG]["numbers"]["accuracy"]


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"prune": 0}, {"circuit_images": 8}, {"limit": 3}])
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DemoSettings(**wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return without_times(ROOT / "results", "demo.json")


def test_the_published_run_has_the_default_settings(published: dict[str, Any]) -> None:
    assert published["settings"] == to_plain(DemoSettings())
    assert tuple(published["methods"]) == METHODS
    choice = json.loads((ROOT / "results" / "demo_choice.json").read_text())
    assert choice["chosen"] == DemoSettings().prune


def test_the_published_rows_follow_from_the_stored_logits(published: dict[str, Any]) -> None:
    """Those of the deep ensemble, the first of which is the single model."""
    logits, sample = load_deep_logits(), load_sample()
    labels = {name: torch.from_numpy(sample.sets[name].labels.copy()) for name in ("calibration", "test")}
    calibration = he.fit_calibration(logits["calibration"], labels["calibration"], temperature=False).calibration
    ood = {group: {name: logits[name] for name in sets} for group, sets in (("near", sample.near), ("far", sample.far))}
    scores = ("entropy", "mutual_information")
    fresh = evaluate_logits(logits["test"], labels["test"], ood, scores=scores, calibration=calibration)
    assert fresh.numbers() == pytest.approx(published["methods"][DEEP]["numbers"], abs=1e-6)
    right = logits["test"][0].argmax(1) == labels["test"]
    assert right.double().mean() == pytest.approx(published["methods"][SINGLE]["numbers"]["accuracy"], abs=1e-9)


@pytest.mark.slow
def test_the_whole_demo_gives_the_published_numbers(tmp_path: Path, published: dict[str, Any]) -> None:
    succeed("demo", "--output", tmp_path / "demo")
    fresh = without_times(tmp_path / "demo")
    for name in METHODS:
        ours, theirs = (found["methods"][name]["numbers"] for found in (fresh, published))
        assert ours == pytest.approx(theirs, abs=0.02), name  # rounding differs between machines
    assert fresh["methods"][SINGLE]["numbers"]["accuracy"] == published["methods"][SINGLE]["numbers"]["accuracy"]
