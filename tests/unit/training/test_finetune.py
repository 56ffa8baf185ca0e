"""Fine-tuning: what is learned, what moves, how members and random numbers go together."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import LAYERS, batches, moved, same, samples, tiny, tiny_text

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.config import GROUPS, CosineConfig, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.states import place_of
from hydra_ensembles.prune import prune
from hydra_ensembles.training.finetune import EnsembleLearner, finetune
from hydra_ensembles.training.loop import Runtime
from hydra_ensembles.training.recipe import Recipe

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, steps=4, schedule="constant")


def train(member, data=None, recipe=RECIPE, validation=None, **options):
    return finetune(member, batches() if data is None else data, recipe, validation, progress=False, **options)


def assert_close(found, expected, **tolerance):
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], **tolerance)


@pytest.mark.filterwarnings("ignore::hydra_ensembles.HydraWarning")  # validated on what was trained on
def test_training_learns_and_leaves_the_input_alone():
    member, data = tiny(), batches(96)
    before = copy.deepcopy(member)
    images, labels = samples(96)
    recipe = replace(RECIPE, optimizer="adamw", learning_rate=0.01, steps=None, epochs=5)
    trained = train(member, data, recipe, validation=data)
    assert same(member, before)
    assert not trained.training
    assert trained.metadata.calibration is None
    assert trained.metadata.history[0] == "made"
    assert "learning rate 0.01, seed 0" in trained.metadata.history[1]
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert trained.config == member.config
    accuracy = (trained(images)[0].argmax(-1) == labels).double().mean().item()
    assert accuracy > 0.8
    assert trained.metadata.metrics["validation/accuracy"] == pytest.approx(accuracy)


def test_plain_steps_equal_torch_by_hand():
    member, (images, labels) = tiny(), samples(8)
    recipe = replace(RECIPE, learning_rate=0.1, steps=3, label_smoothing=0.1, weight_decay=0.01)
    reference = copy.deepcopy(member).train()
    spared = [p for n, p in reference.named_parameters() if n.endswith("bias") or "norm" in n]
    rest = [p for n, p in reference.named_parameters() if not (n.endswith("bias") or "norm" in n)]
    groups = [{"params": rest, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(reference(images)[0], labels)
        optimizer.zero_grad()
        loss.backward()
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


def test_the_classifier_starts_at_zero_and_dropout_applies_while_training():
    member = tiny()
    recipe = replace(RECIPE, reinit_classifier="zeros", train_groups=("readout",))
    assert not EnsembleLearner(member, recipe, Runtime(torch.device("cpu")), 0).model(samples(4)[0]).any()
    assert member.readout.classifier.weight.any()
    dropped = train(member, recipe=replace(RECIPE, dropout=0.1))
    assert dropped.config == member.config
    assert not same(train(member), dropped)


def test_a_classifier_learns_at_a_rate_of_its_own():
    member = tiny()
    slow = replace(RECIPE, momentum=0.0, learning_rate=1e-3, steps=1)
    fast = replace(slow, classifier_rate=8.0)
    once, faster = (train(member, recipe=recipe).state_dict() for recipe in (slow, fast))
    for name, tensor in member.state_dict().items():
        share = 8.0 if name.startswith("readout.classifier.") else 1.0
        torch.testing.assert_close(faster[name] - tensor, share * (once[name] - tensor), rtol=1e-3, atol=1e-7)
    assert "readout.classifier.weight" in moved(member, train(member, recipe=slow))


def test_accumulation_equals_one_large_batch():
    member, (images, labels) = tiny(), samples(20)
    uneven = list(zip(images.split(8), labels.split(8), strict=True))  # 8 + 8 + 4
    recipe = replace(RECIPE, gradient_accumulation=3, clip_norm=0.5)
    whole = train(member, [(images, labels)], replace(recipe, gradient_accumulation=1))
    assert_close(train(member, uneven, recipe), whole, rtol=1e-4, atol=1e-6)


def test_clipping_bounds_the_update():
    member = tiny()
    recipe = replace(RECIPE, learning_rate=1.0, momentum=0.0, steps=1, clip_norm=1e-3)
    trained = train(member, batches(8), recipe).state_dict()
    moves = torch.cat([(trained[name] - tensor).flatten() for name, tensor in member.state_dict().items()])
    assert moves.norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("precision", "members"), [("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_mixed_precision_is_near_float32(precision, members):
    member = tiny(members=members)
    mixed, full = train(member, recipe=replace(RECIPE, precision=precision)), train(member)
    assert mixed.dtype == torch.float32
    assert not same(mixed, full)
    assert_close(mixed, full, rtol=0.1, atol=5e-3)


def test_half_precision_ensembles_come_back_in_half_precision():
    member = tiny().to(torch.bfloat16)
    trained = train(member, recipe=replace(RECIPE, train_groups=("readout",)))
    assert trained.dtype == torch.bfloat16
    assert moved(member, trained) == {"readout.classifier.weight", "readout.classifier.bias"}


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


def test_text_trains_with_masks_in_a_mapping():
    ids = torch.randint(1, 20, (12, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(12, 6, dtype=torch.long)
    mask[:, 4:] = 0
    data = [{"input_ids": ids, "attention_mask": mask, "labels": (ids[:, 0] > 9).long()}]
    member = tiny_text()
    found = moved(member, train(member, data, Recipe.preset("sst2", learning_rate=1e-3, patience=None, epochs=3)))
    assert found
    assert all(place_of(name)[0] != "stem" for name in found)


@pytest.mark.parametrize(
    ("changes", "error", "token"),
    [
        ({"data": iter(batches())}, DataError, "only once"),
        ({"validation": []}, DataError, "validation"),
        ({"recipe": replace(RECIPE, patience=1)}, ConfigError, "patience"),
        ({"checkpoint_every": 0}, ConfigError, "checkpoint_every"),
    ],
)
def test_bad_requests_are_refused(changes, error, token):
    with pytest.raises(error, match=token):
        train(**{"member": tiny(), **changes})


def test_a_loss_that_is_not_finite_names_the_step_and_the_batches():
    data = batches()
    data[2][0][0, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match=r"the loss is nan .* at step 2 \(batch 2 of epoch 0, member 0"):
        train(tiny(), data)
    with pytest.raises(DataError, match=r"at step 1 \(batch 2, 3 of epoch 0"):
        train(tiny(), data, replace(RECIPE, gradient_accumulation=2))
    with pytest.raises(DataError, match=r"weights are not finite after step 1 "):  # the last step: no loss tells it
        train(tiny(), batches(), Recipe(optimizer="sgd", learning_rate=3e38, weight_decay=1e3, steps=1))


def test_the_order_of_the_data_and_the_dropout_have_seeds_of_their_own():
    """Which batches come when depends on one, what is dropped on the other; both are the same for equal seeds."""
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=8, shuffle=True)
    fixed = replace(RECIPE, dropout=0.3, order_seed=5)
    first = train(tiny(), loader, fixed)
    assert same(first, train(tiny(), loader, fixed))
    assert not same(first, train(tiny(), loader, replace(fixed, seed=1)))  # other dropout
    assert not same(first, train(tiny(), loader, replace(fixed, order_seed=6)))  # another order
    calm = replace(fixed, dropout=0.0)
    assert same(train(tiny(), loader, calm), train(tiny(), loader, replace(calm, seed=1)))
    second = train(tiny(), loader, replace(calm, order_seed=6))
    assert not same(train(tiny(), loader, calm), second)
    assert same(train(tiny(), loader, calm, index=0), train(tiny(), loader, calm, index=1))  # one order for all members
    free = replace(calm, order_seed=None)
    assert not same(train(tiny(), loader, free, index=0), train(tiny(), loader, free, index=1))


@pytest.mark.slow  # the compiler takes a minute
def test_compiled_blocks_train_like_those_that_are_not():
    member, recipe = Ensemble.stack([prune(tiny(), [(0, 0)]), prune(tiny(1), [(1, 1)])]), replace(RECIPE, clip_norm=1.0)
    compiled = train(member, recipe=replace(recipe, compile=True), validation=batches(seed=4))
    assert_close(compiled, train(member, recipe=recipe, validation=batches(seed=4)), atol=1e-6, rtol=1e-5)


def test_a_model_without_names_of_classes_takes_those_of_its_training_data():
    """Else a test folder without the first class, which counts from the second, would be held against other numbers."""
    data = TensorDataset(*samples(16))
    data.classes = ["ant", "bee", "cat"]
    loader, recipe = DataLoader(data, 8), replace(RECIPE, steps=1)
    trained = train(tiny(), loader, recipe)
    assert trained.metadata.labels == ("ant", "bee", "cat")
    data.classes = ["bee", "cat"]
    with pytest.raises(DataError, match="'bee', which the model has as class 1"):
        train(trained, loader, recipe)
    data.classes = ["x", "y", "z"]
    assert train(trained, loader, recipe).metadata.labels == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("names", "said"),
    [(("spam", "ham"), True), (("neg", "ham"), False), (("neg", "pos"), False), (("0", "1"), False), ((), False)],
)
def test_classes_that_the_model_calls_otherwise_are_said(names, said):
    model = tiny()
    model = model.with_metadata(labels=("neg", "pos", *(f"other {one}" for one in range(2, model.num_classes))))
    data = TensorDataset(*samples(4))
    data.classes = names
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = finetune(model, DataLoader(data, 4), Recipe(learning_rate=1e-3, steps=1), progress=False)
    assert ["spam" in str(one.message) for one in caught] == [True] * said
    assert found.metadata.labels == model.metadata.labels
