"""Rows, means and claims of a zero-shot study from made-up logits."""

from typing import Any

import numpy as np
import pytest
import torch

from hydra_ensembles.metrics.calibration import ece
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.prediction import Prediction
from studies.compact_logits import Storing, compact
from studies.zero_shot.answers import mean_logits
from studies.zero_shot.claims import UNSEEN, zero_shot_claims
from studies.zero_shot.collecting import make_tables
from studies.zero_shot.methods import FAMILIES, HYDRA, METHODS, SINGLE, TAYLOR, TEMPERATURE, methods_of
from studies.zero_shot.paper import AVERAGE, DETECTED
from studies.zero_shot.paper_details import paper_task_row
from studies.zero_shot.results import StoredZeroShot
from studies.zero_shot.rows import counted_tasks, zero_shot_rows
from studies.zero_shot.tables import TABLES

UNITS = [unit for family in FAMILIES for unit in family.units]
GROUPS = [len(family.units) for family in FAMILIES]
STORING = Storing(1 / 64, 8)
CLASSES = 12
SAMPLES = 60


def made_up(strength: dict[str, float], hopeless: tuple[str, ...] = ()) -> StoredZeroShot:
    """Logits that point to the label, by so much for each unit; on `hopeless` tasks they point nowhere."""
    tasks = {name: {"domain": "unseen", "classes": CLASSES, "samples": SAMPLES} for name in ("pets", "cifar100")}
    tasks["tinyimagenet"] = {"domain": "seen", "classes": CLASSES, "samples": SAMPLES}
    sets: dict[str, Any] = {}
    for seed in (0, 1):
        for position, task in enumerate(tasks):
            generator = torch.Generator().manual_seed(10 * seed + position)
            labels = torch.arange(SAMPLES) % CLASSES
            logits = torch.randn(len(UNITS), SAMPLES, CLASSES, generator=generator)
            for index, unit in enumerate(UNITS):
                if task not in hopeless:
                    logits[index, torch.arange(SAMPLES), labels] += strength.get(unit, 2.0)
            sets[f"{seed}.task.{task}"] = compact(logits, labels, GROUPS, STORING)
        for task in ("tinyimagenet", "cifar100"):
            for name in ("a", "b", "c"):
                generator = torch.Generator().manual_seed(99 + seed)
                sets[f"{seed}.ood.{task}.{name}"] = compact(
                    torch.randn(len(UNITS), 40, CLASSES, generator=generator), None, GROUPS, STORING
                )
    group = {"near": {"a": 40}, "far": {"b": 40, "c": 40}}
    facts = {
        "study": "zero-shot",
        "seeds": [0, 1],
        "recipe": {
            "least_over_chance": 3.0,
            "prune": 14,
            "image_prune": 7,
            "templates": "paper",
            "counts": {"test": None, "detection": 1000},
        },
        "units": dict.fromkeys(UNITS, 1),
        "methods": {name: list(one.units) for name, one in METHODS.items()},
        "temperatures": {str(seed): {TEMPERATURE: 2.0} for seed in (0, 1)},
        "tasks": tasks,
        "detections": {"tinyimagenet": group, "cifar100": group},
        "model": {"name": "made up", "description": "It is no model."},
        "heads": {
            str(seed): {name: [["image:0.1", "text:1.0"]] * 3 for name in ("both", "more", "image")} for seed in (0, 1)
        },
        "circuits": {"0": {f"avg {tower}": {"id_samples": 3, "ood_samples": 4} for tower in ("image", "image+text")}},
        "calibrated_on": 1000,
        "device": "a machine",
        "versions": {"torch": "2"},
        "costs": None,
    }
    return StoredZeroShot(facts, sets)


def test_rows_are_the_metrics_of_the_mean_prediction() -> None:
    study = made_up({})
    rows = zero_shot_rows(study)
    stored = study.sets["1.task.pets"]
    members = stored.logits()[[UNITS.index(unit) for unit in METHODS[HYDRA].units]]
    prediction = Prediction.from_logits(members)
    assert rows[HYDRA]["task.pets.ece"][1] == pytest.approx(
        ece(prediction.probs, torch.from_numpy(stored.labels)), abs=1e-6
    )
    assert rows[HYDRA]["unseen.nll"] == pytest.approx(
        np.mean([rows[HYDRA][f"task.{task}.nll"] for task in ("pets", "cifar100")], axis=0), abs=1e-6
    )
    inside = study.on_task(SINGLE, 0, "tinyimagenet")[0].score("msp")
    outside = study.on_outside(SINGLE, 0, "tinyimagenet", "a").score("msp")
    assert rows[SINGLE]["tinyimagenet.near.auroc"][0] == pytest.approx(auroc(inside, outside), abs=1e-6)
    assert rows[TEMPERATURE]["task.pets.accuracy"] == rows[SINGLE]["task.pets.accuracy"]
    assert rows[TEMPERATURE]["task.pets.nll"] != rows[SINGLE]["task.pets.nll"]


def test_tasks_near_chance_leave_the_means_by_rule() -> None:
    study = made_up({}, hopeless=("cifar100",))
    rows = zero_shot_rows(study)
    assert counted_tasks(study, rows) == {"unseen": ["pets"], "seen": ["tinyimagenet"]}
    assert rows[SINGLE]["unseen.accuracy"] == rows[SINGLE]["task.pets.accuracy"]
    made = make_tables(study)
    assert made["left_out"] == ["cifar100"]
    text = TABLES["tasks"]({**study.facts, **made})
    assert "below 3 times chance leave the means: cifar100" in text
    assert "| chance |  | 8.33 | 8.33 | 8.33 |" in text


def test_without_any_task_above_chance_claims_are_not_testable() -> None:
    study = made_up({}, hopeless=("pets", "cifar100"))
    made = make_tables(study)
    assert all(one["verdict"] == "not testable" for one in made["claims"] if one["scope"] == UNSEEN)
    assert "unseen.accuracy" not in made["rows"][SINGLE]
    for table in TABLES.values():
        assert table({**study.facts, **made})


def test_signs_are_found() -> None:
    better = {**dict.fromkeys(METHODS[HYDRA].units, 5.0), "taylor": 0.0}
    study = made_up(better)
    claims = zero_shot_claims(study, zero_shot_rows(study), resamples=60)
    found = {(one.scope, one.metric, one.first, one.second): one.verdict for one in claims}
    assert found[UNSEEN, "accuracy", HYDRA, SINGLE] == "reproduced"
    assert found[UNSEEN, "accuracy", TAYLOR, SINGLE] == "reproduced"
    assert found[UNSEEN, "nll", HYDRA, TEMPERATURE] == "not reproduced"  # the paper's is worse there
    assert found["tinyimagenet", "all.auroc", HYDRA, SINGLE] == "reproduced"


def test_one_member_can_stand_for_a_mean() -> None:
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = Prediction.from_logits(logits).probs
    torch.testing.assert_close(Prediction.from_logits(mean_logits(logits)).probs, expected)


def test_tables_of_the_paper_were_read_off_as_they_stand() -> None:
    for numbers in DETECTED.values():
        for row in numbers.values():
            if "near.auroc" in row:
                low, high = sorted((row["near.auroc"], row["far.auroc"]))
                assert low <= row["all.auroc"] <= high
    assert AVERAGE[HYDRA]["ece"] - AVERAGE[SINGLE]["ece"] == pytest.approx(-0.0519)
    assert DETECTED["ImageNet-1K"][HYDRA]["all.aupr"] == pytest.approx(0.4785)


@pytest.mark.parametrize("metric", ["accuracy", "brier", "nll", "ece", "aece"])
def test_rows_of_the_paper_give_their_own_mean(metric: str) -> None:
    """A row misread from the paper would not; the averages are also those of Table 3."""
    found = 0
    for method in (*METHODS, "BayesVLM", "ViLU"):
        row = paper_task_row(metric, method)
        if row is None:
            continue
        *values, mean = row.values()
        rounding = 0.0101 if metric in ("brier", "nll") else 0.000151
        assert np.mean(values) == pytest.approx(mean, abs=rounding), method
        stated = AVERAGE[method].get(metric, mean)
        assert stated == pytest.approx(mean, abs=rounding), method
        found += 1
    assert found >= 5


def test_models_that_are_not_trained_have_no_tuned_rows() -> None:
    assert [name for name in METHODS if name not in methods_of(False)] == [
        name for name, one in METHODS.items() if one.family.tuned
    ]
