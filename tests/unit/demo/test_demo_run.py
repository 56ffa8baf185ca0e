"""The demo on few images: interrupted, resumed, refused; and the published numbers."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import hydra_ensembles as he
from cli_cases import fail, run
from hydra_ensembles.demo import load_sample
from hydra_ensembles.demo.gains import BRANCHES, DEEP
from hydra_ensembles.demo.run import METHODS
from hydra_ensembles.pipeline import build as chain

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
