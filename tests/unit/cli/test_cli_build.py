"""`hydra-ensembles build` and `search` through their entry points: images and texts, bad input, interruptions."""

import json
import re
import shlex
import shutil
import sys
from unittest.mock import Mock

import pytest
import yaml

import hydra_ensembles as he
from cli_cases import COLOURS, fail, run, save_images, succeed, vit_flags
from hydra_ensembles.pipeline import chain


def test_a_build_leaves_a_calibrated_ensemble_and_settings_that_run_it_again(run_folder, text_folder):
    hydra = he.Ensemble.from_pretrained(text_folder / "ensemble")
    assert (hydra.kind, hydra.metadata.labels) == ("text", ("negative", "positive"))
    settings = yaml.safe_load((text_folder / "config.yaml").read_text())
    assert settings["batch_size"] == 160 // (2 * 3)  # so that 160 texts give more batches than a ranking reads
    hydra = he.Ensemble.from_pretrained(run_folder / "ensemble")
    assert (hydra.num_members, hydra.metadata.labels) == (3, COLOURS)  # the names come from the folders
    assert hydra.metadata.calibration is not None
    settings = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert (settings["model"], settings["model_options"]["img_size"]) == ("timm:test_vit", 16)
    assert (settings["prune"], settings["strategy"], settings["batch_size"]) == (4, "circuit", 64)  # also defaults
    assert settings.keys() >= vars(he.HydraConfig()).keys()
    before = (run_folder / "ensemble" / "model.safetensors").stat().st_mtime_ns
    out = succeed("build", "--config", run_folder / "config.yaml", "--quiet")
    assert "heads kept" in out
    assert "(from: timm's pretrained_cfg of test_vit" in out
    assert f"hydra-ensembles predict {shlex.quote(str(run_folder))} IMAGE..." in out
    printed = succeed("build", "--config", run_folder / "config.yaml", "--quiet", "--json")
    assert json.loads(printed) == json.loads((run_folder / "summary.json").read_text())
    assert (run_folder / "ensemble" / "model.safetensors").stat().st_mtime_ns == before


def test_options_win_over_the_file_and_another_build_is_not_overwritten(run_folder, tmp_path):
    config = run_folder / "config.yaml"
    assert "members was 3 and is 2" in fail("build", "--config", config, "--members", 2)
    assert yaml.safe_load(config.read_text())["members"] == 3
    succeed("build", "-c", config, "--members", 2, "--strategy", "random", "-o", tmp_path / "two", "-q")
    assert yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())["members"] == 2
    assert he.Ensemble.from_pretrained(tmp_path / "two" / "ensemble").num_members == 2


def test_a_recipe_of_a_file_is_changed_by_options_and_batches_are_no_larger_than_asked(world, tmp_path):
    """An update keeps its number of samples by reading more batches; files record the requested settings."""
    recipe = {"learning_rate": 0.1, "steps": 1, "batch_size": 8, "train_groups": ["mlp"]}
    recipe |= {"rand_augment": {"operations": 2, "magnitude": 9}}
    (tmp_path / "build.yaml").write_text(yaml.safe_dump({"recipe": recipe}))
    flags = "--strategy random --members 2 --prune 3 --shared-layers 0 --limit 8 --batch-size 5"
    flags += " --set recipe.steps=2 --set recipe.batch_size=6"
    files = ["-c", tmp_path / "build.yaml", "--id", world / "val", "--train", world / "test", "-o", tmp_path / "run"]
    succeed("build", *vit_flags(world / "mine.safetensors"), *flags.split(), *files, "-q")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    recipe = settings["recipe"]
    assert (recipe["steps"], recipe["batch_size"], recipe["learning_rate"]) == (2, 6, 0.1)
    assert (settings["batch_size"], recipe["gradient_accumulation"]) == (5, 1)
    assert recipe.keys() == vars(he.Recipe(learning_rate=0.1, steps=1)).keys()
    assert summary["config"]["recipe"]["gradient_accumulation"] == 2  # batches of 3
    assert summary["samples"]["validation"] == 4
    history = he.Ensemble.from_pretrained(tmp_path / "run" / "ensemble").metadata.history
    assert any("fine-tuned" in line for line in history)


@pytest.mark.parametrize(("recipe", "augmented"), [("imagenet", 12), ("cifar100-last5", None), ("hydra", False)])
def test_recipes_of_the_paper_train_on_the_images_that_it_prints(world, tmp_path, monkeypatch, recipe, augmented):
    """Random crops and flips, with RandAugment for ImageNet-1K, resized as by the model; ours does not augment."""
    given = []

    def watched(model, config, **settings):
        given.append((settings["id"].preprocess, settings["train"].preprocess))
        raise he.errors.DataError("seen")

    monkeypatch.setattr("hydra_ensembles.cli.build.build_ensemble", watched)
    flags = ["--id", world / "val", "--train", world / "test", "--strategy", "random", "--recipe", recipe, "-p", 3]
    model = [*vit_flags(world / "mine.safetensors"), "--interpolation", "lanczos"]
    assert "seen" in fail("build", *model, *flags, "--stem", "mean", "-o", tmp_path / "run")
    plain, train = given[0]
    if augmented is False:
        assert train == plain
        return
    assert (train.size, train.crop_scale, train.flip_probability) == (plain.size, (0.08, 1.0), 0.5)
    assert train.interpolation == plain.interpolation == "lanczos"
    assert (train.rand_augment and train.rand_augment.magnitude) == augmented


def test_a_folder_with_data_or_other_things_is_left_alone(world, tmp_path):
    for name in ("val", "stripes"):
        shutil.copytree(world / name, tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("")
    before = sorted(tmp_path.rglob("*"))
    model = vit_flags(world / "mine.safetensors")
    flags = ["--id", tmp_path / "val", "--ood", f"{tmp_path / 'stripes'}:train", "--prune", 3, "--shared-layers", 0]
    for output, says in (
        ("val", "blue, green, red"),
        ("stripes/run", "is among the ood data of"),
        ("notes", "has todo.txt, but no run.json"),
    ):
        assert says in fail("build", *model, *flags, "-q", "--output", tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_build_says_how_to_go_on_and_so_do_its_settings(world, tmp_path, monkeypatch):
    """What goes on, and that the bits are the same, is in test_build_resume.py; `search` keeps its work alike."""
    folder = tmp_path / "run"
    flags = ["--id", world / "val", "--strategy", "random", "-p", 2, "--shared-layers", 0, "-o", folder, "-q"]
    with monkeypatch.context() as patched:
        patched.setattr(chain, "fuse", Mock(side_effect=KeyboardInterrupt))
        patched.setattr(sys, "argv", ["hydra-ensembles", "build", "my model"])
        result = run("build", *vit_flags(world / "mine.safetensors"), *flags)
    assert result.exit_code == 130
    assert re.match(f"interrupted: .* kept in {folder}; .*: hydra-ensembles build 'my model'$", result.stderr)
    assert not (folder / "ensemble").exists()
    succeed("build", "--config", folder / "config.yaml", "--quiet")
    assert he.Ensemble.from_pretrained(folder / "ensemble").num_members == 3


CANDIDATES = [
    {"shared_layers": 2, "strategy": "random", "prune": 1},
    {"shared_layers": 2, "strategy": "branches", "training": "together"},
]
STEPS = ["--recipe", "hydra", "--set", "recipe.steps=2", "--set", "recipe.batch_size=8"]


@pytest.fixture(scope="module")
def flags(world, tmp_path_factory) -> list[str]:
    """A search of two candidates, without `--output`."""
    folder = tmp_path_factory.mktemp("candidates")
    (folder / "candidates.yaml").write_text(yaml.safe_dump(CANDIDATES))
    train = save_images(folder / "train", 4, seed=7)
    sets = ["--id", world / "val", "--ood", world / "stripes", "--train", train]
    settings = ["--candidates", folder / "candidates.yaml", "--price", "multiply_adds", "--cost", 3, *STEPS, "--quiet"]
    return [*vit_flags(world / "mine.safetensors"), *map(str, [*sets, *settings])]


@pytest.fixture(scope="module")
def searched(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched") / "search"
    return folder, succeed("search", *flags, "--output", folder)


def test_a_search_leaves_a_choice_that_other_commands_take_and_settings_that_read_it_back(searched, world) -> None:
    folder, out = searched
    found = he.SearchResult.load(folder / "search.json")
    assert [row.state for row in found.rows] == ["judged"] * 3
    assert found.choice in out
    assert found.why in (folder / "table.md").read_text()
    assert (folder / "front.svg").read_text().startswith("<svg ")
    assert "label" in succeed("predict", folder, world / "test", "--format", "csv")
    assert "heads kept" in succeed("info", folder)
    before = (folder / "search.json").stat().st_mtime_ns
    assert "→" in succeed("search", "--config", folder / "config.yaml", "--quiet")
    printed = json.loads(succeed("search", "--config", folder / "config.yaml", "--quiet", "--json"))
    assert (printed["choice"], (folder / "search.json").stat().st_mtime_ns) == (found.choice, before)


def test_a_plan_writes_nothing_and_without_ood_data_some_are_made_and_called_so(flags, tmp_path) -> None:
    place = flags.index("--ood")
    given = [*flags[:place], "--ood", "synthetic", *flags[place + 2 :], "--output", tmp_path / "new"]
    assert json.loads(succeed("search", *given, "--dry-run", "--json"))["samples"].keys() == {"ID", "synthetic"}
    assert not (tmp_path / "new").exists()


def test_bad_candidates_and_data_given_twice_are_refused(flags, world, tmp_path) -> None:
    place = tmp_path / "bad.yaml"
    for content, token in (("- {trunk: 3}", "trunk"), ("a: 1", "list")):
        place.write_text(content)
        assert token in fail("search", *flags, "--candidates", place, "--output", tmp_path / "run")
    for option, value, token in (("--judge-ood", world / "stripes", "same data"), ("--ood", "synthetic", "not both")):
        assert token in fail("search", *flags, option, value, "--output", tmp_path / "run")
