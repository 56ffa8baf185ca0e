"""The comparison table: what is shown, marked and refused, and its formats."""

import csv
import io
import statistics
from dataclasses import replace

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.report.compare import (
    CLASSIFICATION,
    COST,
    Cell,
    Column,
    compare,
    load_costs,
    marked,
    save_costs,
    to_csv,
    to_markdown,
)
from random_ensembles import noisy, small
from sample_evaluations import cells, costs, evaluation, methods


@pytest.fixture(scope="module")
def comparison():
    return compare(methods(), costs())


def test_numbers_are_written_as_the_paper_writes_them_and_others_where_they_are_asked_for(comparison):
    hydra, found = methods()[2], cells(comparison, "Hydra")
    keys = [column.key for column in comparison.columns]
    assert (keys[:2], keys[-1]) == (["heads", "accuracy"], "latency_ratio")
    assert "asked" not in keys  # which only a cascade has
    assert found["accuracy"].text == f"{hydra.numbers()['accuracy'] * 100:.2f}"
    assert found["ece"].text == f"{hydra.numbers()['ece']:.3f}"
    assert found["shift.accuracy"].value == hydra.numbers()["shift.fog.accuracy"]
    assert found["near.auroc"].text == f"{hydra.numbers()['near.auroc'] * 100:.2f}"
    assert [found[key].text for key in ("heads", "parameters", "latency_ratio")] == ["3x3", "4.00", "1.25×"]
    assert cells(comparison, "Single")["heads"].text == "5"
    assert [COST[1].write(count) for count in (4_021_152, 17_600_000_000, 0)] == ["0.004", "17.60", "0.00"]
    for words in ("own (160 samples)", "near: close; far: textures, digits", "Score: msp; convention: torch-unc"):
        assert words in comparison.notes[0]
    keys = [column.key for column in compare([evaluation(ood=False, shift=False)]).columns]
    assert "parameters" in keys  # known from the model
    assert not {"near.auroc", "latency_ratio", "shift.accuracy"} & set(keys)  # no method has them


@pytest.mark.parametrize(
    ("values", "better", "digits", "expected"),
    [
        ([1, 3, 2], "higher", 2, [0, 1, 0]),
        ([1, 3, 2], "neither", 2, [0, 0, 0]),
        ([0.101, 0.104, 0.2, 0.201, 0.3], "lower", 1, [1, 1, 0, 0, 0]),
        ([None, 2.0, 1.0], "higher", 2, [0, 1, 0]),
    ],
)
def test_numbers_written_alike_are_marked_alike(values, better, digits, expected):
    column = Column("x", "X", better=better, digits=digits)
    assert [cell.best for cell in marked([Cell(f"{value}", value) for value in values], column)] == expected


def test_several_runs_give_mean_and_standard_deviation():
    runs = [evaluation("Hydra", seed=seed) for seed in (1, 2, 3)]
    comparison = compare([evaluation("Single", seed=9), *runs], costs())
    accuracies = [run.numbers()["accuracy"] for run in runs]
    found = cells(comparison, "Hydra")["accuracy"]
    assert (found.value, found.spread) == pytest.approx((statistics.fmean(accuracies), statistics.stdev(accuracies)))
    assert found.text == f"{found.value * 100:.2f} ± {found.spread * 100:.2f}"
    assert cells(comparison, "Single")["accuracy"].spread is cells(comparison, "Hydra")["parameters"].spread is None
    assert "Mean ± standard deviation over runs (Single: 1, Hydra: 3)." in comparison.notes
    assert compare({"Single": evaluation("x", seed=9), "Hydra": runs}, costs()) == comparison
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [row["accuracy_sd"] for row in rows] == ["", str(found.spread)]


def test_other_samples_in_sets_of_one_name_and_size_are_told():
    """Different labels are refused; different inputs are noted, since models may need other image sizes."""
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 4
    foreign = {"near": {"close": [(torch.randn(9, 6, generator=generator),)]}}
    weights = torch.randn(6, 4, generator=generator)

    def found(name, pixels, labels, ood=foreign):
        return he.evaluate(lambda inputs: inputs @ weights, [(pixels, labels)], ood, name=name, progress=False)

    def told(*evaluations, **settings):
        return list(compare(evaluations, **settings).notes[1:])  # the first note describes the sets

    one, order = found("One", pixels, labels), torch.randperm(40, generator=generator)
    assert told(one, found("Same", pixels[order], labels[order])) == []
    assert told(one, found("Numbered otherwise", pixels, 3 - labels)) == []
    other = found("Other", pixels, labels.clamp(max=2))
    with pytest.raises(DataError, match="labels of id differ between Other"):
        compare([one, other])
    (note,) = told(one, found("New", pixels + 1, labels))
    assert note.startswith("New was given other inputs than One in id: other samples, or")
    (note,) = told(one, found("New", pixels, labels, {"near": {"close": [(2 * pixels[:9],)]}}))
    assert "in ood.close:" in note


def test_calibrated_and_uncalibrated_methods_are_named():
    def said(evaluations):
        return " ".join(note for note in compare(evaluations).notes if "alibrated" in note)

    one, other = evaluation("One"), evaluation("Other", seed=2)
    warm = replace(other, model=replace(other.model, calibration=Calibration(temperature=1.3, threshold=0.5)))
    assert said([one, other]) == said([warm]) == ""
    assert "Calibrated: Other; not: One." in said([one, warm])
    for second, wanted in ((other, {"accuracy", "brier", "nll", "ece", "aece"}), (warm, {"accuracy"})):
        table = compare([one, second], columns=CLASSIFICATION)
        pairs = zip(table.columns, *table.rows.values(), strict=True)
        assert {column.key for column, *found in pairs if any(cell.best for cell in found)} == wanted
    assert "in part: Some" in said({"Some": [one, replace(warm, name="One")], "Other": warm})


def test_markdown_and_csv(comparison, tmp_path):
    markdown = to_markdown(comparison).splitlines()
    assert markdown[0].split() == [
        "|",
        "Method",
        "|",
        "Single",
        "|",
        "Deep",
        "Ensemble",
        "|",
        "Hydra",
        "|",
    ]  # on its side
    assert len({len(line) for line in markdown[: len(comparison.columns) + 2]}) == 1
    (accuracies,) = (line for line in markdown if line.startswith("| Acc"))
    for row in comparison.rows.values():
        assert (f"**{row[1].text}**" if row[1].best else f" {row[1].text} ") in accuracies
    upright = to_markdown(compare(methods(), columns=CLASSIFICATION[:2])).splitlines()
    assert upright[0].split() == ["|", "Method", "|", "Acc", "↑", "|", "Brier", "↓", "|"]
    table = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    hydra = {"method": "Hydra", "accuracy": str(methods()[2].numbers()["accuracy"]), "heads": "3x3"}
    assert hydra.items() <= table[2].items()
    assert "accuracy_sd" not in table[0]
    named = compare([replace(evaluation(ood=False, shift=False), name="-3|a\nb")])
    assert r" -3\|a b |" in to_markdown(named)
    assert next(csv.DictReader(io.StringIO(to_csv(named))))["method"] == "-3|a\nb"  # data are written as they are
    save_costs(tmp_path / "costs.json", costs())
    assert list(load_costs(tmp_path / "costs.json")) == costs()


def image_batches(sizes, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(size, 3, 8, 8, generator=draw), torch.arange(size) % 3) for size in sizes]


OOD = {"near": {"close": image_batches((11,), seed=5)}, "far": {"noise": image_batches((9,), seed=6, scale=40.0)}}
DATA = image_batches((30, 30), seed=1)


@pytest.fixture(scope="module")
def known() -> he.Ensemble:
    """An ensemble with two thresholds."""
    fitted = he.fit_familiarity(noisy(small()), image_batches((60, 60), seed=2), "knn")
    return he.calibrate(fitted, image_batches((60,), seed=3), share=0.8)


@pytest.fixture(scope="module")
def found(known) -> Evaluation:
    return he.evaluate(known, DATA, OOD, name="Known", progress=False)


@pytest.fixture(scope="module")
def plain() -> Evaluation:
    return he.evaluate(noisy(small()), DATA, OOD, name="Plain", progress=False)


def test_what_is_fitted_and_what_is_declined_is_shown_unasked(known, found, plain):
    p = known.predict(OOD["far"]["noise"][0][0])
    inside = known.predict(torch.cat([inputs for inputs, _ in DATA])).score("knn")
    by_distance = he.metrics.auroc(inside, p.score("knn"))
    shown = cells(compare([plain, found]), "Known")
    assert shown["knn:far.auroc"].value == pytest.approx(by_distance, abs=1e-6)
    assert shown["far.abstained"].value == pytest.approx((~p.accept).double().mean().item(), abs=1e-6)
    assert shown["selective.accepted"].value == found.numbers()["selective.accepted"]
    mean = (found.numbers()["ood.close.abstained"] + found.numbers()["ood.noise.abstained"]) / 2
    assert shown["all.abstained"].value == pytest.approx(mean)
    other = cells(compare([plain, found]), "Plain")
    assert {other[key].text for key in shown if key.startswith("knn:") or key.endswith("abstained")} == {"–"}
