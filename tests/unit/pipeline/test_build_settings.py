"""HydraConfig is checked when it is made."""

import json
from typing import Any

import pytest
from build_cases import recipe, text_model, text_sets
from hypothesis import given
from hypothesis import strategies as st

import hydra_ensembles as he
from hydra_ensembles.schema import from_plain, to_plain


def test_a_recipe_for_the_stem_needs_stems_that_may_differ() -> None:
    whole = recipe(train_groups=("stem", "attention", "mlp", "norms", "readout"))
    he.HydraConfig(prune=4, recipe=whole, stem="separate")
    he.HydraConfig(prune=4, recipe=whole, members=1)
    he.HydraConfig(prune=4, recipe=whole, shared_layers=1)  # freezes the stem too
    he.HydraConfig(prune=4, recipe=recipe(train_groups=whole.train_groups, last_blocks=2))
    for preset in ("imagenet", "cifar100-last5", "cifar100-classifier", "sst2"):  # those of the paper fit
        config = he.HydraConfig(prune=4, recipe=he.Recipe.preset(preset))
        assert from_plain(he.HydraConfig, json.loads(json.dumps(to_plain(config))), complete=True) == config


@pytest.mark.parametrize("changes", [{"augment": True}, {"rand_augment": he.data.RandAugment()}])
def test_a_recipe_that_changes_images_is_not_for_texts(changes: Any) -> None:
    config = he.HydraConfig(prune=4, shared_layers=0, strategy="random", recipe=recipe(**changes))
    with pytest.raises(he.errors.ConfigError, match="reads texts"):
        he.build(text_model(), config, **text_sets())


@given(prune=st.integers(1, 200), heads=st.integers(2, 400))
def test_the_usual_pool_has_the_ratio_of_the_paper(prune: int, heads: int) -> None:
    pool = he.HydraConfig(prune=prune, strategy="sampled").pool_size(heads)
    assert pool <= heads
    if pool < heads:
        assert pool > prune
        assert abs(pool - prune * 100 / 48) <= 1.0
