"""Bad inputs, settings and data, all that must be refused; samples of every part of `make attack`."""

import warnings
from typing import Any

import pytest

from attack import altered_models, bad_commands, bad_data, bad_inputs, bad_settings, disk, kills, threads, writers
from attack.counting import Row, outcome_of
from attack.expected import drawn


def tried(part: Any, cases: list[Any]) -> Row:
    """Run cases of a table in this process; none may fail."""
    with warnings.catch_warnings(action="ignore"):
        row = Row.of(part.__name__, [(case, *outcome_of(part.check, case)) for case in cases])
    assert not row.failures, row.examples
    return row


QUICK = ("calibrate", "taylor")  # functions that read batches quickly
REFUSED = {
    bad_inputs: bad_inputs.must_refuse,
    bad_settings: bad_settings.must_refuse,
    bad_data: lambda case: case[1] in QUICK and bad_data.must_refuse(case),
}


@pytest.mark.parametrize(
    ("part", "least", "rest"), [(bad_inputs, 300, 15), (bad_settings, 10_000, 800), (bad_data, 80, 15)]
)
def test_all_that_must_be_refused_is_and_some_of_the_rest_is_answered_rightly(part: Any, least: int, rest: int) -> None:
    """Every wrong input, setting and set of batches, so that tests of single functions need not repeat them."""
    must = [case for case in part.all_cases() if REFUSED[part](case)]
    assert tried(part, must).refused == len(must) > least
    tried(part, drawn(sorted(set(part.all_cases()) - set(must)), rest, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [bad_inputs, bad_data, bad_settings, bad_commands, altered_models, kills, writers, threads, disk],
    ids=lambda part: part.__name__,
)
def test_a_part_of_the_attack_finds_nothing(part: Any) -> None:
    rows = part.run(max(1, part.CASES // 5), seed=1)
    assert not [example for row in rows for example in row.examples]
