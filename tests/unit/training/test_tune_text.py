"""Text towers tuned to a frozen image tower: the loss, what is trained, and accumulation over batches."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from training_cases import NAMES, largest_gap, moved, pair_samples, pairs, same, tiny_dual

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import TextLearner, contrastive_loss, image_features, retrieval, tune_text

RECIPE = Recipe(learning_rate=0.01, epochs=12, warmup=3, weight_decay=0.01)
QUICK = Recipe(learning_rate=0.01, steps=2, schedule="constant")
SCALE = torch.tensor([math.log(1 / 0.07)])


def tune(dual, data, recipe=QUICK, **options):
    return tune_text(dual, data, recipe, progress=False, **options)


def embeddings(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(count, 5, generator=generator), dim=-1) for _ in range(2))
    return images, texts


@pytest.mark.parametrize("labels", [None, torch.tensor([3, 0, 7, 1, 2, 9])])
def test_pairs_that_stand_alone_have_the_loss_of_open_clip(labels):
    images, texts = embeddings()
    expected = pytest.importorskip("open_clip.loss").ClipLoss()(images, texts, SCALE.exp())
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), expected)


def test_positives_of_a_row_share_its_target_evenly():
    (images, texts), labels = embeddings(4), torch.tensor([0, 1, 0, 0])
    logits, three = SCALE.exp() * images @ texts.T, [1 / 3, 0.0, 1 / 3, 1 / 3]
    targets = torch.tensor([three, [0.0, 1.0, 0.0, 0.0], three, three])
    one, other = (F.cross_entropy(side, targets) for side in (logits, logits.T))
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), (one + other) / 2)


def test_retrieval_finds_texts_of_the_same_class():
    images, texts = embeddings(5)
    labels = torch.tensor([0, 1, 0, 2, 1])
    probs = (SCALE.exp() * images @ texts.T).double().softmax(1)
    alike = labels[:, None] == labels[None]
    accuracy, nll = retrieval(images, texts, SCALE, labels)
    assert accuracy == pytest.approx(alike.gather(1, probs.argmax(1, keepdim=True)).double().mean().item())
    assert nll == pytest.approx(-(probs * alike).sum(1).log().mean().item())
    assert retrieval(images, images, SCALE, None)[0] == 1.0


def test_training_finds_the_texts_and_leaves_the_image_tower_as_it_was():
    dual, (images, labels) = tiny_dual(), pair_samples()
    tuned = tune(dual, pairs(), RECIPE)
    assert same(dual, tiny_dual())
    changed = moved(dual, tuned)
    assert not any(name.startswith(("image.", "projections.image")) for name in changed)
    assert {"logit_scale", "projections.text.weight"} <= changed
    assert any(name.startswith("text.encoder") for name in changed)
    before, after = (
        (he.zero_shot(one, NAMES, "a photo of a {label}")(images)[0].argmax(1) == labels).double().mean().item()
        for one in (dual, tuned)
    )
    assert after > max(0.6, before)


def test_features_computed_before_train_as_the_images_do():
    dual, data = tiny_dual(), pairs()
    features = image_features(dual, [images for images, *_ in data]).split(8)
    assert features[0].shape == (8, 24)
    before = [(feature, texts, labels) for feature, (_, texts, labels) in zip(features, data, strict=True)]
    recipe = replace(RECIPE, epochs=2)
    for settings in ({}, {"train_image_projection": True, "projection_rate": 5.0}):
        one, other = (tune(dual, source, recipe, **settings) for source in (data, before))
        assert largest_gap(one, other) < 1e-6
    assert "projections.image.weight" in moved(dual, one)


def test_accumulated_batches_have_the_mean_of_their_gradients():
    data, found = pairs(24, 8, dtype=torch.float64), []
    for groups in ([data], [[batch] for batch in data]):
        learner = TextLearner(tiny_dual(dtype=torch.float64), QUICK, True, 1.0, torch.device("cpu"))
        losses = [learner.backward(group, seed=0) for group in groups]
        gradients = [one.grad / len(groups) for one in learner.trained.values()]
        found.append([torch.stack(losses).mean(), *gradients])
    torch.testing.assert_close(*found)


def scaled(scale):
    dual = tiny_dual()
    with torch.no_grad():
        dual.logit_scale.fill_(scale)
    return dual


@pytest.mark.parametrize("scale", [4.7637, -0.5, 2.0])
def test_the_scale_stays_within_bounds_and_one_that_begins_beyond_them_is_not_cut(scale):
    recipe = replace(QUICK, learning_rate=1e-6)
    slow, fast = (tune(scaled(scale), pairs(), recipe, projection_rate=rate) for rate in (1e-6, 1e7))
    assert slow.logit_scale.item() == pytest.approx(scale, abs=1e-6)
    least, most = min(0.0, scale), max(math.log(100.0), scale)
    assert fast.logit_scale.item() in (pytest.approx(least, abs=1e-6), pytest.approx(most, abs=1e-6))


def test_a_pruned_dual_encoder_trains_and_fuses_with_others():
    dual = tiny_dual()
    heads = [[(0, 1, "image"), (2, 3, "text")], [(1, 0, "image"), (2, 0, "text"), (2, 1, "text")]]
    members = [tune(he.prune(dual, one), pairs()) for one in heads]
    assert members[0].text.heads[0][2] == (0, 1, 2)
    fused = he.fuse(members, stem="mean", mlp="separate")
    assert fused.num_members == 2
    with pytest.raises(ConfigError, match="2 members"):
        tune(fused, pairs())
