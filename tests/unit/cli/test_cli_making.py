"""Builds and searches from the command line."""

import math
from pathlib import Path

import pytest
import yaml

import hydra_ensembles as he
from cli_cases import COLOURS, fail, succeed
from hydra_ensembles.cli.making import in_chunks
from hydra_ensembles.training.recipe import DataRecipe


def test_a_build_leaves_settings_that_repeat_it_from_every_folder(run_folder: Path, world: Path, monkeypatch) -> None:
    built = he.load(run_folder)
    assert (built.num_members, built.metadata.labels) == (3, COLOURS)
    assert built.metadata.calibration is not None
    file = run_folder / "config.yaml"
    before = {path: path.stat().st_mtime_ns for path in (run_folder / "ensemble").iterdir()}
    monkeypatch.chdir("/")
    succeed("build", "--config", file, "-q")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert yaml.safe_load(file.read_text())["ood"] == [str(world / "stripes")]
    assert "another run" in fail("build", "--config", file, "--prune", 3, "-q")


def test_texts_are_trained_by_a_recipe_in_batches_no_larger_than_asked(world: Path, tmp_path: Path) -> None:
    sets = ["--id", world / "val.csv", "--train", world / "val.csv"]
    few = ["--strategy", "random", "--prune", 3, "--shared-layers", 0]
    tuning = ["--recipe", "sst2", "--set", "recipe.steps=2", "--batch-size", 5]
    succeed("build", world / "text", *sets, *few, *tuning, "-q", "-o", tmp_path / "run")
    assert any("fine-tuned" in line for line in he.load(tmp_path / "run").metadata.history)
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["recipe"]["steps"] == 2


@pytest.mark.parametrize(("batch", "most", "chunks"), [(127, 64, 2), (128, 64, 2), (129, 64, 3), (32, 64, 1)])
def test_chunks_are_ceil_divided(batch: int, most: int, chunks: int) -> None:
    recipe = in_chunks(DataRecipe(learning_rate=0.1, epochs=1, batch_size=batch), most)
    assert recipe.gradient_accumulation == chunks
    assert math.ceil(batch / chunks) <= most


def test_a_search_leaves_a_choice_that_other_commands_take(world: Path, tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("- {shared_layers: 2, strategy: random, prune: 1}\n")
    sets = ["--id", world / "val", "--ood", world / "stripes", "--cost", 5, "--set", "price=multiply_adds"]
    both = [world / "base", *sets, "--candidates", tmp_path / "few.yaml", "-q", "-o", tmp_path / "search"]
    assert "planned" not in succeed("search", *both, "--dry-run")
    assert not (tmp_path / "search").exists()
    assert "yours" in succeed("search", *both)
    names = {"search.json", "table.md", "config.yaml", "ensemble"}
    assert names <= {path.name for path in (tmp_path / "search").iterdir()}
    assert "members" in succeed("info", tmp_path / "search")
    assert "yours" in succeed("search", "--config", tmp_path / "search" / "config.yaml", "-q")


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (["base", "--id", "val"], "output was not given"),
        (["base", "--id", "val", "--ood", "synthetic", "--ood", "dots", "-o", "new"], "either"),
        (["base", "--id", "val", "-o", "val"], "among the data"),
        (["base", "--id", "val", "--ood", "dots", "-o", "stripes"], "stripes"),
        (["base", "--id", "val", "--ood", "val", "-o", "new"], "other data"),
        (["base", "--id", "val", "--strategy", "best", "-o", "new"], "strategy"),
        (["base", "--id", "val", "--set", "colour=1", "-o", "new"], "colour"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(world: Path, monkeypatch, arguments: list[str], token: str) -> None:
    monkeypatch.chdir(world)
    assert token in fail("build", *arguments, "-q")
    assert not (world / "new").exists() or not (world / "new" / "heads.json").exists()
