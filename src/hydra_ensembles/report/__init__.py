"""Comparison tables and the HTML report."""

from .columns import CLASSIFICATION, COLUMNS, COST, DIVERSITY, OOD, SELECTIVE, Column, set_columns
from .comparison import Cell, Comparison, Row, compare, group_runs
from .cost_file import load_costs, save_costs
from .formats import to_csv, to_latex, to_markdown, to_rich
from .html import render_report, write_report

__all__ = [
    "CLASSIFICATION",
    "COLUMNS",
    "COST",
    "DIVERSITY",
    "OOD",
    "SELECTIVE",
    "Cell",
    "Column",
    "Comparison",
    "Row",
    "compare",
    "group_runs",
    "load_costs",
    "render_report",
    "save_costs",
    "set_columns",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
    "write_report",
]
