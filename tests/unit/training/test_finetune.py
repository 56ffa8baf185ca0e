"""Fine-tuning: what is learned, which weights move, and how members and random numbers interact."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from training_cases import LAYERS, batches, moved, own_batches, same, samples, shuffled, tiny

from hydra_ensembles.errors import ConfigError, HydraWarning
from hydra_ensembles.model.config import GROUPS, CosineConfig, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.member_states import place_of
from hydra_ensembles.training.finetune import EnsembleLearner, finetune
from hydra_ensembles.training.recipe import Recipe

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, steps=4, schedule="constant")


def train(member, data=None, recipe=RECIPE, validation=None, **options):
    return finetune(member, batches() if data is None else data, recipe, validation, progress=False, **options)


def assert_close(found, expected, **tolerance):
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], **tolerance)


def test_training_learns_and_says_so():
    member, (images, labels) = tiny(), samples(96)
    recipe = replace(RECIPE, optimizer="adamw", learning_rate=0.01, steps=None, epochs=5)
    trained = train(member, batches(96), recipe)
    assert (trained(images)[0].argmax(-1) == labels).double().mean() > 0.8
    assert (trained.training, trained.config, trained.metadata.calibration) == (False, member.config, None)
    assert "learning rate 0.01, seed 0" in trained.metadata.history[1]


def test_a_rate_can_be_chosen_by_the_training_loss():
    """Without validation data: of rates of which the lowest hardly learns, and the highest blows up."""
    recipe = replace(RECIPE, learning_rate=None, grid=(1e-6, 0.1, 30.0), steps=24, select="train")
    with pytest.raises(ConfigError, match="needs validation"):
        train(tiny(), batches(96), replace(recipe, select="validation"))
    trained = train(tiny(), batches(96), recipe)
    assert "learning rate 0.1, chosen of 3" in trained.metadata.history[1]


@pytest.mark.parametrize("spared", [True, False])
def test_plain_steps_equal_torch_by_hand(spared):
    """Weight decay that may spare biases and norms, a higher classifier rate, gradient clipping."""
    member, (images, labels) = tiny(), samples(8)
    recipe = replace(RECIPE, learning_rate=0.1, steps=3, label_smoothing=0.1, weight_decay=0.01, clip_norm=0.5)
    recipe = replace(recipe, no_decay_on_bias_and_norm=spared, classifier_rate=8.0)
    reference = copy.deepcopy(member).train()
    groups = [
        {
            "params": [parameter],
            "lr": 0.8 if name.startswith("readout.classifier.") else 0.1,
            "weight_decay": 0.0 if spared and ("bias" in name or "norm" in name) else 0.01,
        }
        for name, parameter in reference.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for _ in range(3):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(reference(images)[0], labels)
        optimizer.zero_grad()
        loss.backward()
        assert nn.utils.clip_grad_norm_(reference.parameters(), 0.5) > 0.5
        optimizer.step()
    assert_close(train(member, [(images, labels)], recipe), reference)


def test_only_what_is_chosen_moves():
    member = tiny()
    for group in GROUPS:
        found = moved(member, train(member, recipe=replace(RECIPE, train_groups=(group,), steps=1)))
        assert {place_of(name)[0] for name in found} == {group}
    places = {place_of(name) for name in moved(member, train(member, recipe=replace(RECIPE, last_blocks=1)))}
    assert {layer for _, layer in places} == {None, LAYERS - 1}
    assert {group for group, _ in places} == {"attention", "mlp", "norms", "readout"}


def test_frozen_parameters_that_train_all_the_same_are_said():
    member = tiny()
    member.stem.requires_grad_(False)
    with pytest.warns(HydraWarning, match=r"are frozen.*first stem\.patch"):
        train(member, recipe=replace(RECIPE, steps=1))
    with warnings.catch_warnings(action="error"):
        train(member, recipe=replace(RECIPE, steps=1, train_groups=("readout",)))  # they stay frozen
        train(member.requires_grad_(False), recipe=replace(RECIPE, steps=1))  # a model only used for inference


def test_the_classifier_starts_at_zero_and_dropout_applies_while_training():
    member = tiny()
    recipe = replace(RECIPE, reinit_classifier="zeros", train_groups=("readout",))
    assert not EnsembleLearner(member, recipe, torch.device("cpu"), 0).model(samples(4)[0]).any()
    assert member.readout.classifier.weight.any()
    dropped = train(member, recipe=replace(RECIPE, dropout=0.1))
    assert dropped.config == member.config
    assert not same(train(member), dropped)


def test_accumulation_equals_one_large_batch():
    member, (images, labels) = tiny(), samples(20)
    uneven = list(zip(images.split(8), labels.split(8), strict=True))  # 8 + 8 + 4
    recipe = replace(RECIPE, gradient_accumulation=3, clip_norm=0.5)
    whole = train(member, [(images, labels)], replace(recipe, gradient_accumulation=1))
    assert_close(train(member, uneven, recipe), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("members", [1, 2])
def test_mixed_precision_is_near_float32(members):
    member = tiny(members=members)
    mixed, full = train(member, recipe=replace(RECIPE, precision="bf16")), train(member)
    assert mixed.dtype == torch.float32
    assert not same(mixed, full)
    assert_close(mixed, full, rtol=0.1, atol=5e-3)


def test_members_of_one_ensemble_train_as_they_would_alone_when_nothing_is_shared():
    first, second = tiny(seed=1), tiny(seed=2)
    together = train(Ensemble.stack([first, second]))
    for index, alone in enumerate((first, second)):
        assert_close(together.member(index), train(alone), rtol=1e-4, atol=1e-5)


def test_shared_groups_a_trunk_and_class_embeddings_train_too():
    member = tiny(members=2, sharing=Sharing(stem=True, mlp=True), trunk=1)
    assert moved(member, train(member)) == set(member.state_dict())
    config = tiny().config
    zero_shot = Ensemble(replace(config, readout=replace(config.readout, cosine=CosineConfig())))
    assert "readout.class_embeddings.weight" in moved(zero_shot, train(zero_shot))


@pytest.mark.parametrize("source", [shuffled, own_batches])
def test_the_order_of_the_data_and_the_dropout_have_seeds_of_their_own(source):
    """One seed sets the order of batches, the other the dropout; equal seeds give equal results."""

    def made(index=0, **changes):
        return train(tiny(), source(24), replace(RECIPE, **{"order_seed": 5, **changes}), index=index)

    first, calm = made(dropout=0.3), made()
    assert same(first, made(dropout=0.3))
    assert not same(first, made(dropout=0.3, seed=1))
    assert same(calm, made(seed=1))
    assert not same(calm, made(order_seed=6))
    assert same(calm, made(index=1))  # one order for all members
    assert not same(made(order_seed=None), made(order_seed=None, index=1))
