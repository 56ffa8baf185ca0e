"""From stored logits to rows, claims and tables, and again to the same."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from small_study import small_recipe
from typer.testing import CliRunner

from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics.bootstrap import bootstrap_ood_difference
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.prediction import Prediction
from studies.__main__ import study as study_command
from studies.claims import COMPARISONS, LEVEL, Replicates, verdict
from studies.collecting import rebuild, written
from studies.methods import DEEP, HYDRA, HYDRA_PAPER, HYDRA_TRUNK, SINGLE
from studies.paper import COLUMN_OF, PAPER
from studies.results import StoredStudy
from studies.rows import method_numbers
from studies.tables import TABLES, contrasts_table

SETS = {"ImageNet-1K": (2, 2), "CIFAR-100": (1, 4), "SST-2": (2, 5)}  # near and far sets of the paper


def test_rows_are_the_metrics_of_the_stored_logits(study: StoredStudy) -> None:
    inside = Prediction.from_logits(study.logits(DEEP, 0, "cifar10"))
    numbers = method_numbers(study, DEEP, 0)
    assert inside.members == 3
    assert numbers["accuracy"] == pytest.approx(float((inside.label == study.labels(0)).double().mean()))
    found = [
        auroc(inside.score("msp"), Prediction.from_logits(study.logits(DEEP, 0, name)).score("msp"))
        for name in study.groups("near", "far")
    ]
    assert numbers["all.auroc"] == pytest.approx(statistics.mean(found))


def test_temperature_scaling_is_the_single_model_calibrated(study: StoredStudy, tables: dict[str, Any]) -> None:
    rows = tables["rows"]
    for metric in ("nll", "ece", "brier"):
        assert rows["Temperature Scaling"][metric] == rows[SINGLE][f"calibrated.{metric}"]
    assert rows["Temperature Scaling"]["accuracy"] == rows[SINGLE]["accuracy"]


def test_single_is_the_first_member_of_the_deep_ensemble(study: StoredStudy) -> None:
    assert torch.equal(study.logits(SINGLE, 1, "mnist"), study.logits(DEEP, 1, "mnist")[:1])


def test_results_are_rebuilt_to_the_same_tables(
    results: Path, study: StoredStudy, tables: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rebuild(study.name, results) == written({**study.facts, **tables}, TABLES)


def test_logits_and_numbers_that_do_not_belong_together_are_refused(results: Path, study: StoredStudy) -> None:
    path = results / f"{study.name}.json"
    facts = json.loads(path.read_text())
    facts["rows"][HYDRA]["nll"][0] += 0.001
    path.write_text(json.dumps(facts))
    with pytest.raises(DataError, match="come out different"):
        rebuild(study.name, results)


def test_missing_and_foreign_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as results"):
        StoredStudy.load("text-sst2", tmp_path)
    (tmp_path / "text-sst2.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match="has format 'other'"):
        StoredStudy.load("text-sst2", tmp_path)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_rectangular(name: str, study: StoredStudy, tables: dict[str, Any]) -> None:
    text = TABLES[name]({**study.facts, **tables})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1
    assert "nan ±" not in text


def test_the_main_table_has_every_method_and_the_papers_rows(study: StoredStudy, tables: dict[str, Any]) -> None:
    text = TABLES["main"]({**study.facts, **tables})
    for method in study.methods:
        assert f"| {method} |" in text
    assert text.count("*paper, CIFAR-100*") == len(PAPER["CIFAR-100"])
    assert "*89.43*" in text


@pytest.mark.parametrize("column", PAPER)
def test_the_papers_means_are_those_of_its_near_and_far_sets(column: str) -> None:
    """Tables 15 to 17 against Tables 1 and 2: a slip in copying would show."""
    near, far = SETS[column]
    for method, row in PAPER[column].items():
        for metric in ("auroc", "fpr95", "aupr"):
            mean = (near * row[f"near.{metric}"] + far * row[f"far.{metric}"]) / (near + far)
            assert row[f"all.{metric}"] == pytest.approx(mean, abs=2e-4), (method, metric)


def test_every_comparison_has_the_papers_numbers() -> None:
    for column in COLUMN_OF.values():
        for metric, first, second in COMPARISONS:
            second = "Deep Ensembles (classifiers)" if column == "SST-2" and second == DEEP else second
            assert metric in PAPER[column][first]
            assert metric in PAPER[column][second]


@pytest.mark.parametrize(
    ("paper", "low", "high", "wanted"),
    [
        (0.02, 0.01, 0.03, "reproduced"),
        (-0.02, -0.03, -0.01, "reproduced"),
        (0.02, -0.03, -0.01, "not reproduced"),
        (0.02, -0.01, 0.03, "tie"),
        (0.0, 0.01, 0.03, "not reproduced"),
        (0.0, -0.01, 0.03, "tie"),
    ],
)
def test_verdicts(paper: float, low: float, high: float, wanted: str) -> None:
    assert verdict(paper, low, high) == wanted


def test_differences_are_those_of_the_paired_bootstrap(study: StoredStudy) -> None:
    replicates = Replicates(study, resamples=50)
    assert replicates.difference("all.auroc", DEEP, DEEP, own_score=False) == (0.0, 0.0, 0.0)
    one = StoredStudy({**study.facts, "seeds": [0]}, study.sets)
    value, low, high = Replicates(one, resamples=50).difference("near.auroc", HYDRA_PAPER, SINGLE, own_score=False)

    def scores(method: str) -> tuple[torch.Tensor, torch.Tensor]:
        inside, outside = (Prediction.from_logits(study.logits(method, 0, name)) for name in ("cifar10", "cifar100"))
        return inside.score("msp"), outside.score("msp")

    wanted = bootstrap_ood_difference("auroc", scores(HYDRA_PAPER), scores(SINGLE), resamples=50, level=LEVEL)
    assert np.allclose([value, low, high], [wanted.value, wanted.low, wanted.high])


def test_claims_stand_with_both_settings(study: StoredStudy, tables: dict[str, Any]) -> None:
    claims = tables["claims"]
    hydra = [one for one in claims if one["first"] in (HYDRA, HYDRA_PAPER)]
    assert len([one for one in hydra if one["setting"] == "chosen"]) == len(hydra) / 2
    assert {one["verdict"] for one in claims} <= {"reproduced", "not reproduced", "tie"}
    for one in claims:
        assert one["low"] <= one["high"]


def test_contrasts_are_differences_of_the_rows(study: StoredStudy, tables: dict[str, Any]) -> None:
    rows, contrasts = tables["rows"], tables["contrasts"]
    assert list(contrasts) == [HYDRA, HYDRA_TRUNK, *(one.name for one in small_recipe().controls)]
    for first, found in contrasts.items():
        assert len(found) == (6 if first == HYDRA else 9)
        for key, (value, low, high) in found.items():
            metric, _, second = key.partition(" − ")
            row = f"chosen.{metric}" if metric.startswith("all.") else metric
            assert value == pytest.approx(np.mean(rows[first][row]) - np.mean(rows[second][row]), abs=1e-5)
            assert low <= high
    assert contrasts_table({**study.facts, **tables}).count("\n| ") == 3 * len(contrasts)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_contrasts_that_come_out_different_are_refused(results: Path, study: StoredStudy, damage: str) -> None:
    path = results / f"{study.name}.json"
    facts = json.loads(path.read_text())
    if damage == "changed":
        next(iter(facts["contrasts"].values()))["accuracy − Single"][0] += 0.001
    else:
        del facts["contrasts"]
    path.write_text(json.dumps(facts))
    with pytest.raises(DataError, match="come out different"):
        rebuild(study.name, results)


def test_numbers_can_be_stored_anew_from_the_logits(results: Path, study: StoredStudy, tables: dict[str, Any]) -> None:
    path = results / f"{study.name}.json"
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), "contrasts": {}, "claims": []}))
    app = typer.Typer()
    app.command()(study_command)
    done = CliRunner().invoke(app, [study.name, "--collect", "--from-results", "--results", str(results)])
    assert done.exit_code == 0, done.stderr
    assert path.read_text() == whole
    rebuild(study.name, results)


def test_the_command_prints_every_table(results: Path, study: StoredStudy) -> None:
    app = typer.Typer()
    app.command()(study_command)
    result = CliRunner().invoke(app, [study.name, "--from-results", "--results", str(results)])
    assert result.exit_code == 0, result.stderr
    for table in ("main", "sets", "calibration", "diversity", "choice", "claims", "contrasts", "targets"):
        assert f"### {study.name}: {table}" in result.stdout
