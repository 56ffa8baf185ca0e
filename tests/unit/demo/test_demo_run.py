"""The demo on few images: interrupted, resumed, refused; and the published numbers."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hydra_ensembles as he
from cli_cases import fail, run, succeed
from hydra_ensembles.demo import DemoSettings, load_answers, load_sample
from hydra_ensembles.demo.gains import BRANCHES, DEEP, SINGLE
from hydra_ensembles.demo.run import METHODS
from hydra_ensembles.pipeline import build as chain
from hydra_ensembles.schema import to_plain

ROOT = Path(__file__).resolve().parents[3]
FEW: dict[str, Any] = {"limit": 28, "share": 0.8, "epochs": 2, "shared_layers": 5, "draws": 2}
FEW |= {"latency_repeats": 1, "latency_batch": 2}


def without_times(folder: Path, name: str = "results.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    assert found.pop("measured")["costs"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo on few images by the command line: interrupted before members are trained, then resumed."""
    place = tmp_path_factory.mktemp("demo") / "few"
    command = ["demo", *(f"--set={name}={value}" for name, value in FEW.items()), "--output", place]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chain, "finetune", Mock(side_effect=KeyboardInterrupt))
        stopped = run(*command)
    assert stopped.exit_code == 130
    assert f"kept in {place};" in stopped.stderr
    assert sorted(path.name for path in place.iterdir()) == ["run.json", "work"]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "circuit/exact" not in done.stderr  # the ranking was already done
    shown = " ".join(done.stdout.split())  # undo the terminal's line breaks
    for words in (*METHODS, "Mistakes", "unfamiliar", "Price", "hydra-ensembles predict"):
        assert words in shown
    assert "seed was 0 and is 3" in fail(*command, "--seed", 3)
    return place


def test_it_writes_every_number_down(folder: Path) -> None:
    found = json.loads((folder / "results.json").read_text())
    assert (tuple(found["methods"]), set(found["samples"].values())) == (METHODS, {FEW["limit"]})
    assert found["methods"][DEEP]["parameters"] > found["methods"][BRANCHES]["parameters"]
    assert json.loads((folder / "run.json").read_text())["settings"] == found["settings"]
    names = {path.name for path in (folder / "evaluations").glob("*.json")}
    assert names == {"single.json", "pruned_branches.json", "deep_ensemble.json", "costs.json"}
    assert not (folder / "work").exists()
    measured = [he.Evaluation.load(folder / "evaluations" / name) for name in sorted(names - {"costs.json"})]
    assert {one.model.calibration.accepted_share for one in measured} == {0.9}  # every threshold of every method


def test_the_model_it_leaves_behind_says_why_it_declines(folder: Path) -> None:
    model = he.Ensemble.from_pretrained(folder / "model")
    assert (model.num_members, model.config.trunk) == (3, FEW["shared_layers"])
    seen = model.predict([load_sample().far["FashionMNIST"][row][0] for row in range(8)])
    assert "unfamiliar" in seen.reason
    assert float(seen.familiarity.max()) < 0.5


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return without_times(ROOT / "results", "demo.json")


def test_the_published_run_has_the_default_settings(published: dict[str, Any]) -> None:
    assert (published["settings"], tuple(published["methods"])) == (to_plain(DemoSettings()), METHODS)


def test_the_settings_are_those_that_were_chosen() -> None:
    """By the file's own criterion, on sets that are not in the demo."""
    choice = json.loads((ROOT / "results" / "demo_choice.json").read_text())
    ours = [row for row in choice["rows"] if row["method"] == "Hydra"]
    best = max(ours, key=lambda row: row["numbers"][choice["criterion"]]["mean"])
    assert choice["chosen"] == best["settings"]
    assert {name: getattr(DemoSettings(), name) for name in best["settings"]} == best["settings"]
    assert not set(choice["samples"]) & {*load_sample().near, *load_sample().far}


def test_the_published_rows_follow_from_the_stored_answers(published: dict[str, Any]) -> None:
    """On the whole test set: two of the deep ensemble's three models are stored, the third is the single model."""
    labels = torch.from_numpy(load_sample().test.labels.copy())
    stored = [sets["test"].logits[0].argmax(1) == labels for sets in load_answers()[SINGLE]]
    accuracy = {name: published["methods"][name]["numbers"]["accuracy"] for name in METHODS}
    right = [accuracy[SINGLE], *(one.double().mean().item() for one in stored)]
    assert min(right) - 0.01 < accuracy[DEEP] < max(right) + 0.02


@pytest.mark.slow
def test_the_whole_demo_gives_the_published_numbers(tmp_path: Path, published: dict[str, Any]) -> None:
    succeed("demo", "--output", tmp_path / "demo")
    fresh = without_times(tmp_path / "demo")
    for name in METHODS:
        ours, theirs = (found["methods"][name]["numbers"] for found in (fresh, published))
        shared = {key: ours[key] for key in theirs}  # newer evaluations have more numbers
        assert shared == pytest.approx(theirs, abs=0.05), name  # rounding differs between machines
    assert fresh["methods"][SINGLE]["numbers"]["accuracy"] == published["methods"][SINGLE]["numbers"]["accuracy"]
