"""The published numbers of the demo, made again from what is in the package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.demo.embedded import load_backbone, load_deep_logits, load_sample
from hydra_ensembles.demo.methods import DEEP, METHODS, SINGLE, DemoData
from hydra_ensembles.demo.settings import DemoSettings
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.schema import to_plain

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "demo.json").read_text())
    return found


def test_the_published_run_has_the_default_settings(published: dict[str, Any]) -> None:
    assert published["settings"] == to_plain(DemoSettings())
    assert tuple(published["methods"]) == METHODS
    choice = json.loads((ROOT / "results" / "demo_choice.json").read_text())
    assert choice["chosen"] == DemoSettings().prune


def test_the_deep_ensemble_row_follows_from_the_stored_logits(published: dict[str, Any]) -> None:
    logits, sample = load_deep_logits(), load_sample()
    labels = {name: torch.from_numpy(sample.sets[name].labels.copy()) for name in ("calibration", "test")}
    calibration = he.fit_calibration(logits["calibration"], labels["calibration"], temperature=False).calibration
    ood = {group: {name: logits[name] for name in sets} for group, sets in (("near", sample.near), ("far", sample.far))}
    fresh = evaluate_logits(
        logits["test"],
        labels["test"],
        ood,
        scores=("entropy", "mutual_information"),
        calibration=calibration,
    )
    assert fresh.numbers() == pytest.approx(published["methods"][DEEP]["numbers"], abs=1e-6)


def test_the_single_model_is_as_accurate_as_published(published: dict[str, Any]) -> None:
    backbone = load_backbone()
    data = DemoData.prepare(load_sample(), backbone, DemoSettings())
    right = sum(int((backbone.predict(images).label == labels).sum()) for images, labels in data.test)
    assert right / data.samples()["test"] == published["methods"][SINGLE]["numbers"]["accuracy"]
    assert data.samples() == published["samples"]
