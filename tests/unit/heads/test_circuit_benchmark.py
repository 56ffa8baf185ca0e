"""Rows of the circuit benchmark that an earlier run left in the file."""

import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from circuit import merged  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def report(hardware: str, *rows: tuple[str, str, float]) -> dict[str, Any]:
    results = [{"case": case, "score": score, "seconds": seconds} for case, score, seconds in rows]
    return {"hardware": hardware, "results": results}


def test_rows_of_other_scores_stay_and_come_in_order() -> None:
    earlier = report("gpu", ("a", "acc", 9.0), ("a", "avg", 3.0), ("b", "ood", 5.0))
    both = merged(earlier, report("gpu", ("a", "ood", 2.0), ("a", "acc", 1.0)))
    assert both == report("gpu", ("a", "acc", 1.0), ("a", "ood", 2.0), ("a", "avg", 3.0), ("b", "ood", 5.0))


def test_rows_of_another_machine_or_format_go() -> None:
    new = report("gpu", ("a", "acc", 1.0))
    assert merged(report("cpu", ("a", "avg", 3.0)), new) == new
    assert merged({"results": []}, new) == new
