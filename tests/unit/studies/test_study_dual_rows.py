"""Rows of the zero-shot study from other papers, on a small dual encoder: each works for any class names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_studies import dual_recipe, dual_seed
from torch.nn import functional as F

import hydra_ensembles as he
from architectures_clip import DUAL_CASES, DualCase
from hydra_ensembles import baselines
from hydra_ensembles.metrics import nll
from studies import dual_rows, tower_scores
from studies.dual_rows import BAYES_VLM, NEG_LABEL, PSEUDO_COUNTS, ROWS, VILU, DualRow, for_classes, vocabulary
from studies.dual_seed import DualSeed
from studies.samples import SampleBatches
from zero_shot_models import NAMES as CLASSES
from zero_shot_models import TEMPLATES, dual_of


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
    assert choice["setting"]["pseudo_count"] == min(losses, key=losses.__getitem__)
    assert float(nll(said.probs, held.samples.labels)) == pytest.approx(min(losses.values()))


def test_what_an_earlier_stage_chose_is_not_chosen_again(tmp_path: Path) -> None:
    seed = dual_seed(tmp_path, dual_recipe(choices=dual_recipe().choices[:1]))
    names = seed.task.held_out.classes
    place = seed.folder / "choices" / "bayesvlm.json"
    place.parent.mkdir(parents=True)
    before = json.dumps({"row": BAYES_VLM, "setting": {"pseudo_count": 3.0}, "measured": []})
    place.write_text(before)
    found = ROWS[BAYES_VLM].whole(seed, names)(images_of(seed))
    torch.rand(1)  # independent of earlier random draws
    pairs = dual_rows.drawn_pairs(seed)
    expected = baselines.bayes_vlm(seed.dual, pairs, baselines.BayesVLM(3.0)).probit(names)
    torch.testing.assert_close(found, expected(images_of(seed)))
    assert place.read_text() == before


def test_vilu_is_single_with_a_score_that_goes_with_any_classes(seed: DualSeed, monkeypatch) -> None:
    monkeypatch.setattr(dual_rows, "EPOCHS", 2)
    names, inputs, held = seed.task.sets.training().names, images_of(seed), seed.task.held_out
    trained = dual_rows._trained_vilu(seed)
    same = for_classes(trained, he.zero_shot(seed.dual, names)).predict(inputs)
    expected = trained.predict(inputs)
    torch.testing.assert_close(same.score("vilu"), expected.score("vilu"))
    reversed_names = for_classes(trained, he.zero_shot(seed.dual, names[::-1])).predict(inputs)
    torch.testing.assert_close(reversed_names.score("vilu"), expected.score("vilu"))  # in any order
    few = ROWS[VILU].whole(seed, names[:3]).predict(inputs)
    torch.testing.assert_close(few.member_logits, he.zero_shot(seed.dual, names[:3]).predict(inputs).member_logits)
    assert not torch.allclose(few.score("vilu"), expected.score("vilu"))
    choice = json.loads((seed.folder / "choices" / "vilu.json").read_text())
    losses = {(one["optimizer"], one["learning_rate"]): one["nll"] for one in choice["measured"]}
    assert list(losses) == list(dual_rows.RATES)
    taken = choice["setting"]["optimizer"], choice["setting"]["learning_rate"]
    assert losses[taken] == min(losses.values())
    assert f"{taken[0]}, learning rate {taken[1]:g}" in trained.metadata.history[-1]
    said = DualRow(model=lambda *_: trained).asked(seed, held)
    sure = (-said.score("vilu")).sigmoid()  # probability of being right
    right = said.label == held.samples.labels
    assert losses[taken] == pytest.approx(-float(torch.where(right, sure, 1 - sure).log().mean()), rel=1e-4)


def test_a_rate_at_which_vilu_diverges_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = dual_seed(tmp_path, dual_recipe(choices=dual_recipe().choices[:1]))
    monkeypatch.setattr(dual_rows, "EPOCHS", 1)
    monkeypatch.setattr(dual_rows, "RATES", (("sgd", 1e30), ("sgd", 0.01)))
    assert "learning rate 0.01" in dual_rows._trained_vilu(seed).metadata.history[-1]


def test_neg_label_takes_whole_words_of_the_vocabulary(seed: DualSeed) -> None:
    words = vocabulary(seed.dual)
    assert len(words) > 5
    assert all(word.isalpha() and len(word) > 2 for word in words)
    plain = he.zero_shot(seed.dual, ("boat", "house"))
    said = ROWS[NEG_LABEL].whole(seed, plain.metadata.labels).predict(images_of(seed))
    expected = baselines.neg_label(plain, words, settings=baselines.NegLabel(groups=1)).predict(images_of(seed))
    torch.testing.assert_close(said.score("neglabel"), expected.score("neglabel"))


CASES = [case for case in DUAL_CASES if case.name in ("transformers-gelu", "open_clip-no-text-projection")]
SIZES = [5, 1, 5]  # unequal, so that the mean of batch means would differ


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_of_both_towers_against_plain_autograd(case: DualCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dual = dual_of(case).double()
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(sum(SIZES), 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(CLASSES), (sum(SIZES),), generator=generator)
    batches = list(zip(images.split(SIZES), labels.split(SIZES), strict=True))
    monkeypatch.setattr(tower_scores, "PROMPTS_AT_ONCE", 2 * len(TEMPLATES))  # classes in several chunks
    scores = tower_scores.taylor_scores(dual, CLASSES, batches, TEMPLATES)
    texts = [dual.encode_text([one.replace("{label}", name) for name in CLASSES])[0] for one in TEMPLATES]
    classes = F.normalize(torch.stack(texts).mean(0), dim=-1)[None]
    F.cross_entropy(dual.logits(dual.encode_image(images), classes)[0], labels).backward()
    for name, tower in (("image", dual.image), ("text", dual.text)):
        weights = [block.attention.qkv for block in tower.encoder.layers]  # [H, 3, d_k, d]
        expected = torch.stack([(one.detach() * one.grad).abs().mean((1, 2, 3)) for one in weights])
        assert expected.min() > 0
        torch.testing.assert_close(scores[name], expected, rtol=1e-9, atol=0)
