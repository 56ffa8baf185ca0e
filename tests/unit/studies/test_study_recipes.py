"""The recipe of the zero-shot study: what it says, what it refuses, what tiny makes of it."""

from dataclasses import replace
from typing import Any

import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.heads.ranking import Head, HeadRanking
from studies.dual_recipe import load_dual_recipe
from studies.dual_seed import distinct
from studies.dual_study import ROWS, rows_of


def test_a_given_model_has_no_rows_that_learn() -> None:
    own = load_dual_recipe(suite="paper", model="folder", tiny=True)
    assert (own.model, own.counts.classes, own.trains_text) == ("folder", 6, False)
    tuned = [name for name in ROWS if name not in rows_of(own)]
    assert {name for name in tuned if "text fine-tuned" not in name} == {"BayesVLM", "ViLU"}
    assert len(tuned) == 4


def test_circuits_that_agree_part_at_their_last_head() -> None:
    def ranking(*heads: int) -> HeadRanking:
        return HeadRanking(tuple(Head(0, head) for head in heads), (0.5,) * len(heads), "circuit/exact", "avg")

    chosen = distinct([ranking(0, 1, 2, 3), ranking(1, 0, 2, 3), ranking(1, 0, 2, 3)], 2)
    assert [[head.head for head in one] for one in chosen] == [[0, 1], [1, 2], [1, 3]]
    with pytest.raises(ConfigError, match="same 2 heads"):
        distinct([ranking(0, 1), ranking(1, 0)], 2)


@pytest.mark.parametrize(("changes", "token"), [({"prune": 0}, "prune"), ({"dual": None}, "dual")])
def test_recipes_check_themselves(changes: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        replace(load_dual_recipe(tiny=True), **changes)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_dual_recipe(suite="nowhere")
