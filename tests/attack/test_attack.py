"""The attack counts what happens, and a few cases of each part end as they may; `make attack` runs them all."""

import pytest

from attack import counting
from attack.__main__ import PARTS
from hydra_ensembles.errors import ConfigError

FEW = {"files": 60, "inputs": 60, "altered_models": 20, "kills": 9, "threads": 2}


def test_every_end_is_counted_once() -> None:
    def behave(case: str) -> str:
        if case == "refused":
            raise ConfigError("no")
        if case == "raw":
            raise KeyError("x")
        return case

    row = counting.count("all ends", behave, ["refused", "raw", "same", "other", "same"])
    assert (row.cases, row.refused, row.raw, row.same, row.other, row.failures) == (5, 1, 1, 2, 1, 2)
    assert [text.split(":")[0] for text in row.examples] == ["raw", "other"]


@pytest.mark.ci
@pytest.mark.parametrize("part", PARTS)
def test_a_few_cases_of_each_part(part: str) -> None:
    rows = PARTS[part].run(FEW[part], seed=1)
    assert sum(row.cases for row in rows)
    assert not [example for row in rows for example in row.examples]
