import math

import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.training.recipe import rate_factor, warmup_updates


def test_warmup_is_linear_and_ends_at_the_peak():
    factors = [rate_factor(step, total=100, warmup=4, schedule="cosine") for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_to_the_floor():
    floor, total, warmup = 1e-5, 120_000, 5_000
    for step in (5_000, 5_001, 60_000, 119_999):
        progress = (step - warmup) / (total - warmup)
        expected = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        factor = rate_factor(step, total=total, warmup=warmup, schedule="cosine", floor=floor)
        assert factor == pytest.approx(expected, rel=1e-12)
    assert rate_factor(62_500, total=total, warmup=warmup, schedule="cosine", floor=floor) == pytest.approx(0.500005)
    assert rate_factor(total, total=total, warmup=warmup, schedule="cosine", floor=floor) == pytest.approx(floor)


def test_linear_falls_to_zero_when_the_budget_is_spent():
    factors = [rate_factor(step, total=10, warmup=0, schedule="linear") for step in (0, 5, 9, 10, 11)]
    assert factors == pytest.approx([1.0, 0.5, 0.1, 0.0, 0.0])


def test_constant_stays_at_the_peak():
    assert rate_factor(99, total=100, warmup=10, schedule="constant", floor=0.5) == 1.0


def test_a_fraction_of_warmup_is_rounded_up():
    assert warmup_updates(0.1, 100) == 10
    assert warmup_updates(0.07, 100) == 7
    assert warmup_updates(0.1, 101) == 11
    assert warmup_updates(500, 100) == 500


def test_a_warmup_that_never_ends_is_refused():
    with pytest.raises(ConfigError, match="warm-up takes 10 updates"):
        rate_factor(0, total=10, warmup=10, schedule="linear")
