"""A comparison as Markdown, LaTeX, CSV and a terminal table."""

import csv
import io
import re

import pytest
from rich.console import Console

from hydra_ensembles.report.compare import compare, to_csv, to_latex, to_markdown, to_rich
from sample_evaluations import costs, evaluation, methods


@pytest.fixture(scope="module")
def comparison():
    return compare(methods(), costs())


def test_markdown_has_a_row_a_method_and_marks(comparison):
    lines = to_markdown(comparison).splitlines()
    assert lines[0].startswith("| Method | Heads | Acc ↑ | Brier ↓ |")
    assert "Near-OOD AUROC ↑" in lines[0]
    assert [line.count("|") for line in lines[:5]] == [lines[0].count("|")] * 5
    best = next(row for row in comparison.rows if row.cells[1].rank == "best")
    assert f"| **{best.cells[1].text}** |" in to_markdown(comparison)
    second = next(row for row in comparison.rows if row.cells[1].rank == "second")
    assert f"| <u>{second.cells[1].text}</u> |" in to_markdown(comparison)


def test_markdown_survives_a_name_with_bars():
    text = to_markdown(compare([evaluation("a|b"), evaluation("c", seed=4)]))
    assert "| a\\|b |" in text


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


def test_latex_escapes_what_latex_would_eat():
    text = to_latex(compare([evaluation("50% of_a & b#{}~^$\\"), evaluation("c", seed=4)]))
    expected = r"50\% of\_a \& b\#\{\}\textasciitilde{}\textasciicircum{}\$\textbackslash{}"
    assert expected in text


def test_csv_holds_full_precision(comparison):
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [row["method"] for row in rows] == ["Single", "Deep Ensemble", "Hydra"]
    assert float(rows[2]["accuracy"]) == methods()[2].id.accuracy
    assert float(rows[2]["latency_ratio"]) == 1.25
    assert rows[2]["heads"] == "3x3"
    assert "accuracy_sd" not in rows[0]


def test_csv_has_deviations_where_there_are_several_runs():
    runs = [evaluation("Hydra", seed=seed) for seed in (1, 2)]
    rows = list(csv.DictReader(io.StringIO(to_csv(compare([evaluation("Single", seed=7), *runs])))))
    assert rows[0]["accuracy_sd"] == ""
    assert float(rows[1]["accuracy_sd"]) > 0


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


def test_the_terminal_table_marks_with_styles(comparison):
    console = Console(width=240, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(to_rich(comparison))
    assert "\x1b[1;32m" in console.file.getvalue()  # bold and green
    assert "\x1b[4m" in console.file.getvalue()  # underlined


def test_a_name_is_not_read_as_markup():
    text = printed(compare([evaluation("[red]a[/red]"), evaluation("c", seed=4)]), 240)
    assert "[red]a[/red]" in text
