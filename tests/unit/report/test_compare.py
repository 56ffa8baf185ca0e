"""The comparison table: what is shown, marked and refused, and how it is written."""

import csv
import dataclasses
import io
import re
import statistics

import pytest
from rich.console import Console

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.report.compare import (
    COLUMNS,
    DIVERSITY,
    SELECTIVE,
    Cell,
    Column,
    _rank,
    compare,
    set_columns,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
)
from sample_evaluations import costs, evaluation, methods


@pytest.fixture(scope="module")
def comparison():
    return compare(methods(), costs())


def cells(comparison, name):
    row = next(row for row in comparison.rows if row.name == name)
    return {column.key: cell for column, cell in zip(comparison.columns, row.cells, strict=True)}


def test_numbers_are_written_as_the_paper_writes_them(comparison):
    runs = methods()
    assert [column.key for column in comparison.columns] == [column.key for column in COLUMNS]
    found = cells(comparison, "Hydra")
    assert found["heads"].text == "3x3"
    assert cells(comparison, "Single")["heads"].text == "5"
    assert found["accuracy"].text == f"{runs[2].id.accuracy * 100:.2f}"
    assert found["ece"].text == f"{runs[2].id.ece:.3f}"
    assert found["near.auroc"].text == f"{runs[2].means['near']['msp'].auroc * 100:.2f}"
    assert found["parameters"].text == "4.00"
    assert found["latency_ratio"].text == "1.25×"
    assert (Column("x", "X").write(-0.001), Column("x", "X").write(-0.01)) == ("0.00", "-0.01")
    for words in ("own (160 samples)", "near: close; far: textures, digits", "Score: msp; convention: torch-unc"):
        assert words in comparison.notes[0]


def test_other_columns_can_be_asked_for():
    comparison = compare(methods(), columns=(*DIVERSITY, *SELECTIVE, *set_columns(["digits"])))
    found = cells(comparison, "Hydra")
    assert found["all.disagreement"].value > 0
    assert found["risk@0.80"].value == methods()[2].id.risk_at_coverage["0.80"]
    assert found["ood.digits.auroc"].value == methods()[2].ood["digits"].detection["msp"].auroc
    keys = [column.key for column in compare([evaluation(ood=False)]).columns]
    assert "parameters" in keys  # the model knows them itself
    assert not {"near.auroc", "latency_ratio"} & set(keys)  # nobody has a number


def ranks(values, better, digits=2):
    column = Column("x", "X", better=better, digits=digits)
    return [cell.rank for cell in _rank([Cell("" if v is None else f"{v}", v) for v in values], column)]


def test_best_and_second_follow_the_direction_and_numbers_written_alike_share_a_rank():
    assert ranks([1, 3, 2], "higher") == ["", "best", "second"]
    assert ranks([1, 3, 2], "lower") == ["best", "", "second"]
    assert ranks([1, 3, 2], "neither") == ["", "", ""]
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
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert rows[0]["accuracy_sd"] == ""
    assert float(rows[1]["accuracy_sd"]) == found.spread


def test_what_does_not_compare_is_refused():
    one, other = evaluation("One"), evaluation("Other", seed=4)
    with pytest.raises(ConfigError, match="energy"):
        compare([one, dataclasses.replace(other, score="energy")])
    with pytest.raises(ConfigError, match="openood"):
        compare([one, dataclasses.replace(other, convention="openood")])
    with pytest.raises(DataError, match="Other"):
        compare([one, evaluation("Other", ood=False)])
    allowed = compare([one, evaluation("Other", ood=False)], allow_mismatch=True)
    assert any(note.startswith("Not the same data: Other") for note in allowed.notes)
    with pytest.raises(DataError, match="no method"):
        compare([])
    with pytest.raises(DataError, match=r"\['Hydra'\]"):
        compare({"Single": one, "Hydra": []})


def test_markdown_has_a_row_a_method_and_marks(comparison):
    lines = to_markdown(comparison).splitlines()
    assert lines[0].startswith("| Method | Heads | Acc ↑ | Brier ↓ |")
    assert "Near-OOD AUROC ↑" in lines[0]
    assert [line.count("|") for line in lines[:5]] == [lines[0].count("|")] * 5
    best = next(row for row in comparison.rows if row.cells[1].rank == "best")
    assert f"| **{best.cells[1].text}** |" in to_markdown(comparison)
    second = next(row for row in comparison.rows if row.cells[1].rank == "second")
    assert f"| <u>{second.cells[1].text}</u> |" in to_markdown(comparison)


@pytest.mark.parametrize(
    ("write", "name", "shown"),
    [
        (to_markdown, "a|b", "| a\\|b |"),
        (to_markdown, "a\nb", "| a b |"),
        (to_markdown, "<img src=x>&", "| &lt;img src=x&gt;&amp; |"),
        (to_markdown, "c\\d", "| c\\\\d |"),
        (to_latex, "50% of_a & b#$", r"50\% of\_a \& b\#\$ &"),
        (to_latex, "{}~^\\", r"\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} &"),
        *((to_csv, name, f"\n'{name},") for name in ("=1+1", "+1", "-1", "@x", "\tx")),
    ],
)
def test_names_are_shown_as_they_are(write, name, shown):
    assert shown in write(compare([evaluation(name, ood=False, shift=False)]))


def test_latex_is_booktabs_with_spanned_headings(comparison):
    text = to_latex(comparison)
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr){8-10}"):
        assert rule in text
    assert r"\multicolumn{3}{c}{Near-OOD}" in text
    assert r"\textbf{" in text
    assert r"\underline{" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and not line.startswith(" ")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(comparison.columns)}


def test_csv_holds_full_precision(comparison):
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [row["method"] for row in rows] == ["Single", "Deep Ensemble", "Hydra"]
    assert float(rows[2]["accuracy"]) == methods()[2].id.accuracy
    assert float(rows[2]["latency_ratio"]) == 1.25
    assert rows[2]["heads"] == "3x3"
    assert "accuracy_sd" not in rows[0]


def printed(comparison, width):
    console = Console(width=width, force_terminal=False, file=io.StringIO())
    console.print(to_rich(comparison, "Results"))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 100, 240])
def test_the_terminal_table_never_cuts_a_number(comparison, width):
    text = printed(comparison, width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    for row in comparison.rows:
        assert all(cell.text in text for cell in row.cells)
    assert text.count("Method") == {60: 5, 100: 3, 240: 1}[width]


def test_the_terminal_table_marks_with_styles_and_reads_no_markup_in_names():
    console = Console(width=240, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(to_rich(compare([*methods()[:2], evaluation("[red]a[/red]", seed=4)])))
    for words in ("\x1b[1;32m", "\x1b[4m", "[red]a[/red]"):  # bold and green, underlined
        assert words in console.file.getvalue()
