"""Comparison tables and reports of evaluations: `he.compare`, `he.write_report`."""
