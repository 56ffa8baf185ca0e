"""The whole chain: what it makes, and what it refuses before it starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from build_cases import (
    CLASSES,
    HEADS,
    LAYERS,
    batches,
    image_model,
    recipe,
    same,
    sets,
    text_model,
    text_sets,
)
from hypothesis import given
from hypothesis import strategies as st

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from checkpoint_models import same_state
from hydra_ensembles.errors import ConfigError, DataError, HydraError
from hydra_ensembles.model.member_states import place_of
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.pipeline import build as chain
from hydra_ensembles.pipeline import settings as settled
from hydra_ensembles.pipeline.build import halves, read_for_build, samples_in
from hydra_ensembles.pipeline.settings import ReadBatch, Strategy
from zero_shot_models import NAMES, dual_of

# Taylor prunes one head per layer; on a model this small, the naive circuit search is the fastest.
QUICK: dict[str, Any] = {"prune": LAYERS, "shared_layers": 0, "calibration_batches": 1}
EVERYTHING = ("stem", "attention", "mlp", "norms", "readout")
NORM = "encoder.layers.0.norm1.weight"


def config(**changes: Any) -> he.HydraConfig:
    return he.HydraConfig(**{**QUICK, **changes})


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1),
    seed=st.integers(0, 99),
)
def test_halves_share_nothing_and_leave_nothing_out(sizes: list[int], seed: int) -> None:
    def numbered(sizes: list[int]) -> list[ReadBatch]:
        numbers = torch.arange(sum(sizes))  # each pixel and label is the sample's index
        return [(part.float().view(-1, 1, 1, 1), part) for part in numbers.split(sizes)]

    first, second = halves(numbered(sizes), seed)
    one, two = ([int(label) for _, labels in half for label in labels] for half in (first, second))  # type: ignore[union-attr]
    assert sorted(one + two) == list(range(sum(sizes)))
    assert len(one) - len(two) in (0, 1)
    for inputs, labels in first + second:
        assert torch.equal(inputs.flatten(), labels.float())  # each with its own label
    cut_otherwise = numbered([sum(sizes)])
    assert torch.cat([labels for _, labels in halves(cut_otherwise, seed)[0]]).tolist() == one  # type: ignore[misc]
    assert not cut_otherwise  # samples are not in memory twice


def test_held_out_data_have_a_role_each() -> None:
    known, few, many = (batches(count, seed=seed) for count, seed in ((20, 1), (5, 2), (8, 3)))

    def read(**given: Any) -> dict[str, int]:
        usual = {"train": None, "id": known, "ood": None, "validation": None}
        held_out = read_for_build(0, image_model(), **{**usual, **given}).held_out
        return {name: samples_in(batches or []) for name, batches in held_out.items()}

    sizes = {"ranking": 10, "validation": 10}
    assert read(ood={"few": few, "many": many}) == {**sizes, "ood['few']": 5, "ood['many']": 8}
    assert read(ood="synthetic") == {**sizes, "ood": 10}
    assert read(ood=iter(few), validation=many) == {"ranking": 20, "validation": 8, "ood": 5}
    for wrong in ({"ood": known}, {"validation": known}, {"id": known[:0]}):
        with pytest.raises(DataError):
            read(**wrong)


@pytest.mark.parametrize(("strategy", "members"), [("taylor", 1), ("sampled", 2), ("circuit", 5)])
def test_every_member_loses_other_heads(strategy: Strategy, members: int, tmp_path: Path) -> None:
    hydra = he.build(image_model(), config(strategy=strategy, members=members), output=tmp_path, **sets())
    assert (hydra.num_members, len(set(hydra.heads)), hydra.config.trunk) == (members, members, 0)
    assert {sum(map(len, member)) for member in hydra.heads} == {LAYERS * HEADS - LAYERS}
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert {name.partition(".")[0] for name in names} <= {"run", "heads", "rankings", "members", "ensemble"}


@pytest.mark.parametrize(("strategy", "kind", "shared"), [("circuit", "image", 1), ("taylor", "text", 1)])
def test_shared_layers_become_the_trunk(strategy: Strategy, kind: str, shared: int) -> None:
    """The trunk is whole, shared and frozen, whatever the recipe trains."""
    base = image_model() if kind == "image" else text_model(seed=1)
    tuning = recipe(steps=2, train_groups=EVERYTHING)
    asked = config(strategy=strategy, members=2, prune=2 * (LAYERS - shared), shared_layers=shared, recipe=tuning)
    hydra = he.build(base, asked, **(sets() if kind == "image" else text_sets()))
    assert hydra.config.trunk >= shared
    assert all(len(layer) == HEADS for member in hydra.heads for layer in member[:shared])
    before, moved = base.state_dict(), 0
    for index in range(2):
        for name, tensor in hydra.member(index).state_dict().items():
            group, layer = place_of(name)
            if group == "stem" or (layer is not None and layer < shared):
                assert torch.equal(tensor, before[name]), name
            else:
                moved += tensor.shape != before[name].shape or not torch.equal(tensor, before[name])
    assert moved > 10


def test_a_build_is_what_the_parts_do_by_hand() -> None:
    """Also of a model that was calibrated before: its metrics are its own, not those of the members."""
    base, data = image_model(), sets(validation=batches(16, seed=4))
    settings = config(strategy="random", members=2, recipe=recipe(), mlp="separate", norms="mean", seed=7)
    hydra = he.build(base, settings, **data)
    tuned = []
    for index, kept in enumerate(hydra.heads):
        gone = [(layer, head) for layer in range(LAYERS) for head in range(HEADS) if head not in kept[layer]]
        pruned = he.prune(base, gone)
        tuned.append(he.finetune(pruned, data["train"], recipe(), data["validation"], progress=False, index=index))
    familiar = he.fit_familiarity(he.fuse(tuned, mlp="separate", norms="mean"), data["id"], held_out=0.0, seed=7)
    expected = he.calibrate(familiar, data["validation"])
    assert same_state(expected, hydra)
    assert expected.config == hydra.config
    assert expected.metadata.calibration == hydra.metadata.calibration
    measured = base.with_metadata(calibration=Calibration(2.0), metrics={"validation/nll": 9.0, "mine": 1.0})
    again = he.build(measured, replace(settings, recipe=None, calibrate=False), **data)
    assert (again.metadata.metrics, again.metadata.calibration) == ({}, None)


def test_a_circuit_that_repeats_a_member_goes_on_for_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_order(model: he.Ensemble, *data: Any, score: str, budget: int, **settings: Any) -> he.HeadRanking:
        heads = tuple(he.Head(layer, head) for head in range(2) for layer in range(LAYERS))[:budget]
        return he.HeadRanking(heads, (0.5,) * len(heads), "circuit", score)

    monkeypatch.setattr(chain, "extract_circuit", same_order)
    hydra = he.build(image_model(), config(), **sets())
    assert len(set(hydra.heads)) == 3
    assert {tuple(map(len, member)) for member in hydra.heads} <= {(3, 3, 3), (2, 3, 4), (3, 2, 4)}


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_build_that_trains_together(kind: str, tmp_path: Path) -> None:
    base, data = (image_model(), sets()) if kind == "image" else (text_model(), text_sets())
    tuning = recipe(train_groups=EVERYTHING)
    common: dict[str, Any] = {"strategy": "random", "prune": 3, "training": "together", "shared_layers": 1}
    settings = he.HydraConfig(**common, recipe=tuning)
    hydra = he.build(base, settings, output=tmp_path, **data)
    assert (hydra.num_members, hydra.config.trunk) == (3, 1)
    assert {sum(map(len, member)) for member in hydra.heads} == {LAYERS * HEADS - 3}
    assert not torch.equal(hydra.state_dict()[NORM], base.state_dict()[NORM])
    assert same(hydra, he.build(base, settings, **data))


def test_branches_start_equal_and_training_makes_them_differ() -> None:
    base = image_model(seed=4)
    settings = he.HydraConfig(strategy="branches", training="together", shared_layers=2, recipe=recipe(steps=3))
    hydra = he.build(base, settings, **sets())
    assert (hydra.config.trunk, set(hydra.heads)) == (2, set(base.heads))
    state = hydra.state_dict()
    attention = state[f"encoder.layers.{LAYERS - 1}.attention.out"].chunk(3)  # one chunk per member
    classifiers = state["readout.classifier.weight"]  # [M, C, d]
    assert classifiers.shape[:2] == (3, CLASSES)
    assert not any(torch.equal(parts[i], parts[i + 1]) for parts in (attention, classifiers) for i in range(2))


def test_a_mean_trunk_is_trained_by_every_member(tmp_path: Path) -> None:
    base, data = image_model(seed=4), sets()
    chosen = {"training": "apart", "average_trunk": True, "shared_layers": 2, "calibrate": False}
    tuning = recipe(steps=2, train_groups=EVERYTHING)
    settings = he.HydraConfig(strategy="branches", recipe=tuning, **chosen)
    hydra = he.build(base, settings, output=tmp_path, **data)
    members = [he.load(tmp_path / "members" / str(index)) for index in range(3)]
    assert not torch.equal(members[0].state_dict()[NORM], members[1].state_dict()[NORM])  # trunks were trained
    assert same(hydra, he.fuse(members, average=2))
    assert hydra.config.trunk == 2


def test_pruned_members_learn_their_heads_back_without_labels() -> None:
    base, data = image_model(), sets()
    settings = config(strategy="random", members=2, prune=4, shared_layers=1, calibrate=False)
    plain = he.build(base, settings, **data).state_dict()
    taught = he.build(base, replace(settings, distill=True), **data)
    assert taught.metadata.history[-1].startswith("distilled ")
    moved = {place_of(name) for name, tensor in taught.state_dict().items() if not torch.equal(tensor, plain[name])}
    assert {layer for _, layer in moved} == {1, 2, None}
    assert "stem" not in {group for group, _ in moved}
    mislabelled = [(images, 0 * labels) for images, labels in data["train"]]
    assert same_state(taught, he.build(base, replace(settings, distill=True), **{**data, "train": mislabelled}))
    with pytest.raises(DataError, match="distilling"):
        he.build(base, replace(settings, distill=True), **{**data, "train": None})


def test_what_is_left_open_follows_the_model() -> None:
    """By default five sixths of the layers are shared and few heads pruned; with prune given, no trunk (the paper)."""
    hydra = he.build(image_model(), he.HydraConfig(strategy="random", members=2), **sets())
    assert hydra.config.trunk >= 2
    assert all(sum(len(layer) for layer in member) == 11 for member in hydra.heads)
    with pytest.warns(he.HydraWarning, match="shared_layers"):
        he.build(image_model(), he.HydraConfig(prune=3, strategy="random", members=2), **sets())


# --- refusals and warnings --------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[HydraError]]] = {
    "no ood": ({}, {"ood": None}, DataError),
    "taylor, no data": ({"strategy": "taylor"}, {"train": None, "id": None}, DataError),
    "no train": ({"recipe": recipe()}, {"train": None}, DataError),
    "nothing to calibrate": ({"strategy": "random"}, {"id": None}, DataError),
    "ood is id": ({}, {"ood": (same_data := batches(8)), "id": same_data}, DataError),
    "no heads above the trunk": ({"prune": 5, "shared_layers": 2}, {}, ConfigError),
    "no layer above the trunk": ({"prune": 5, "shared_layers": LAYERS}, {}, ConfigError),
    "nothing trains": ({"recipe": recipe(train_groups=("stem",)), "shared_layers": 1}, {}, ConfigError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_work(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, data, error = BAD[case]
    for module, name in ((chain, "extract_circuit"), (chain, "taylor"), (settled, "prune"), (chain, "finetune")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("work has begun")))
    with pytest.raises(error):
        he.build(image_model(), config(**settings), output=tmp_path, **sets(**data))
    assert not list(tmp_path.iterdir())


def right(model: he.Ensemble, count: int) -> list[Any]:
    """Samples that a model always gets right."""
    with torch.no_grad():
        return [(images, model(images)[0].argmax(-1)) for images, _ in batches(count, 16, seed=2)]


def test_a_result_significantly_below_its_model_is_warned_of() -> None:
    """Most heads of a good model are pruned without retraining: recorded in the history. A few heads are fine."""
    base = image_model()
    spoiling, held = config(prune=11, strategy="random"), {"id": right(base, 60), "progress": False}
    with pytest.warns(he.HydraWarning, match="significantly worse.* accuracy"):
        spoilt = he.build(base, spoiling, **held)
    assert "significantly" in spoilt.metadata.history[-1]
    with torch.autocast("cpu", torch.bfloat16):  # a caller's, which is ignored
        assert he.build(base, spoiling, **held).metadata == spoilt.metadata
    fine = he.build(base, config(prune=1, strategy="random"), **held)
    assert not any("accuracy by" in line for line in fine.metadata.history)


def test_samples_without_a_mistake_do_not_say_that_a_surer_model_has_a_lower_nll() -> None:
    """Each sample alone suggests it; on new ones, one mistake of the surer model costs more than all these gain."""
    base = image_model()
    sure, surer = (base.with_metadata(calibration=Calibration(degrees)) for degrees in (0.05, 0.02))
    gain, rise = chain.differences(surer, sure, right(base, 60), seed=0)
    assert gain.value == 0
    assert rise.value <= 0 < rise.high


def test_of_a_dual_encoder_the_zero_shot_classifier_is_built() -> None:
    dual = dual_of(next(case for case in DUAL_CASES if case.name == "open_clip-nonscalar"))
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [(torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % len(NAMES))] * 3 for _ in range(2)
    )
    config = he.HydraConfig(prune=4, strategy="sampled", pool=8, members=3)
    alone = he.build(he.zero_shot(dual, NAMES), config, id=first, ood=second, progress=False)
    assert [sum(map(len, heads)) for heads in alone.heads] == [8 - 4] * 3
    with pytest.raises(ConfigError, match="zero_shot"):
        he.build(dual, config, id=first, ood=second)
