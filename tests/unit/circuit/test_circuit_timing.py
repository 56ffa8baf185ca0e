"""The expected duration, from which the method is chosen; no test depends on seconds."""

import pytest

from circuit_models import random_problem, searches
from hydra_ensembles.circuit.timing import seconds_of


def test_more_work_takes_longer() -> None:
    naive, _, heads = searches(random_problem(), "avg")

    def work(candidates: list, steps: int) -> dict[str, float]:
        found = seconds_of([(naive.model, naive.samples)], candidates, steps, naive.objective, speed=1e9)
        return {method: seconds / found["naive"] for method, seconds in found.items()}

    usual, upper = work(heads, 4), work([head for head in heads if head.layer == 2], 4)
    assert 0 < usual["screened"] < usual["exact"] < usual["naive"] == 1
    assert upper["exact"] == pytest.approx(usual["exact"] / 2)  # one third of the blocks instead of two
