"""How a search chooses from given rows: price, numbers, ties, fronts, files, table, figure."""

import pytest

from hydra_ensembles.pipeline.search_result import YOURS, SearchResult, SearchRow, dominates
from hydra_ensembles.report.table import to_markdown

SCORES = ("all.auroc", "mahalanobis:all.auroc")


def row(
    name: str, price: float, nll: float, aurc: float = 0.1, msp: float = 0.8, far: float = 0.9, right: float = 0.75
) -> SearchRow:
    numbers = {"accuracy": right, "nll": nll, "aurc": aurc, SCORES[0]: msp, SCORES[1]: far}
    return SearchRow(name, price, "judged", numbers=numbers)


def result(*rows: SearchRow, cost: float = 1.3, tolerance: float = 0.0) -> SearchResult:
    samples = {"ID": 100, "OOD": 50}
    return SearchResult((row(YOURS, 1.0, 0.9), *rows), cost, "latency", SCORES, samples).decided(tolerance)


@pytest.mark.parametrize(
    ("rows", "settings", "choice"),
    [
        ([row("better", 1.2, 0.8), row("best", 1.3, 0.7)], {}, "best"),
        ([row("too dear", 1.31, 0.1), row("better", 1.2, 0.8)], {}, "better"),
        ([row("worse NLL", 1.0, 0.91)], {"tolerance": 0.5}, YOURS),  # tolerance does not apply to the NLL
        ([row("less accurate", 1.2, 0.8, right=0.74)], {}, YOURS),
        ([row("worse AURC", 1.2, 0.8, aurc=0.11)], {}, YOURS),
        ([row("worse msp", 1.2, 0.8, msp=0.79)], {}, YOURS),
        ([row("worse distance", 1.2, 0.8, far=0.89)], {}, YOURS),
        ([row("worse distance", 1.2, 0.8, far=0.89)], {"tolerance": 0.02}, "worse distance"),
        ([row("dear", 1.3, 0.8), row("cheap", 1.1, 0.8)], {}, "cheap"),
        ([row("equal", 1.0, 0.9)], {}, YOURS),
    ],
)
def test_the_choice_is_the_lowest_nll_within_the_price_that_is_nowhere_worse(rows, settings, choice) -> None:
    found = result(*rows, **settings)
    assert found.choice == choice
    assert ("none of the" in found.why) == (choice == YOURS)


def test_the_fronts_have_who_is_not_beaten_at_their_price() -> None:
    rows = [row("a", 1.1, 0.8, msp=0.7), row("b", 1.1, 0.85), row("c", 1.2, 0.8), row("d", 2.0, 0.5)]
    rows.append(row("e", 1.5, 0.95, msp=0.99, far=0.99))
    found = result(*rows)
    assert found.front == {"nll": (YOURS, "a", "d"), "auroc": (YOURS, "e")}
    pairs = ((1, 1), (2, 2)), ((1, 2), (2, 2)), ((1, 3), (2, 2)), ((2, 2), (2, 2))
    assert [dominates(*pair) for pair in pairs] == [True, True, False, False]  # one number may be equal


def test_the_table_has_all_rows_and_says_what_became_of_those_without_numbers() -> None:
    found = result(
        row("better", 1.2, 0.8), SearchRow("dear", 4.0, "too dear"), SearchRow("x", 1.0, "stopped early", note="why")
    )
    text = to_markdown(found.table())
    assert "| → better | <u>1.20×</u> | 75.0 | **0.800** |" in text
    assert "| dear | 4.00× | – |" in text
    assert "x: stopped early (why)." in text
    assert found.why in text
    assert found.figure().startswith("<svg ")
    plan = SearchResult(found.rows[3:], 1.3, "multiply_adds", SCORES, {})
    assert [column.title for column in plan.table().columns] == ["MAdds"]  # nothing else is known yet
