"""Comparison tables, the HTML report, and the page of a head atlas."""

from .columns import CLASSIFICATION, COLUMNS, COST, DIVERSITY, OOD, Column, columns_for, set_columns
from .compare import compare, load_costs, save_costs
from .html import write_atlas, write_report
from .table import Cell, Comparison, Row, to_csv, to_latex, to_markdown, to_rich

__all__ = [
    "CLASSIFICATION", "COLUMNS", "COST", "DIVERSITY", "OOD", "Cell", "Column", "Comparison", "Row", "columns_for",
    "compare", "load_costs", "save_costs", "set_columns", "to_csv", "to_latex", "to_markdown", "to_rich",
    "write_atlas", "write_report",
]  # fmt: skip
