"""HydraConfig is checked when it is made."""

import json
from typing import Any

import pytest
from build_cases import recipe
from hypothesis import given
from hypothesis import strategies as st

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.schema import from_plain, to_plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": 0}, "prune must be a whole number of at least 1, got 0"),
        ({"prune": 1.5}, r"prune must be a whole number of at least 1, got 1\.5"),
        ({"prune": True}, "prune must be a whole number of at least 1, got True"),
        ({"members": 0}, "members must be a whole number of at least 1"),
        ({"members": "3"}, "members must be a whole number of at least 1, got '3'"),
        ({"pool": 4}, "pool is 4 and prune 4: every draw would be the same"),
        ({"pool": 2.5}, "pool must be a whole number"),
        ({"calibration_batches": 0}, "calibration_batches must be a whole number of at least 1"),
        ({"shared_layers": -1}, "shared_layers must be a whole number of at least 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"strategy": "best"}, r"strategy must be one of \['circuit', 'taylor', 'sampled', 'random'\], got 'best'"),
        ({"strategy": ["circuit"]}, "strategy must be one of"),
        ({"method": "fast"}, r"method must be one of \['naive', 'exact', 'screened'\]"),
        ({"taylor_scope": "all"}, r"taylor_scope must be one of \['layer', 'global'\]"),
        ({"stem": "own"}, r"stem must be one of \['shared', 'mean', 'separate'\]"),
        ({"mlp": "shared"}, r"mlp must be one of \['mean', 'separate'\]"),
        ({"norms": None}, r"norms must be one of \['mean', 'separate'\]"),
        ({"readout": "sum"}, r"readout must be one of \['mean', 'separate'\]"),
        ({"calibrate": "yes"}, "calibrate must be True or False, got 'yes'"),
        ({"per_member_temperature": 1}, "per_member_temperature must be True or False, got 1"),
        ({"accepted_share": 0.0}, "accepted_share must be a number above 0 and at most 1"),
        ({"accepted_share": float("nan")}, "accepted_share must be a number above 0 and at most 1, got nan"),
        ({"accepted_share": "95%"}, "accepted_share must be a number"),
        ({"recipe": "sst2"}, r"recipe must be a Recipe, such as Recipe.preset\('sst2'\), got str"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"HydraConfig\.{message}"):
        he.HydraConfig(**{"prune": 4, **settings})


def test_a_recipe_for_the_stem_needs_stems_that_may_differ() -> None:
    whole = recipe(train_groups=("stem", "attention", "mlp", "norms", "readout"))
    with pytest.raises(ConfigError, match=r'leave "stem" out of Recipe\.train_groups'):
        he.HydraConfig(prune=4, recipe=whole)
    he.HydraConfig(prune=4, recipe=whole, stem="separate")
    he.HydraConfig(prune=4, recipe=whole, members=1)
    he.HydraConfig(prune=4, recipe=whole, shared_layers=1)  # freezes the stem too
    he.HydraConfig(prune=4, recipe=recipe(train_groups=whole.train_groups, last_blocks=2))


@pytest.mark.parametrize("preset", ["imagenet", "cifar100-last5", "cifar100-classifier", "sst2"])
def test_the_recipes_of_the_paper_fit(preset: str) -> None:
    config = he.HydraConfig(prune=4, recipe=he.Recipe.preset(preset))
    assert from_plain(he.HydraConfig, json.loads(json.dumps(to_plain(config))), complete=True) == config


@given(prune=st.integers(1, 200), heads=st.integers(2, 400))
def test_the_usual_pool_has_the_ratio_of_the_paper(prune: int, heads: int) -> None:
    pool = he.HydraConfig(prune=prune, strategy="sampled").pool_size(heads)
    assert pool <= heads
    if pool < heads:
        assert pool > prune
        assert abs(pool - prune * 100 / 48) <= 1.0


def test_a_pool_larger_than_the_model_is_refused() -> None:
    config = he.HydraConfig(prune=4, pool=13)
    assert config.pool_size(13) == 13
    with pytest.raises(ConfigError, match="pool is 13, but only 12 heads can be pruned"):
        config.pool_size(12)


@pytest.mark.parametrize(
    ("strategy", "members", "draws"),
    [("circuit", 3, False), ("circuit", 4, True), ("sampled", 1, True), ("taylor", 5, False), ("random", 5, False)],
)
def test_who_draws_from_a_pool(strategy: Any, members: int, draws: bool) -> None:
    assert he.HydraConfig(prune=4, strategy=strategy, members=members).draws_from_pool == draws
