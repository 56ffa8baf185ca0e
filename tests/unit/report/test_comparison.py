"""The comparison table: what is shown, what is marked, what is refused."""

import dataclasses
import statistics

import pytest

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.report.compare import COLUMNS, DIVERSITY, SELECTIVE, Cell, Column, _rank, compare, set_columns
from sample_evaluations import costs, evaluation, methods


def cells(comparison, name):
    row = next(row for row in comparison.rows if row.name == name)
    return {column.key: cell for column, cell in zip(comparison.columns, row.cells, strict=True)}


def test_numbers_are_written_as_the_paper_writes_them():
    runs = methods()
    comparison = compare(runs, costs())
    assert [column.key for column in comparison.columns] == [column.key for column in COLUMNS]
    found = cells(comparison, "Hydra")
    assert found["heads"].text == "3x3"
    assert cells(comparison, "Single")["heads"].text == "5"
    assert found["accuracy"].text == f"{runs[2].id.accuracy * 100:.2f}"
    assert found["ece"].text == f"{runs[2].id.ece:.3f}"
    assert found["near.auroc"].text == f"{runs[2].means['near']['msp'].auroc * 100:.2f}"
    assert found["parameters"].text == "4.00"
    assert found["latency_ratio"].text == "1.25×"


def test_columns_nobody_has_a_number_for_are_left_out():
    comparison = compare([evaluation(ood=False), evaluation("Other", seed=5, ood=False)])
    keys = [column.key for column in comparison.columns]
    assert "near.auroc" not in keys
    assert "latency_ratio" not in keys
    assert "parameters" in keys  # the model knows them itself


def test_other_columns_can_be_asked_for():
    comparison = compare(methods(), columns=(*DIVERSITY, *SELECTIVE, *set_columns(["digits"])))
    found = cells(comparison, "Hydra")
    assert found["all.disagreement"].value > 0
    assert found["risk@0.80"].value == methods()[2].id.risk_at_coverage["0.80"]
    assert found["ood.digits.auroc"].value == methods()[2].ood["digits"].detection["msp"].auroc


def ranks(values, better, digits=2):
    column = Column("x", "X", better=better, digits=digits)
    return [cell.rank for cell in _rank([Cell("" if v is None else f"{v}", v) for v in values], column)]


def test_best_and_second_follow_the_direction():
    assert ranks([1, 3, 2], "higher") == ["", "best", "second"]
    assert ranks([1, 3, 2], "lower") == ["best", "", "second"]
    assert ranks([1, 3, 2], "neither") == ["", "", ""]


def test_numbers_written_alike_share_a_rank():
    assert ranks([0.101, 0.104, 0.2, 0.201, 0.3], "lower", digits=1) == ["best", "best", "second", "second", ""]
    assert ranks([0.5, 0.501], "higher") == ["", ""]  # all alike: nothing to mark
    assert ranks([None, 2.0, 1.0], "higher") == ["", "best", "second"]
    assert ranks([2.0], "higher") == [""]


def test_several_runs_give_mean_and_standard_deviation():
    runs = [evaluation("Hydra", seed=seed) for seed in (1, 2, 3)]
    comparison = compare([evaluation("Single", seed=9), *runs], costs())
    accuracies = [run.id.accuracy for run in runs]
    found = cells(comparison, "Hydra")["accuracy"]
    assert found.value == pytest.approx(statistics.fmean(accuracies))
    assert found.spread == pytest.approx(statistics.stdev(accuracies))
    assert found.text == f"{found.value * 100:.2f} ± {found.spread * 100:.2f}"
    assert cells(comparison, "Single")["accuracy"].spread is None
    assert cells(comparison, "Hydra")["parameters"].spread is None
    assert "Mean ± standard deviation over runs (Single: 1, Hydra: 3)." in comparison.notes
    assert compare({"Single": evaluation("x", seed=9), "Hydra": runs}, costs()) == comparison


def test_notes_say_what_was_measured():
    note = compare(methods()).notes[0]
    assert "own (160 samples)" in note
    assert "near: close; far: textures, digits" in note
    assert "Score: msp; convention: torch-uncertainty" in note


def test_what_does_not_compare_is_refused():
    one, other = evaluation("One"), evaluation("Other", seed=4)
    with pytest.raises(ConfigError, match=r"score 'msp' .* 'energy'"):
        compare([one, dataclasses.replace(other, score="energy")])
    with pytest.raises(ConfigError, match="openood"):
        compare([one, dataclasses.replace(other, convention="openood")])
    with pytest.raises(DataError, match="Other was evaluated on own: 160"):
        compare([one, evaluation("Other", ood=False)])
    allowed = compare([one, evaluation("Other", ood=False)], allow_mismatch=True)
    assert any(note.startswith("Not the same data: Other") for note in allowed.notes)
    with pytest.raises(DataError, match="nothing to compare"):
        compare([])
    with pytest.raises(DataError, match=r"\['Hydra'\]"):
        compare({"Single": one, "Hydra": []})


def test_a_rounded_zero_has_no_sign():
    assert Column("x", "X", digits=2).write(-0.001) == "0.00"
    assert Column("x", "X", digits=2).write(-0.01) == "-0.01"
