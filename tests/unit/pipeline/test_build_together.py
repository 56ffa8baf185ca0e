"""Members trained together after fusing: equivalence to separate passes, and the resulting ensembles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build_cases import CLASSES, LAYERS, batches, image_model, recipe, same, sets, text_model, text_sets
from torch.func import functional_call
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.member_states import member_config, member_state, place_of

EVERYTHING = ("stem", "attention", "mlp", "norms", "readout")
# not AdamW: it normalises gradients, and that of a key bias is only rounding error
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.02, "dropout": 0.0, "train_groups": EVERYTHING}
NORM = "encoder.layers.0.norm1.weight"
QUICK: dict[str, Any] = {"strategy": "random", "prune": 3, "training": "together", "shared_layers": 1}


@pytest.mark.parametrize("mlp", ["mean", "separate"])
def test_training_together_is_training_of_members_in_turn(mlp: str) -> None:
    """Equal weights after training each member separately on views of the shared parameters.

    They have different numbers of heads above a trunk; one keeps all.
    """
    heads, steps = ([(1, 0), (2, 1), (2, 3)], [(2, 2)], []), 5
    start = he.fuse([he.prune(image_model(), off) for off in heads], trunk=1, mlp=mlp)
    data = batches(4 * steps)
    chosen = he.Recipe(steps=steps, schedule="constant", **SGD)
    got = he.finetune(start, data, chosen, progress=False).state_dict()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in start.state_dict().items()}
    config = start.config
    alone = [he.Ensemble(member_config(config, index)).train() for index in range(config.members)]
    optimizer = torch.optim.SGD(weights.values(), lr=0.02, momentum=0.9)
    for images, labels in data[:steps]:
        optimizer.zero_grad()
        for index, member in enumerate(alone):  # gradients of shared parameters add up
            logits = functional_call(member, member_state(config, weights, index), (images,))[0]
            F.cross_entropy(logits, labels).backward()
        optimizer.step()
    moved = 0
    for name, tensor in weights.items():
        torch.testing.assert_close(got[name], tensor.detach(), rtol=1e-4, atol=2e-6)
        moved += not torch.equal(got[name], start.state_dict()[name])
    assert moved == len(weights)  # including trunk and stem


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_build_that_trains_together(kind: str, tmp_path: Path) -> None:
    base, data = (image_model(), sets()) if kind == "image" else (text_model(), text_sets())
    settings = he.HydraConfig(**QUICK, whole=True, recipe=recipe(train_groups=EVERYTHING))
    hydra = he.build(base, settings, output=tmp_path, **data)
    assert (hydra.num_members, hydra.config.trunk) == (3, 1)
    kept = [sum(len(layer) for layer in member) for member in hydra.heads]
    assert kept[0] == kept[1] == kept[2] - 3
    assert hydra.heads[0] != hydra.heads[1]
    assert not torch.equal(hydra.state_dict()[NORM], base.state_dict()[NORM])
    assert same(hydra, he.build(base, settings, output=tmp_path, **data))
    assert same(hydra, he.build(base, settings, **data))


def test_branches_are_paths_of_their_own_above_the_trunk() -> None:
    """They start equal except for their classifiers, and training makes them differ."""
    base = image_model()
    settings = he.HydraConfig(strategy="branches", training="together", shared_layers=2, recipe=recipe(steps=3))
    hydra = he.build(base, settings, **sets())
    assert (hydra.config.trunk, set(hydra.heads)) == (2, set(base.heads))
    state = hydra.state_dict()
    attention = state[f"encoder.layers.{LAYERS - 1}.attention.out"].chunk(3)  # one chunk per member
    classifiers = state["readout.classifier.weight"]  # [M, C, d]
    assert classifiers.shape[:2] == (3, CLASSES)
    for parts in (attention, classifiers):
        assert not torch.equal(parts[0], parts[1])
        assert not torch.equal(parts[1], parts[2])


def test_members_start_from_pretrained_layers_above_the_trunk() -> None:
    base, before = image_model(seed=4), image_model(seed=5)
    dropping = replace(before.config, encoder=replace(before.config.encoder, output_dropout=0.1))  # same answers
    before = he.Ensemble.from_state(dropping, before.state_dict(), before.metadata)
    frozen = recipe(learning_rate=1e-12, steps=1, dropout=0.0)  # weights stay at their start
    settings = he.HydraConfig(strategy="branches", training="together", shared_layers=1, recipe=frozen)
    hydra = he.build(base, settings, pretrained=before, **sets()).member(0).state_dict()
    for name, tensor in hydra.items():
        group, layer = place_of(name)
        if "classifier" not in name:
            source = base if group == "stem" or (layer is not None and layer < 1) else before
            torch.testing.assert_close(tensor, source.state_dict()[name], msg=name)
    with pytest.raises(ConfigError, match="pretrained"):
        he.build(base, settings, pretrained=text_model(), **sets())


def test_a_mean_trunk_is_trained_by_every_member_and_the_model_itself_is_one(tmp_path: Path) -> None:
    """The other members are trained whole from the pretrained weights; equals the same steps by hand, and resumes."""
    base, before, data = image_model(seed=4), image_model(seed=5), sets()
    chosen = {"training": "apart", "average_trunk": True, "shared_layers": 2, "calibrate": False}
    chosen["recipe"] = recipe(steps=2, train_groups=EVERYTHING)
    settings = he.HydraConfig(strategy="branches", whole=True, **chosen)
    hydra = he.build(base, settings, pretrained=before, output=tmp_path, **data)
    members = [he.Ensemble.from_pretrained(tmp_path / "members" / str(index)) for index in range(3)]
    assert same(members[2], base)
    assert not torch.equal(members[0].state_dict()[NORM], members[1].state_dict()[NORM])  # trunks were trained
    assert same(hydra, he.fuse(members, average=2))
    assert hydra.config.trunk == 2
    assert same(hydra, he.build(base, settings, pretrained=before, output=tmp_path, **data))


def test_what_is_left_open_follows_the_model() -> None:
    """By default five sixths of the layers are shared and few heads pruned; with prune given, no trunk (the paper)."""
    hydra = he.build(image_model(), he.HydraConfig(strategy="random", members=2), **sets())
    assert hydra.config.trunk >= 2
    assert all(sum(len(layer) for layer in member) == 11 for member in hydra.heads)
    settings = he.HydraConfig(prune=3, shared_layers=0, strategy="random", members=2, recipe=recipe())
    apart = he.build(image_model(), settings, **sets())
    assert not torch.equal(*apart.state_dict()[NORM])


def test_a_training_needs_data_and_classifiers_that_differ_and_takes_our_recipe() -> None:
    settings = he.HydraConfig(training="apart")
    assert (settings.recipe, settings.reads_train) == (he.Recipe.preset("hydra"), True)
    together = he.HydraConfig(strategy="branches", training="together")
    with pytest.raises(DataError, match="train"):
        he.build(image_model(), together, **sets(train=None))
    equal = he.HydraConfig(strategy="branches", training="together", recipe=recipe(reinit_classifier="zeros"))
    with pytest.raises(ConfigError, match="random"):
        he.build(image_model(), equal, **sets())
