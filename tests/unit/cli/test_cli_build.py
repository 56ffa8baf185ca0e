"""`hydra-ensembles build` through its entry point: images and texts, good and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

import hydra_ensembles as he
from cli_cases import COLOURS, fail, run, save_images, succeed, vit_flags


def test_a_build_of_images_leaves_a_calibrated_ensemble_and_its_settings(run_folder, world):
    hydra = he.Ensemble.from_pretrained(run_folder / "ensemble")
    assert hydra.num_members == 3
    assert hydra.metadata.labels == COLOURS  # the model had no names, the folders have
    assert hydra.metadata.calibration is not None
    settings = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert settings["model"] == "timm:test_vit"
    assert settings["model_options"]["img_size"] == 16
    assert settings["prune"] == 4
    assert settings["strategy"] == "circuit"  # defaults are written, too
    assert "hydra-ensembles build --config" in (run_folder / "config.yaml").read_text().splitlines()[0]


def test_the_settings_a_build_wrote_run_it_again(run_folder):
    before = (run_folder / "ensemble" / "model.safetensors").stat().st_mtime_ns
    out = succeed("build", "--config", run_folder / "config.yaml", "--quiet")
    assert "heads kept" in out
    assert f"hydra-ensembles predict {run_folder} IMAGE..." in out
    assert (run_folder / "ensemble" / "model.safetensors").stat().st_mtime_ns == before


def test_flags_win_over_the_file_and_another_build_is_not_overwritten(run_folder, world, tmp_path):
    config = run_folder / "config.yaml"
    says = fail("build", "--config", config, "--members", 2)
    assert "holds another build" in says
    assert "members was 3 and is 2" in says
    assert yaml.safe_load(config.read_text())["members"] == 3
    succeed("build", "-c", config, "--members", 2, "--strategy", "random", "-o", tmp_path / "two", "-q")
    assert yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())["members"] == 2
    assert he.Ensemble.from_pretrained(tmp_path / "two" / "ensemble").num_members == 2


def test_a_build_of_texts(text_folder):
    hydra = he.Ensemble.from_pretrained(text_folder / "ensemble")
    assert hydra.kind == "text"
    assert hydra.metadata.labels == ("negative", "positive")
    assert json.loads((text_folder / "summary.json").read_text())["config"]["strategy"] == "taylor"
    settings = yaml.safe_load((text_folder / "config.yaml").read_text())
    assert settings["batch_size"] == 40 // (2 * 3)  # so that 40 texts give more batches than a ranking reads


def test_a_recipe_fine_tunes(world, tmp_path):
    flags = ["--strategy", "random", "--members", 2, "--prune", 3, "--recipe", "sst2", "--recipe-option", "steps=2",
             "--recipe-option", "learning_rate=1e-3", "--train-batch-size", 8]  # fmt: skip
    sets = ["--id", world / "test.jsonl", "--train", world / "val.csv"]
    succeed("build", world / "bert", *sets, *flags, "--output", tmp_path / "run", "--quiet")
    recipe = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["recipe"]
    assert (recipe["steps"], recipe["epochs"], recipe["learning_rate"]) == (2, None, 0.001)
    history = he.Ensemble.from_pretrained(tmp_path / "run" / "ensemble").metadata.history
    assert any("fine-tuned" in line for line in history)


def test_random_crops_for_training_images(world, tmp_path):
    flags = ["--strategy", "random", "--members", 2, "--prune", 3, "--recipe", "cifar100-classifier",
             "--recipe-option", "steps=1", "--recipe-option", "warmup=0", "--recipe-option", "learning_rate=0.1",
             "--augment", "--train-batch-size", 8, "--limit", 16]  # fmt: skip
    model = vit_flags(world / "mine.safetensors")
    succeed("build", *model, "--id", world / "val", "--train", world / "test", *flags, "-o", tmp_path / "run", "-q")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["augment"] is True
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["samples"]["validation"] == 8


def test_what_is_missing_is_named_by_its_flag(world, tmp_path):
    model = vit_flags(world / "mine.safetensors")
    out = ["--output", tmp_path / "run"]
    assert "no model was given" in fail("build", "--prune", 1, *out)
    assert "--output FOLDER" in fail("build", *model, "--prune", 1)
    assert "--prune N" in fail("build", *model, *out)
    assert "--id DATA" in fail("build", *model, "--prune", 1, *out)
    assert "--ood DATA, or use --strategy taylor" in fail("build", *model, "--prune", 1, "--id", world / "val", *out)
    says = fail("build", *model, "--prune", 1, "--id", world / "val", "--strategy", "random", "--recipe", "sst2", *out)
    assert "--train DATA" in says
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("val", "is among the id data of"),
        ("val/red/run", "is among the id data of"),
        ("stripes/run", "is among the ood data of"),
        ("notes", "has todo.txt, but no run.json"),
    ],
)
def test_a_folder_with_data_or_other_things_is_left_alone(world, tmp_path, output, says):
    for name in ("val", "stripes"):
        shutil.copytree(world / name, tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("")
    before = sorted(tmp_path.rglob("*"))
    model = vit_flags(world / "mine.safetensors")
    sets = ["--id", tmp_path / "val", "--ood", f"{tmp_path / 'stripes'}:train"]
    assert says in fail("build", *model, *sets, "--prune", 3, "-q", "--output", tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before


def test_impossible_settings(world, tmp_path):
    common = [
        *vit_flags(world / "mine.safetensors"),
        "--id",
        world / "val",
        "--strategy",
        "random",
        "-o",
        tmp_path / "r",
    ]
    assert "names the same data as --id" in fail("build", *common, "--prune", 2, "--ood", world / "test" / ".." / "val")
    assert "there are 12 heads" in fail("build", *common, "--prune", 40)
    assert "error: --members must be" in fail("build", *common, "--prune", 2, "--members", 0)
    assert "error: --accepted-share must be" in fail("build", *common, "--prune", 2, "--accepted-share", 2)
    assert "did you mean sst2" in fail("build", *common, "--prune", 2, "--recipe", "sst22")
    assert "unknown setting 'step'; did you mean steps" in fail(
        "build", *common, "--prune", 2, "--recipe", "sst2", "--recipe-option", "step=3"
    )
    assert "there is none; name one with --recipe" in fail("build", *common, "--prune", 2, "--recipe-option", "steps=3")
    assert "name=value" in fail("build", *common, "--prune", 2, "--model-option", "depth")
    assert "crops and flips images" in fail(
        "build", world / "bert", "--id", world / "val.csv", "--train", world / "val.csv", "--recipe", "sst2",
        "--strategy", "random", "--prune", 2, "--augment", "-o", tmp_path / "r"
    )  # fmt: skip
    assert "leave out --weights" in fail(
        "build", world / "bert", "--weights", world / "mine.safetensors", "--prune", 1, "-o", tmp_path / "r"
    )
    result = run("build", *common, "--prune", 2, "--strategy", "best")
    assert result.exit_code == 2
    assert "'circuit', 'taylor', 'sampled', 'random'" in result.stderr


def test_identical_members_are_refused_with_the_flags_that_help(world, tmp_path):
    says = fail("build", "timm:test_vit", "--random-weights", "--num-classes", 3, "--model-option", "img_size=16",
                "--model-option", "patch_size=8", "--id", world / "val", "--ood", world / "stripes", "--limit", 12,
                "--prune", 1, "-q", "--output", tmp_path / "run")  # fmt: skip
    assert "the rankings are kept in" in says
    assert says.endswith("or --strategy sampled")


@pytest.mark.parametrize("case", ["corrupt", "empty", "one class", "other classes", "text"])
def test_wrong_data(world, tmp_path, case):
    data, expected = tmp_path / "data", ""
    if case == "corrupt":
        save_images(data, 2, seed=1)
        (data / "red" / "0.png").write_bytes(Image.open(world / "val" / "red" / "0.png").tobytes()[:20])
        expected = "red/0.png, cannot be decoded as an image"
    elif case == "empty":
        data.mkdir()
        expected = "has no images in class subfolders"
    elif case == "one class":
        save_images(data, 2, seed=1)
        for colour in ("green", "blue"):
            for file in (data / colour).iterdir():
                file.unlink()
            (data / colour).rmdir()
        expected = "at least two classes are needed"
    elif case == "other classes":
        save_images(data, 2, seed=1)
        (data / "yellow").mkdir()
        (data / "red" / "0.png").rename(data / "yellow" / "0.png")
        expected = "data has 4 classes (blue, green, red, yellow), the model 3 without names"
    else:
        data = world / "val.csv"
        expected = "holds texts, but the model reads images"
    model = vit_flags(world / "mine.safetensors")
    says = fail("build", *model, "--id", data, "--strategy", "random", "--prune", 2, "-q", "-o", tmp_path / "run")
    assert expected in says


def test_yaml_with_a_wrong_key_names_the_nearest(world, tmp_path):
    config = tmp_path / "build.yaml"
    config.write_text("model: timm:test_vit\nmenbers: 3\n")
    assert "unknown setting 'menbers'; did you mean members" in fail("build", "--config", config)
    config.write_text("model: [\n")
    assert "not valid YAML" in fail("build", "--config", config)
    config.write_text("- model\n")
    assert "holds a list" in fail("build", "--config", config)
    config.write_text("model: bert\nprune: many\noutput: x\n")
    assert "prune must be of type int, got 'many'" in fail("build", "--config", config)
    config.write_text("model: bert\nprune: 1\noutput: x\nrecipe: {preset: sst2, epoch: 3}\n")
    assert "unknown setting 'epoch'; did you mean epochs" in fail("build", "--config", config)
    assert "cannot be read" in fail("build", "--config", tmp_path / "missing.yaml")


def test_numbers_without_a_point_are_numbers(tmp_path):
    from hydra_ensembles.cli.build_settings import resolve_build

    config = tmp_path / "build.yaml"
    config.write_text("model: m\nprune: 1\noutput: x\nrecipe: {learning_rate: 1e-4, steps: 3, train_groups: [mlp]}\n")
    settings = resolve_build(Path(config), {"recipe_options": {"epochs": 2}})
    assert settings.hydra.recipe is not None
    assert settings.hydra.recipe.learning_rate == 1e-4
    assert (settings.hydra.recipe.steps, settings.hydra.recipe.epochs) == (None, 2)
