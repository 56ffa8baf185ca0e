"""Comparison tables and reports of evaluations."""

from .compare import (
    CLASSIFICATION,
    COLUMNS,
    COST,
    OOD,
    columns_for,
    compare,
    load_costs,
    save_costs,
    set_columns,
)
from .html import write_report
from .table import Cell, Column, Comparison, Row, to_csv, to_markdown, to_rich

__all__ = [
    "CLASSIFICATION", "COLUMNS", "COST", "OOD", "Cell", "Column", "Comparison", "Row", "columns_for",
    "compare", "load_costs", "save_costs", "set_columns", "to_csv", "to_markdown", "to_rich", "write_report",
]  # fmt: skip
