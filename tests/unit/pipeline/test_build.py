"""The whole pipeline: what it makes, and what it refuses before it starts."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from build_cases import HEADS, LAYERS, batches, image_model, recipe, same, samples, sets, text_model, text_sets

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from checkpoint_models import same_state
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, HydraError
from hydra_ensembles.metrics.bootstrap import bootstrap_mean
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.pipeline import build_data, chain
from hydra_ensembles.pipeline.settings import Strategy
from zero_shot_models import NAMES, OTHER_NAMES, dual_of

# Taylor prunes one head per layer; on a model this small, the naive circuit search is the fastest.
QUICK: dict[str, Any] = {"prune": LAYERS, "shared_layers": 0, "calibration_batches": 1, "method": "naive"}


def config(**changes: Any) -> he.HydraConfig:
    return he.HydraConfig(**{**QUICK, **changes})


def test_circuits_on_several_sources_and_on_synthetic_data(tmp_path: Path) -> None:
    one = config(members=1, prune=1)
    odd = {"near": batches(6, seed=5, shift=1.0), "far": batches(9, seed=6, shift=3.0)}
    he.build(image_model(), one, output=tmp_path / "several", **sets(ood=odd))
    ranking = he.HeadRanking.load(tmp_path / "several" / "rankings" / "avg.json")
    assert ranking.provenance["ood_sources"] == {"ood_batches['near']": 6, "ood_batches['far']": 9}
    with pytest.raises(CheckpointError, match="data"):
        he.build(image_model(), one, output=tmp_path / "several", **sets(ood={**odd, "far": odd["near"][:1]}))
    for model, given_ in ((image_model(), sets(ood="synthetic")), (text_model(), text_sets(ood="synthetic"))):
        assert he.build(model, one, **given_).metadata.calibration is not None


def test_a_circuit_that_costs_too_much_accuracy_is_no_member() -> None:
    model = image_model()
    with pytest.warns(he.HydraWarning, match="ends after"), pytest.raises(HydraError, match="max_accuracy_loss"):
        he.build(model, config(prune=11, max_accuracy_loss=0.0), **sets(id=right(model, 32)))


@pytest.mark.parametrize(("strategy", "members"), [("taylor", 1), ("sampled", 1), ("circuit", 1), ("circuit", 5)])
def test_other_numbers_of_members(strategy: Strategy, members: int, tmp_path: Path) -> None:
    hydra = he.build(image_model(), config(strategy=strategy, members=members), output=tmp_path, **sets())
    assert (hydra.num_members, len(set(hydra.heads)), hydra.config.trunk) == (members, members, 0)
    if members == 5:  # three circuits, and two draws of a pool that has 100 / 48 of the heads to prune
        drawn = json.loads((tmp_path / "heads.json").read_text())["members"][3:]
        pool = he.HeadRanking.load(tmp_path / "rankings" / "avg.json").first(6)
        assert all({he.Head(*head) for head in member["heads"]} <= set(pool) for member in drawn)


def test_builds_with_neighbouring_seeds_share_no_draw_of_taylor_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, rank = [], chain.taylor
    monkeypatch.setattr(chain, "taylor", lambda *given, **more: drawn.append(more["seed"]) or rank(*given, **more))
    for seed in (0, 1):
        he.build(image_model(), config(strategy="taylor", prune=3, seed=seed), **sets())
    assert len(set(drawn)) == len(drawn) >= 6


@pytest.mark.parametrize(
    ("strategy", "kind", "shared"), [("circuit", "image", 1), ("sampled", "image", 2), ("taylor", "text", 1)]
)
def test_shared_layers_become_the_trunk(strategy: Strategy, kind: str, shared: int) -> None:
    """The trunk is whole, shared and frozen, whatever the recipe trains."""
    base = image_model() if kind == "image" else text_model(seed=1)
    everything = recipe(steps=2, train_groups=("stem", "attention", "mlp", "norms", "readout"))
    asked = config(strategy=strategy, members=2, prune=2 * (LAYERS - shared), shared_layers=shared, recipe=everything)
    hydra = he.build(base, asked, **(sets() if kind == "image" else text_sets()))
    assert hydra.config.trunk >= shared
    assert all(len(layer) == HEADS for member in hydra.heads for layer in member[:shared])
    assert len(set(hydra.heads)) == 2
    assert {sum(map(len, member)) for member in hydra.heads} == {LAYERS * HEADS - asked.prune}
    before, moved = base.state_dict(), 0
    for index in range(2):
        for name, tensor in hydra.member(index).state_dict().items():
            layer = int(name.split(".")[2]) if name.startswith("encoder.") else None
            if name.startswith("stem.") or (layer is not None and layer < shared):
                assert torch.equal(tensor, before[name]), name
            else:
                moved += tensor.shape != before[name].shape or not torch.equal(tensor, before[name])
    assert moved > 10


def test_fine_tuning_is_what_the_parts_do_by_hand() -> None:
    base, data = image_model(), sets(validation=batches(16, seed=4))
    settings = config(strategy="random", members=2, recipe=recipe(), mlp="separate", norms="mean", seed=7)
    hydra = he.build(base, settings, **data)
    tuned = []
    for index, kept in enumerate(hydra.heads):
        gone = [(layer, head) for layer in range(LAYERS) for head in range(HEADS) if head not in kept[layer]]
        pruned = he.prune(base, gone)
        tuned.append(he.finetune(pruned, data["train"], recipe(), data["validation"], progress=False, index=index))
    expected = he.calibrate(he.fuse(tuned, mlp="separate", norms="mean"), data["validation"])
    assert expected.config == hydra.config
    assert same_state(expected, hydra)
    assert expected.metadata.calibration == hydra.metadata.calibration


def test_a_circuit_that_repeats_a_member_goes_on_for_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_order(model: he.Ensemble, *data: Any, score: str, budget: int, **settings: Any) -> he.HeadRanking:
        heads = tuple(he.Head(layer, head) for head in range(2) for layer in range(LAYERS))[:budget]
        return he.HeadRanking(heads, (0.5,) * len(heads), "circuit", score)

    monkeypatch.setattr(chain, "extract_circuit", same_order)
    hydra = he.build(image_model(), config(), **sets())
    assert len(set(hydra.heads)) == 3
    assert {tuple(map(len, member)) for member in hydra.heads} <= {(3, 3, 3), (2, 3, 4), (3, 2, 4)}


WRONG_LABELS = [(samples(4, 0)[0], torch.full((4,), 3))]

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[HydraError], str]] = {
    "no ood": ({}, {"ood": None}, DataError, "needs id and ood"),
    "taylor, no data": ({"strategy": "taylor"}, {"train": None, "id": None}, DataError, "give train or id"),
    "no train": ({"recipe": recipe()}, {"train": None}, DataError, "give train"),
    "nothing to calibrate": ({"strategy": "random"}, {"id": None}, DataError, "turn calibrate off"),
    "ood is id": ({}, {"ood": (same_data := batches(8)), "id": same_data}, DataError, "ood is the same"),
    "trunk": ({"prune": 5, "shared_layers": 2}, {}, ConfigError, "4 heads above the first 2 layers"),
    "recipe by name": ({"recipe": "sst2"}, {}, ConfigError, r"Recipe\.preset\(name\)"),
    "uneven": ({"strategy": "taylor", "prune": 5}, {}, ConfigError, "taylor_scope"),
    "batches": ({"strategy": "taylor", "calibration_batches": 10}, {}, ConfigError, "train has 10 batches"),
    "nothing trains": ({"recipe": recipe(train_groups=("stem",)), "shared_layers": 1}, {}, ConfigError, "train_groups"),
    "wrong train labels": ({"recipe": recipe()}, {"train": WRONG_LABELS}, DataError, "batch 0 of train"),
    "wrong size": ({}, {"ood": [torch.zeros(2, 3, 9, 9)]}, DataError, "first batch of ood"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_work(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, data, error, message = BAD[case]

    for module, name in ((chain, "extract_circuit"), (chain, "taylor"), (build_data, "prune"), (chain, "finetune")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("work has begun")))
    with pytest.raises(error, match=message):
        he.build(image_model(), config(**settings), output=tmp_path, **sets(**data))
    assert not list(tmp_path.iterdir())


def right(model: he.Ensemble, count: int) -> list[Any]:
    """Samples that a model always gets right."""
    with torch.no_grad():
        return [(images, model(images)[0].argmax(-1)) for images, _ in batches(count, 16, seed=2)]


def test_a_result_significantly_below_its_model_is_warned_of(tmp_path: Path) -> None:
    """Most heads of a good model are pruned without retraining: recorded in the history. A few heads are fine."""
    base = image_model()
    spoiling, held = config(prune=11, strategy="random"), {"id": right(base, 60), "progress": False}
    with pytest.warns(he.HydraWarning, match=r"significantly below the model's .*calibrate the model itself"):
        spoilt = he.build(base, spoiling, output=tmp_path, **held)
    assert "significantly" in spoilt.metadata.history[-1]
    assert "30 samples" in spoilt.metadata.history[-1]  # the calibration half
    assert spoilt.metadata.calibration is not None
    with torch.autocast("cpu", torch.bfloat16):  # a caller's, which is ignored
        assert he.build(base, spoiling, **held).metadata == spoilt.metadata
    assert same(spoilt, he.build(base, spoiling, output=tmp_path, **held))
    fine = he.build(base, config(prune=1, strategy="random"), **held)
    assert not any("accuracy" in line for line in fine.metadata.history)


@pytest.mark.filterwarnings("error::hydra_ensembles.errors.HydraWarning")
def test_a_result_whose_likelihood_alone_is_below_its_model_is_warned_of() -> None:
    base = image_model()
    held_out, shy = right(base, 60), base.with_metadata(calibration=Calibration((5.0,)))
    with pytest.warns(he.HydraWarning, match=r"^held-out NLL .* is significantly above the model's .* 60 samples"):
        told = chain.compare_with_base(shy, base, held_out, seed=0)
    assert len(told.metadata.history) == len(base.metadata.history) + 1
    assert chain.compare_with_base(base, shy, held_out, seed=0) is base


def test_samples_without_a_mistake_do_not_say_that_a_surer_model_has_a_lower_nll() -> None:
    """Each sample alone suggests it; on new ones, one mistake of the surer model costs more than all these gain."""
    base = image_model()
    sure, surer = (base.with_metadata(calibration=Calibration((degrees,))) for degrees in (0.05, 0.02))
    pair = chain.Paired.of(surer, sure, right(base, 60))
    assert bool((pair.nll <= pair.nll_before).all())
    seen, allowed = bootstrap_mean(pair.nll - pair.nll_before, seed=0), pair.nll_rise(seed=0)
    assert seen.high < 0 < allowed.high
    assert (allowed.value, allowed.low) == (seen.value, seen.low)


DUAL = next(case for case in DUAL_CASES if case.name == "open_clip-nonscalar")
BOTH_TOWERS = he.HydraConfig(prune=4, strategy="sampled", pool=8, members=3)


def pixels(count: int = 24, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    labels = torch.randint(0, len(NAMES), (count,), generator=generator)
    return list(zip(images.split(8), labels.split(8), strict=True))


def of_clip(model: Any, config: he.HydraConfig = BOTH_TOWERS, **more: Any) -> he.Ensemble:
    return he.build(model, config, id=pixels(), ood=pixels(seed=1), progress=False, **more)


@torch.no_grad()
def test_heads_of_both_towers_are_pruned_or_those_of_the_image_tower_alone(tmp_path: Path) -> None:
    dual, images = dual_of(DUAL), DUAL.pixels()
    ensemble = of_clip(dual, class_names=NAMES, output=tmp_path)
    choices = he.HeadRanking.load(tmp_path / "rankings" / "avg.json")
    assert {head.tower for head in choices.heads} == {"image", "text"}
    assert any("text tower: pruned" in line for line in ensemble.metadata.history)
    towers = zip(ensemble.heads, ensemble.metadata.text_side.settings.tower.heads, strict=True)
    assert [sum(map(len, (*image, *text))) for image, text in towers] == [16 - BOTH_TOWERS.prune] * 3
    again = of_clip(dual, class_names=NAMES, output=tmp_path)
    assert torch.equal(again(images), ensemble(images))
    assert he.retarget(again, OTHER_NAMES)(images).shape == (3, len(images), len(OTHER_NAMES))
    with pytest.raises(CheckpointError, match="templates"):
        of_clip(dual, class_names=NAMES, templates="the {label}", output=tmp_path)
    alone = of_clip(he.zero_shot(dual, NAMES))
    assert [sum(map(len, heads)) for heads in alone.heads] == [8 - BOTH_TOWERS.prune] * 3
    assert alone.metadata.text_side.settings.members == 1


def test_what_cannot_work_of_a_dual_encoder_is_refused() -> None:
    dual = dual_of(DUAL)
    with pytest.raises(ConfigError, match="class_names"):
        of_clip(dual)
    with pytest.raises(ConfigError, match="one tower"):
        of_clip(dual, he.HydraConfig(prune=4, strategy="taylor"), class_names=NAMES)
