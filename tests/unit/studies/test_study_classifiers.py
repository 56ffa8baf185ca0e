"""All stages of a study of classifiers on a small model: what they leave, how they go on, when test sets open."""

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finished_studies import Finished
from small_studies import LAYERS, SmallFolder, classifier_recipe, classifier_runs

import studies
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.members import place_of
from studies import price
from studies.engine import EVALUATED, evaluate, open_test_sets, require_own_record, run_stages
from studies.methods import all_methods, all_units
from studies.recipe import MemberSet, digest_of


@pytest.mark.slow
def test_every_method_of_every_seed_is_evaluated(classifiers: Finished) -> None:
    output, results = classifiers.output, classifiers.results
    run = classifier_runs(output)[0]
    methods = all_methods(run.recipe, run.record())
    assert {"Hydra (Circ)", "Hydra (Circ), shared trunk", "MC Dropout"} <= set(methods)
    assert results.facts["methods"] == {name: list(units) for name, units in methods.items()}
    assert list(results.facts["units"]) == all_units(methods)
    assert set(results.facts["record"].values()) == {digest_of(run.record())}
    task = results.facts["tasks"]["cifar10"]
    assert (task["classes"], task["samples"], list(task["near"])) == (3, 18, ["cifar100"])
    for seed in ("0", "1"):
        assert set(results.facts["temperatures"][seed]) == set(methods)
        assert results.arrays[f"{seed}/cifar10/half B/logits"].shape[1:] == (20, 3)
        assert results.arrays[f"{seed}/cifar10/mnist/logits"].dtype == "float16"


@pytest.mark.slow
def test_members_differ_in_their_heads_only_above_the_trunk(classifiers: Finished) -> None:
    run = classifier_runs(classifiers.output)[0]
    recipe = run.recipe
    for members in (recipe.paper, recipe.taylor, recipe.random, *recipe.explore, *recipe.explore_trunk):
        heads = run.heads(members)
        assert len({frozenset(one) for one in heads}) == recipe.members
        assert all(len(one) == members.prune for one in heads)
        assert min(head.layer for one in heads for head in one) >= max(LAYERS - 2, members.trunk)
    fused = run.model(recipe.explore_trunk[0].units("mean", 3)[0])
    assert fused.config.trunk == recipe.explore_trunk[0].trunk
    backbones = [run.backbone(index) for index in range(3)]
    assert not torch.equal(backbones[0].readout.classifier.weight, backbones[1].readout.classifier.weight)
    averaged = run.model("averaged")
    mean = torch.stack([one.encoder.layers[0].mlp.up.weight for one in backbones]).mean(0)
    torch.testing.assert_close(averaged.encoder.layers[0].mlp.up.weight, mean)
    assert averaged.num_members == 3


def test_above_a_trunk_members_start_from_the_pretrained_model(tmp_path: Path) -> None:
    usual = classifier_recipe()
    far = replace(usual.trainings["backbone"], learning_rate=1e-2)  # a single model far from the pretrained one
    run = classifier_runs(tmp_path, classifier_recipe(trainings={**usual.trainings, "backbone": far}))[0]
    members = MemberSet("circuits", prune=2, trunk=LAYERS - 1, training="fresh", start="pretrained")
    first, second = (run.member(members, index).state_dict() for index in range(2))
    single, pretrained = run.base.state_dict(), run.data.pretrained().state_dict()
    for name, tensor in single.items():
        group, layer = place_of(name)
        if group == "stem" or (layer is not None and layer < members.trunk):
            assert torch.equal(first[name], tensor)
            assert torch.equal(second[name], tensor)
    trained = [name for name in single if name.startswith(f"encoder.layers.{LAYERS - 1}.mlp.")]
    assert trained
    for name in trained:  # one update at a low rate away from the pretrained layer
        assert not torch.equal(first[name], pretrained[name])
        assert (first[name] - pretrained[name]).abs().max() < 0.02 * (first[name] - single[name]).abs().max()
    assert not torch.equal(first["readout.classifier.weight"], second["readout.classifier.weight"])


@pytest.mark.slow
def test_a_second_run_makes_nothing_again(classifiers: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    output, source = classifiers.output, SmallFolder()
    files = [path for path in output.rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    run_stages(classifier_runs(output, source=source))
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert capsys.readouterr().out == ""
    assert not [name for name in source.opened if name.startswith("images/mnist")]  # not even opened


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_results(
    classifiers: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of the test sets, with a member lost: what is missing is made again, the same."""
    output = tmp_path / "run"
    shutil.copytree(classifiers.output, output)
    seed = output / "vision-cifar10" / "seed-1"
    whole = (seed / "columns.npz").read_bytes()
    (seed / "evaluated.json").unlink()
    (seed / "columns.npz").unlink()
    shutil.rmtree(seed / "test")
    member = next((seed / "members").iterdir())
    weights = (member / "model.safetensors").read_bytes()
    shutil.rmtree(member)
    run = classifier_runs(output)[1]
    answers, asked = run.answers, []

    def stopped(unit: str, sets: Any) -> Any:
        asked.append(unit)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answers(unit, sets)

    monkeypatch.setattr(run, "answers", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run)
    assert not (seed / "evaluated.json").exists()
    again = classifier_runs(output)[1]
    evaluate(again)
    assert (seed / "columns.npz").read_bytes() == whole
    for unit in all_units(again.methods()):
        again.model(unit)
    assert (member / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_no_test_set_is_read_before_the_decision(classifiers: Finished, tmp_path: Path) -> None:
    assert classifiers.before == {"npm/train", "images/tinyimagenet/validation"}
    assert {"images/cifar10/test", "images/mnist/test"} <= classifiers.after
    source = SmallFolder()
    with pytest.raises(DataError, match="choose"):
        run_stages(classifier_runs(tmp_path, source=source), ["evaluate"])
    assert not source.opened


@pytest.mark.slow
def test_a_record_that_is_not_this_recipes_opens_nothing(classifiers: Finished, tmp_path: Path) -> None:
    run = classifier_runs(classifiers.output)[0]
    decision = run.record()
    with pytest.raises(DataError, match="before any test set is opened"):
        open_test_sets(run, replace(decision, recipe="another"))
    fresh = classifier_runs(tmp_path)[0]
    fresh.seal(decision)
    assert fresh.record() == decision
    plain = json.loads(fresh.record_path.read_text())
    fresh.record_path.write_text(json.dumps([plain]))
    with pytest.raises(DataError, match="list"):
        fresh.record()
    plain["record"]["scores"]["Hydra (Circ)"] = "energy"
    fresh.record_path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="changed"):
        fresh.record()


def test_one_function_opens_test_sets_and_one_stage_calls_it() -> None:
    """The sets that are reported are named in `test_sets` of each kind, which one function calls, which one calls."""
    callers: dict[str, set[str]] = {"open_test_sets": set(), "test_sets": set(), "evaluate": set()}
    readers = set()
    for path in sorted(
        set(Path(studies.__file__).parent.glob("*.py")) - {Path(price.__file__)}
    ):  # has a test of its own
        for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
                if name in callers:
                    callers[name].add(f"{path.stem}.{function.name}")
                if isinstance(node, ast.Attribute) and node.attr in ("near", "far", "apart"):
                    readers.add(f"{path.stem}.{function.name}")
    assert callers == {
        "open_test_sets": {"engine.make", "engine.evaluate"},
        "test_sets": {"engine.open_test_sets"},
        "evaluate": {"engine.run_stages"},
    }
    assert readers == {"classifier.test_sets", "dual.test_sets"}


@pytest.mark.parametrize("stages", [["choose"], ["train"]])
def test_stages_before_their_time_and_unknown_ones_are_named(tmp_path: Path, stages: list[str]) -> None:
    recipe = classifier_recipe(seeds=(0,))
    with pytest.raises((DataError, ConfigError), match="explored" if stages == ["choose"] else "train"):
        run_stages(classifier_runs(tmp_path, recipe), stages)


def test_numbers_made_under_another_record_are_refused(tmp_path: Path) -> None:
    run = SimpleNamespace(path=tmp_path, record=lambda: {"chosen": 1})
    require_own_record(run)  # nothing is evaluated yet
    (tmp_path / f"{EVALUATED}.json").write_text(json.dumps({"seed": {"record": digest_of({"chosen": 1})}}))
    require_own_record(run)
    run.record = lambda: {"chosen": 2}
    with pytest.raises(DataError, match="another record"):
        require_own_record(run)
