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
    ("name", "values"),
    {
        "prune": [0, 1.5, True],
        "members": [0, "3"],
        "pool": [4, 2.5],  # 4 heads are pruned
        "calibration_batches": [0],
        "shared_layers": [-1],
        "seed": [-1, 2**63],
        "strategy": ["best", ["circuit"]],
        "method": ["fast"],
        "ties": ["first"],
        "max_accuracy_loss": [-0.1, 1.5, float("nan"), "2%"],
        "taylor_scope": ["all"],
        "stem": ["own"],
        "mlp": ["shared"],
        "norms": [None],
        "readout": ["sum"],
        "calibrate": ["yes"],
        "per_member_temperature": [1],
        "accepted_share": [0.0, float("nan"), "95%"],
        "recipe": ["sst2"],
    }.items(),
)
def test_a_setting_that_cannot_work_is_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"HydraConfig\.{name}"):
            he.HydraConfig(**{"prune": 4, name: value})


def test_a_recipe_for_the_stem_needs_stems_that_may_differ() -> None:
    whole = recipe(train_groups=("stem", "attention", "mlp", "norms", "readout"))
    with pytest.raises(ConfigError, match="stem"):
        he.HydraConfig(prune=4, recipe=whole)
    he.HydraConfig(prune=4, recipe=whole, stem="separate")
    he.HydraConfig(prune=4, recipe=whole, members=1)
    he.HydraConfig(prune=4, recipe=whole, shared_layers=1)  # freezes the stem too
    he.HydraConfig(prune=4, recipe=recipe(train_groups=whole.train_groups, last_blocks=2))
    for preset in ("imagenet", "cifar100-last5", "cifar100-classifier", "sst2"):  # those of the paper fit
        config = he.HydraConfig(prune=4, recipe=he.Recipe.preset(preset))
        assert from_plain(he.HydraConfig, json.loads(json.dumps(to_plain(config))), complete=True) == config


@given(prune=st.integers(1, 200), heads=st.integers(2, 400))
def test_the_usual_pool_has_the_ratio_of_the_paper(prune: int, heads: int) -> None:
    pool = he.HydraConfig(prune=prune, strategy="sampled").pool_size(heads)
    assert pool <= heads
    if pool < heads:
        assert pool > prune
        assert abs(pool - prune * 100 / 48) <= 1.0
