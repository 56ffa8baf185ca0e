"""Rows of the zero-shot study that others propose, on a small dual encoder: each answers for any class names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_studies import dual_recipe, dual_seed

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.metrics import nll
from studies import dual_rows
from studies.dual_rows import BAYES_VLM, NEG_LABEL, PSEUDO_COUNTS, ROWS, VILU, for_classes, main_images, vocabulary
from studies.dual_seed import DualSeed
from studies.samples import SampleBatches


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> DualSeed:
    return dual_seed(tmp_path_factory.mktemp("rows"), dual_recipe(choices=dual_recipe().choices[:1]))


def images_of(seed: DualSeed) -> Any:
    return next(iter(SampleBatches(seed.task.held_out.samples, 8)))[0]


def test_bayes_vlm_has_the_pseudo_count_that_held_out_images_choose(seed: DualSeed) -> None:
    held = seed.task.held_out
    said = ROWS[BAYES_VLM].asked(seed, held)
    choice = json.loads((seed.folder / "choices" / "bayesvlm.json").read_text())
    assert [one["pseudo_count"] for one in choice["measured"]] == list(PSEUDO_COUNTS)
    losses = {one["pseudo_count"]: one["nll"] for one in choice["measured"]}
    assert len(set(losses.values())) == 3
    assert choice["setting"]["pseudo_count"] == min(losses, key=losses.__getitem__)
    assert float(nll(said.probs, held.samples.labels)) == pytest.approx(min(losses.values()))
    assert not torch.allclose(said.probs, he.zero_shot(seed.dual, held.classes).predict(images_of(seed)).probs[:1])
    assert ROWS[BAYES_VLM].whole(seed, held.classes[:3]).num_classes == 3


def test_vilu_is_single_with_a_score_that_goes_with_any_classes(
    seed: DualSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_rows, "EPOCHS", 2)
    names, inputs = main_images(seed).names, images_of(seed)
    trained = dual_rows._trained_vilu(seed)
    same = for_classes(trained, he.zero_shot(seed.dual, names)).predict(inputs)
    expected = trained.predict(inputs)
    torch.testing.assert_close(same.score("vilu"), expected.score("vilu"))
    reversed_names = for_classes(trained, he.zero_shot(seed.dual, names[::-1])).predict(inputs)
    torch.testing.assert_close(reversed_names.score("vilu"), expected.score("vilu"))  # whatever their order
    few = ROWS[VILU].whole(seed, names[:3]).predict(inputs)
    torch.testing.assert_close(few.member_logits, he.zero_shot(seed.dual, names[:3]).predict(inputs).member_logits)
    assert not torch.allclose(few.score("vilu"), expected.score("vilu"))
    assert (seed.folder / "models" / "vilu").exists()
    assert f"chosen of {len(dual_rows.RATES)}" in trained.metadata.history[-1]


def test_neg_label_takes_whole_words_of_the_vocabulary(seed: DualSeed) -> None:
    words = vocabulary(seed.dual)
    assert len(words) > 5
    assert all(word.isalpha() and len(word) > 2 for word in words)
    said = ROWS[NEG_LABEL].whole(seed, ("boat", "house")).predict(images_of(seed))
    expected = baselines.neg_label(
        he.zero_shot(seed.dual, ("boat", "house")), words, settings=baselines.NegLabel(groups=1)
    )
    torch.testing.assert_close(said.score("neglabel"), expected.predict(images_of(seed)).score("neglabel"))


def test_vilu_without_images_of_the_main_task_is_refused(tmp_path: Path) -> None:
    recipe = dual_recipe()
    others = tuple(one for one in recipe.pairs if "tinyimagenet" not in one.source)
    with pytest.raises(ConfigError, match="tinyimagenet"):
        main_images(dual_seed(tmp_path, replace(recipe, pairs=others)))
