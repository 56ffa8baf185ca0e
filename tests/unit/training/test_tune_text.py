"""Text towers tuned to a locked image tower: the loss, what learns, batches that count as one."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F
from training_cases import NAMES, ShuffledPairs, largest_gap, moved, pairs, same, tiny_dual

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.stem_readout import linear
from hydra_ensembles.training.loop import Runtime
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import (
    TextLearner,
    contrastive_loss,
    image_features,
    retrieval,
    text_features,
    tune_text,
)

RECIPE = Recipe(learning_rate=0.01, epochs=12, warmup=3, weight_decay=0.01)
QUICK = Recipe(learning_rate=0.01, steps=2, schedule="constant")
SCALE = torch.tensor([math.log(1 / 0.07)])


def embeddings(count: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (F.normalize(torch.randn(count, 5, generator=generator), dim=-1) for _ in range(2))
    return images, texts


@pytest.mark.parametrize("labels", [None, torch.tensor([3, 0, 7, 1, 2, 9])])
def test_pairs_that_stand_alone_have_the_loss_of_clip(labels):
    images, texts = embeddings()
    logits = SCALE.exp() * images @ texts.T
    target = torch.arange(6)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), expected)


def test_the_loss_is_that_of_open_clip():
    images, texts = embeddings()
    expected = pytest.importorskip("open_clip.loss").ClipLoss()(images, texts, SCALE.exp())
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE), expected)


def test_positives_of_a_row_share_its_target_evenly():
    images, texts = embeddings(4)
    labels = torch.tensor([0, 1, 0, 0])
    log_probs = (SCALE.exp() * images @ texts.T).log_softmax(1)
    backward = (SCALE.exp() * texts @ images.T).log_softmax(1)
    rows = [[0, 2, 3], [1], [0, 2, 3], [0, 2, 3]]
    one, other = (
        -sum(part[row, columns].mean() for row, columns in enumerate(rows)) / 4 for part in (log_probs, backward)
    )
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), (one + other) / 2)


def test_retrieval_finds_texts_of_the_same_class():
    images, texts = embeddings(5)
    labels = torch.tensor([0, 1, 0, 2, 1])
    probs = (SCALE.exp() * images @ texts.T).double().softmax(1)
    same = labels[:, None] == labels[None]
    accuracy, nll = retrieval(images, texts, SCALE, labels)
    assert accuracy == pytest.approx(same.gather(1, probs.argmax(1, keepdim=True)).double().mean().item())
    assert nll == pytest.approx(-(probs * same).sum(1).log().mean().item())
    alone, _ = retrieval(images, images, SCALE, None)
    assert alone == 1.0


def test_training_finds_the_texts_and_leaves_the_image_tower_as_it_was():
    dual = tiny_dual()
    start = {name: tensor.clone() for name, tensor in dual.state_dict().items()}
    tuned = tune_text(dual, pairs(), RECIPE, progress=False)
    assert all(torch.equal(tensor, start[name]) for name, tensor in dual.state_dict().items())
    changed = moved(dual, tuned)
    assert not any(name.startswith(("image.", "projections.image")) for name in changed)
    assert {"logit_scale", "projections.text.weight"} <= changed
    assert any(name.startswith("text.encoder") for name in changed)
    images = torch.cat([image for image, _, _ in pairs()])
    labels = torch.cat([label for _, _, label in pairs()])
    accuracy = [
        (he.zero_shot(one, NAMES, "a photo of a {label}")(images)[0].argmax(1) == labels).double().mean()
        for one in (dual, tuned)
    ]
    assert accuracy[1] > max(0.6, accuracy[0].item())
    assert tuned.text.metadata.history[-1].startswith("tuned the text side")


def test_nothing_of_the_image_tower_gets_a_gradient():
    learner = TextLearner(tiny_dual(), QUICK, Runtime(torch.device("cpu")), True, 1.0)
    learner.backward([learner.read(batch, 0) for batch in pairs()], seed=0)
    for name, parameter in learner.model.named_parameters():
        assert parameter.requires_grad == (not name.startswith("image."))
        assert (parameter.grad is None) == name.startswith("image."), name
    assert not learner.model.image.training
    assert learner.model.text.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_there_whatever_the_caller_switched_off(mode):
    expected = tune_text(tiny_dual(), pairs(), QUICK, progress=False)
    with mode():
        tuned = tune_text(tiny_dual(), pairs(), QUICK, progress=False)
    assert largest_gap(tuned, expected) == 0.0


def test_features_computed_before_train_as_the_images_do():
    dual, data = tiny_dual(), pairs()
    features = image_features(dual, data).split(8)
    assert features[0].shape == (8, 24)
    before = [(feature, texts, labels) for feature, (_, texts, labels) in zip(features, data, strict=True)]
    for settings in ({}, {"train_image_projection": True, "projection_rate": 5.0}):
        one, other = (tune_text(dual, source, RECIPE, progress=False, **settings) for source in (data, before))
        assert largest_gap(one, other) < 1e-6
    assert "projections.image.weight" in moved(dual, one)


def test_features_of_a_text_tower_that_does_not_learn():
    dual, data = tiny_dual(dropout=0.0), pairs()
    recipe = dataclasses.replace(RECIPE, train_groups=("readout",))
    before = [(images, text_features(dual, texts), labels) for images, texts, labels in data]
    one, other = (tune_text(dual, source, recipe, progress=False) for source in (data, before))
    assert largest_gap(one, other) < 1e-6
    assert moved(dual, one) == {"logit_scale", "projections.text.weight"}
    with pytest.raises(DataError, match="the text tower is to learn"):
        tune_text(dual, before, RECIPE, progress=False)


def test_batches_of_one_update_count_as_one_batch():
    """In double precision K batches of B and one batch of K·B make the same update."""
    dual = tiny_dual(dtype=torch.float64)
    small, large = pairs(24, 4, dtype=torch.float64), pairs(24, 24, dtype=torch.float64)
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, epochs=3, clip_norm=1.0)
    six = dataclasses.replace(recipe, gradient_accumulation=6)
    accumulated, whole, apart = (
        tune_text(dual, data, settings, train_image_projection=True, progress=False)
        for data, settings in ((small, six), (large, recipe), (small, recipe))
    )
    assert largest_gap(accumulated, whole) < 1e-12
    assert largest_gap(dual, whole) > 1e-3
    assert largest_gap(apart, whole) > 1e-3
    noisy = tiny_dual(dropout=0.3, dtype=torch.float64)  # a batch that is run again draws the same dropout
    assert same(*(tune_text(noisy, small, six, progress=False) for _ in range(2)))


def test_the_scale_stays_at_or_below_a_hundred():
    recipe = Recipe(optimizer="sgd", learning_rate=1e6, steps=2, schedule="constant", train_groups=("readout",))
    dual = tiny_dual()
    with torch.no_grad():
        dual.logit_scale.fill_(math.log(99.0))
    tuned = tune_text(dual, [batch[:2] for batch in pairs(8, 8)], recipe, progress=False)
    assert 0.0 <= tuned.logit_scale.item() <= math.log(100.0)


def test_the_image_projection_has_a_rate_of_its_own():
    dual = tiny_dual(dtype=torch.float64)
    recipe = Recipe(optimizer="sgd", learning_rate=0.01, steps=1, schedule="constant")
    data, options = pairs(8, 8, dtype=torch.float64), {"train_image_projection": True, "progress": False}
    plain, fast = (
        tune_text(dual, data, recipe, projection_rate=factor, **options).state_dict() for factor in (1.0, 4.0)
    )
    for name, start in dual.state_dict().items():
        factor = 4.0 if name in ("projections.image.weight", "logit_scale") else 1.0
        torch.testing.assert_close(fast[name] - start, factor * (plain[name] - start), rtol=1e-6, atol=1e-12)


def test_parts_that_the_recipe_leaves_out_do_not_move():
    dual = tiny_dual()
    last = tune_text(dual, pairs(), dataclasses.replace(QUICK, last_blocks=1), progress=False)
    layers = {name.split(".")[3] for name in moved(dual, last) if name.startswith("text.encoder.layers")}
    assert layers == {"2"}
    assert not any(name.startswith("text.stem") for name in moved(dual, last))
    readout = dataclasses.replace(QUICK, train_groups=("readout",))
    assert moved(dual, tune_text(dual, pairs(), readout, progress=False)) == {"logit_scale", "projections.text.weight"}
    attention = dataclasses.replace(QUICK, train_groups=("attention",))
    only = tune_text(dual, pairs(), attention, train_image_projection=True, progress=False)
    parts = {name for name in moved(dual, only) if "attention" not in name}
    assert parts == {"logit_scale", "projections.image.weight"}


def test_a_pruned_dual_encoder_trains_and_fuses_with_others():
    dual = tiny_dual()
    heads = [[(0, 1, "image"), (2, 3, "text")], [(1, 0, "image"), (2, 0, "text"), (2, 1, "text")]]
    members = [tune_text(he.prune(dual, one), pairs(), QUICK, progress=False) for one in heads]
    assert members[0].text.heads[0][2] == (0, 1, 2)
    fused = he.fuse(members, stem="mean", mlp="separate")
    assert fused.num_members == 2
    with pytest.raises(ConfigError, match="2 members"):
        tune_text(fused, pairs(), QUICK, progress=False)


def test_validation_keeps_the_best_weights_and_decides_a_grid():
    recipe = Recipe(grid=(1e-5, 0.01), epochs=6, train_groups=("attention", "mlp", "norms", "readout"))
    tuned = tune_text(tiny_dual(), ShuffledPairs(), recipe, validation=pairs(12, 5, seed=3), progress=False)
    assert "learning rate 0.01" in tuned.text.metadata.history[-1]
    assert "validation accuracy" in tuned.text.metadata.history[-1]
    with pytest.raises(ConfigError, match="validation"):
        tune_text(tiny_dual(), pairs(), recipe, progress=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train has no batches"),
        ([(torch.zeros(3, 3, 8, 8), ["a", "b"], None)], "3 images, 2 texts"),
        ([(torch.zeros(2, 3, 8, 8), ["a", "b"], torch.zeros(3, dtype=torch.long))], "2 texts, 3 labels"),
        ([(torch.zeros(2, 3, 8, 8), ["a", "b"], torch.zeros(2))], "must be whole numbers"),
        ([(torch.zeros(2, 3, 8, 8), "ab", None)], "one string"),
        ([torch.zeros(2, 3, 8, 8)], "batch 0 of train"),
        ([(torch.zeros(2, 7), ["a", "b"], None)], "image features of batch 0"),
        ([(torch.full((2, 24), math.nan), ["cat", "dog"], None)], "the loss is nan at step 0"),
        (iter(pairs()), "can be read only once"),
        ([pairs()[0], pairs()[1][:2]], "1 of 2 batches have labels"),
    ],
)
def test_data_that_cannot_be_used(data, message):
    recipe = dataclasses.replace(QUICK, gradient_accumulation=2)
    with pytest.raises(DataError, match=message):
        tune_text(tiny_dual(), data, recipe, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"projection_rate": 0.0}, "projection_rate"),
        ({"recipe": dataclasses.replace(QUICK, reinit_classifier="zeros")}, "reinit_classifier"),
        ({"recipe": dataclasses.replace(QUICK, classifier_rate=10.0)}, "classifier_rate"),
        ({"recipe": dataclasses.replace(QUICK, last_blocks=9)}, "last_blocks"),
        ({"dual": "clip"}, "DualEncoder"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    asked = {"dual": tiny_dual(), "train": pairs(), "recipe": QUICK, "progress": False, **settings}
    with pytest.raises(ConfigError, match=message):
        tune_text(**asked)


def test_no_image_projection_to_train():
    whole = tiny_dual()
    with torch.no_grad():
        alone = he.DualEncoder(whole.image, whole.text, he.Projections(None, _widened(whole.projections.text)))
    with pytest.raises(ConfigError, match="no image projection"):
        tune_text(alone, pairs(), QUICK, train_image_projection=True, progress=False)
    assert "projections.text.weight" in moved(alone, tune_text(alone, pairs(), QUICK, progress=False))


def _widened(projection):
    return linear(torch.cat([projection.weight, projection.weight[:, :8]], dim=1))  # 16 to 24 numbers
