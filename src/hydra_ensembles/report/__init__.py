"""Comparison tables and reports of evaluations."""

from .compare import Cell, Column, Comparison, columns_for, compare, load_costs, save_costs, to_csv, to_markdown
from .html import write_report

__all__ = [
    "Cell", "Column", "Comparison", "columns_for", "compare", "load_costs", "save_costs", "to_csv", "to_markdown",
    "write_report",
]  # fmt: skip
