"""Distillation: tops learn their own models without labels, the trunk stays, and a stopped run goes on."""

import pytest
import torch
from training_cases import Stopping, batches, moved, same, tiny

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.member_states import place_of

RECIPE = he.Recipe(learning_rate=3e-3, epochs=8)


@pytest.fixture(scope="module")
def models():
    start = tiny()
    recipe = he.Recipe(learning_rate=5e-3, epochs=4)
    return [he.finetune(start, batches(48, seed=seed), recipe, progress=False, index=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def fused(models):
    return he.fuse(models, mlp="separate", average=1)


def distance(hydra, models):
    """Mean divergence of each member from its own model, on other inputs."""
    images = torch.cat([images for images, _ in batches(32, seed=9)])
    with torch.no_grad():
        ours, theirs = hydra(images).log_softmax(-1), torch.stack([one(images)[0] for one in models]).log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def test_tops_come_closer_to_their_models_over_a_trunk_that_stays(models, fused):
    bare = [images for images, _ in batches(48, seed=5)]
    taught = he.distill(fused, models, bare, RECIPE, progress=False)
    assert distance(taught, models) < 0.7 * distance(fused, models)
    places = {place_of(name) for name in moved(fused, taught)}
    assert {layer for _, layer in places} == {1, None}
    assert "stem" not in {group for group, _ in places}
    assert (taught.config, taught.metadata.calibration) == (fused.config, None)
    assert taught.metadata.history[-1].startswith("distilled ")
    labelled = he.distill(fused, models, batches(48, seed=5), RECIPE, progress=False)
    assert same(taught, labelled)


def test_pruned_members_learn_back_what_they_lost(models):
    pruned = he.fuse([he.prune(one, [(0, 0), (1, head)]) for head, one in enumerate(models)], stem="mean")
    taught = he.distill(pruned, models, batches(48, seed=5), RECIPE, progress=False)
    assert distance(taught, models) < 0.7 * distance(pruned, models)
    assert taught.config.heads == pruned.config.heads


def test_a_stopped_run_goes_on_to_the_same_bits(models, fused, tmp_path):
    data = batches(48, seed=5)
    options = {"recipe": he.Recipe(learning_rate=3e-3, epochs=2), "progress": False}
    whole = he.distill(fused, models, data, **options)
    with pytest.raises(KeyboardInterrupt):
        he.distill(fused, models, Stopping(data, 8), output=tmp_path, checkpoint_every=3, **options)
    assert same(he.distill(fused, models, Stopping(data), output=tmp_path, checkpoint_every=3, **options), whole)


def test_models_of_other_classes_or_another_number_are_refused(models, fused):
    with pytest.raises(ConfigError, match="2 members learn from as many single models; got 1"):
        he.distill(fused, models[:1], batches())
    others = [models[0], models[1].with_metadata(labels=tuple("abc"[: models[1].num_classes]))]
    named = fused.with_metadata(labels=tuple("cba"[: fused.num_classes]))
    with pytest.raises(ConfigError, match="the classes of a model are not those"):
        he.distill(named, others, batches())
