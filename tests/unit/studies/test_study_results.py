"""From stored columns to rows, claims and tables, and again to the same; what the paper says; documents."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from finished_studies import Finished
from sklearn.metrics import average_precision_score, roc_auc_score
from typer.testing import CliRunner

from hydra_ensembles import Prediction
from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import bootstrap_ood
from studies.__main__ import app
from studies.methods import DEEP, HYDRA, HYDRA_PAPER, HYDRA_TRUNK, SINGLE, TEMPERATURE
from studies.numbers import (
    LEVEL,
    Replicates,
    all_rows,
    largest_gap,
    require_same,
    verdict,
)
from studies.paper import AVERAGE, paper_numbers, read_csv
from studies.recipe import CLASSIFIERS
from studies.results import FEW_CLASSES, Results, stored_columns
from studies.tables import RESULTS, TABLES, draw_figures, written

SETS = {"ImageNet-1K": (2, 2), "CIFAR-100": (1, 4), "SST-2": (2, 5)}  # near and far sets of the paper


# --- columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [FEW_CLASSES, FEW_CLASSES + 1])
def test_columns_are_those_of_the_logits(classes: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 40, classes, generator=generator) + 7
    labels = torch.arange(40) % classes
    methods = {SINGLE: ["one"], TEMPERATURE: ["one"], HYDRA: ["three"]}
    temperatures = {SINGLE: 2.0, TEMPERATURE: 2.0, HYDRA: 0.5}
    stored = stored_columns({"one": logits[:1], "three": logits}, methods, labels, temperatures, [TEMPERATURE])
    facts = {
        "study": "made-up",
        "format": "hydra_ensembles.study 2",
        "methods": methods,
        "seeds": [0],
        "units": {"one": 1, "three": 3},
        "calibrated": [TEMPERATURE],
        "calibrates": "probs",
        "temperatures": {"0": temperatures},
    }
    Results(facts, {f"0/task/task/{key}": array for key, array in stored.items()}).save(tmp_path)
    results = Results.load("made-up", tmp_path)
    exact = {"rtol": 0, "atol": 0} if classes > FEW_CLASSES else {"rtol": 1e-2, "atol": 1e-2}  # float16 logits
    for method, count, temperature in ((SINGLE, 1, None), (TEMPERATURE, 1, 2.0), (HYDRA, 3, None)):
        prediction = Prediction.from_logits(logits[:count], temperature=temperature)
        columns = results.columns(method, 0, "task", "task")
        for score in ("msp", "entropy", "mutual_information", "energy", "max_logit"):
            torch.testing.assert_close(columns[score], prediction.score(score), **exact)
        assert torch.equal(columns["correct"], prediction.label == labels)
        torch.testing.assert_close(columns["confidence"], prediction.confidence, **exact)
        torch.testing.assert_close(
            columns["nll"].exp(), 1 / prediction.probs[torch.arange(40), labels], rtol=2e-2, atol=0
        )
        after = Prediction.from_logits(logits[:count], temperature=temperatures[method], calibrates="probs")
        torch.testing.assert_close(columns["calibrated.confidence"], after.confidence, **exact)
    if classes > FEW_CLASSES:
        columns = results.columns(HYDRA, 0, "task", "task")
        largest = Prediction.from_logits(logits).probs.topk(10)
        assert torch.equal(columns["top_classes"].long(), largest.indices)
        torch.testing.assert_close(columns["top_probabilities"].float(), largest.values, rtol=1e-3, atol=1e-6)


def test_published_rows_follow_from_the_published_columns() -> None:
    """Every number of the text study, whose columns are the smallest; `test_studies` holds all of them."""
    results = Results.load("text-sst2", RESULTS)
    assert largest_gap(all_rows(results), results.facts["rows"]) < 0.05  # of what float16 explains
    with pytest.raises(DataError, match="text-sst2"):
        Results.load("text-sst2", RESULTS.parent)
    assert sum(path.stat().st_size for path in RESULTS.parent.rglob("*") if path.is_file()) < 60 * 2**20


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_agree_with_another_library(classifiers: Finished) -> None:
    results = classifiers.results
    rows, inside = results.facts["rows"], results.columns(DEEP, 0, "cifar10", "cifar10")
    labels = torch.from_numpy(results.arrays["0/cifar10/cifar10/labels"])
    logits = torch.from_numpy(results.arrays["0/cifar10/cifar10/logits"][:3].astype(np.float32))  # the backbones
    probs = logits.softmax(-1).mean(0)
    assert rows[DEEP]["accuracy"][0] == pytest.approx(float((probs.argmax(-1) == labels).double().mean()))
    found: dict[str, list[float]] = {"auroc": [], "aupr": []}
    for name in results.outside("cifar10", "all"):
        scores = torch.cat([inside["msp"], results.columns(DEEP, 0, "cifar10", name)["msp"]])
        is_ood = np.arange(len(scores)) >= len(labels)
        found["auroc"].append(roc_auc_score(is_ood, scores))
        found["aupr"].append(average_precision_score(is_ood, scores))
    assert rows[DEEP]["all.auroc"][0] == pytest.approx(statistics.mean(found["auroc"]), abs=1e-6)
    assert rows[DEEP]["all.aupr"][0] == pytest.approx(statistics.mean(found["aupr"]), abs=2e-2)  # trapezoids there
    for metric in ("nll", "ece", "brier"):
        assert rows[TEMPERATURE][metric] == rows[SINGLE][f"calibrated.{metric}"]
    assert rows[TEMPERATURE]["accuracy"] == rows[SINGLE]["accuracy"]


@pytest.mark.slow
def test_differences_are_those_of_the_paired_bootstrap(classifiers: Finished) -> None:
    results = classifiers.results
    replicates = Replicates(results, resamples=50)
    assert replicates.difference("all.auroc", DEEP, DEEP, ["cifar10"]) == (0.0, 0.0, 0.0)
    one = Results({**results.facts, "seeds": [0]}, results.arrays)
    found = Replicates(one, resamples=50).difference("near.auroc", HYDRA_PAPER, SINGLE, ["cifar10"])

    def scores(method: str) -> tuple[torch.Tensor, torch.Tensor]:
        inside, outside = (results.columns(method, 0, "cifar10", name)["msp"] for name in ("cifar10", "cifar100"))
        return inside, outside

    wanted = bootstrap_ood("auroc", *scores(HYDRA_PAPER), minus=scores(SINGLE), resamples=50, level=LEVEL)
    assert np.allclose(found, [wanted.value, wanted.low, wanted.high])


@pytest.mark.slow
def test_claims_and_contrasts_of_classifiers(classifiers: Finished) -> None:
    facts = classifiers.results.facts
    hydra = [one for one in facts["claims"] if one["first"] in (HYDRA, HYDRA_PAPER)]
    assert len([one for one in hydra if one["setting"] == "chosen"]) == len(hydra) / 2 > 0
    assert all(one["low"] <= one["high"] for one in facts["claims"])
    rows, contrasts = facts["rows"], facts["contrasts"]
    controls = [one["name"] for one in facts["recipe"]["controls"]]
    assert list(contrasts) == [HYDRA, HYDRA_TRUNK, *controls]
    for first, found in contrasts.items():
        assert len(found) == (6 if first == HYDRA else 9)
        for key, (value, low, high) in found.items():
            metric, _, second = key.partition(" − ")
            row = f"chosen.{metric}" if metric.startswith("all.") else metric
            assert value == pytest.approx(np.mean(rows[first][row]) - np.mean(rows[second][row]), abs=1e-5)
            assert low <= high


def test_signs_are_found() -> None:
    assert [verdict(*one) for one in ((0.1, 0.01, 0.03), (0.0, 0.01, 0.03), (0.0, -0.01, 0.03))] == [
        *("reproduced", "not reproduced", "tie")
    ]


# --- the paper ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", SETS)
def test_the_papers_means_are_those_of_its_near_and_far_sets(task: str) -> None:
    """Tables 15 to 17 against Tables 1 and 2: a slip in copying would show."""
    near, far = SETS[task]
    for method, row in paper_numbers("classifier", task).items():
        for metric in ("auroc", "fpr95", "aupr"):
            mean = (near * row[f"near.{metric}"] + far * row[f"far.{metric}"]) / (near + far)
            assert row[f"all.{metric}"] == pytest.approx(mean, abs=2e-4), (method, metric)


def test_zero_shot_rows_of_the_paper_give_their_own_mean() -> None:
    """A row misread from the paper would not; the averages are also those of Table 3."""
    average = paper_numbers("dual", AVERAGE)
    for line in read_csv("zero_shot_tasks"):
        metric, method = line["metric"], line["method"]
        *values, mean = (float(cell) for key, cell in line.items() if key not in ("metric", "method"))
        whole, rounding = (1, 0.0101) if metric in ("brier", "nll") else (100, 0.0151)
        assert np.mean(values) == pytest.approx(mean, abs=rounding), (metric, method)
        assert whole * average[method].get(metric, mean / whole) == pytest.approx(mean, abs=rounding)
    for task in ("ImageNet-1K", "CIFAR-100"):
        for row in paper_numbers("dual", task).values():
            if "near.auroc" in row:
                assert sorted((row["near.auroc"], row["far.auroc"], row["all.auroc"]))[1] == row["all.auroc"]
    assert paper_numbers("dual", "ImageNet-1K")[HYDRA]["all.aupr"] == pytest.approx(0.4785)


# --- tables, command, documents ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_makes_the_same_tables_again(
    classifiers: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.numbers.RESAMPLES", 20)
    results = classifiers.results
    results.save(tmp_path)
    options = [results.name, "--results", str(tmp_path)]
    made = CliRunner().invoke(app, ["remake", *options])
    assert made.exit_code == 0, made.exception
    assert made.stdout.strip() == written(results.facts).strip()
    path = tmp_path / f"{results.name}.json"
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), "claims": []}))
    assert CliRunner().invoke(app, ["remake", *options, "--store"]).exit_code == 0
    assert path.read_text() == whole
    assert HYDRA in CliRunner().invoke(app, ["paper", *options]).stdout
    for table in TABLES.values():
        lines = [line for line in table(results.facts).splitlines() if line.startswith("|")]
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1
    drawn = draw_figures(results, tmp_path / "figures")
    assert [file.suffix for file in drawn] == [".svg"]
    assert all(file.stat().st_size > 5000 for file in drawn)


@pytest.mark.parametrize("damage", ["row", "contrast", "verdict", "missing"])
@pytest.mark.slow
def test_numbers_that_do_not_belong_to_the_columns_are_refused(classifiers: Finished, damage: str) -> None:
    results = classifiers.results
    facts = json.loads(json.dumps(results.facts))
    if damage == "row":
        facts["rows"][HYDRA]["nll"][0] += 0.001
    elif damage == "contrast":
        facts["contrasts"][HYDRA]["accuracy − Single"][0] += 0.001
    elif damage == "verdict":
        facts["claims"][0]["verdict"] = "not testable"
    else:
        del facts["rows"][HYDRA]["nll"]
    made = {key: results.facts[key] for key in ("rows", "claims", "contrasts")}
    require_same(results, made)
    with pytest.raises(DataError, match="come out different"):
        require_same(replace(results, facts=facts), made)


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (["remake", "imagenet"], "imagenet"),
        (["run", CLASSIFIERS[0], "--stages", "dream"], "dream"),
        (["run", CLASSIFIERS[0], "--seeds", "0;1"], "0;1"),
        (["run", CLASSIFIERS[0], "--seeds", "9"], "9"),
        (["run", "zero-shot"], "zero-shot"),
        (["zero-shot", "--suite", "none"], "none"),
        (["zero-shot", "--rows", "best"], "best"),
        (["zero-shot", "--stages", "dream"], "dream"),
        (["paper", "text-sst2", "--results", "nowhere"], "nowhere"),
    ],
)
def test_what_the_command_cannot_do_is_named(arguments: list[str], token: str, tmp_path: Path) -> None:
    if arguments[0] in ("run", "zero-shot"):
        arguments = [*arguments, "--output", str(tmp_path)]
    assert token in str(CliRunner().invoke(app, arguments).exception)
