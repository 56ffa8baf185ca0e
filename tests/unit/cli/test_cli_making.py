"""Builds and searches from the command line."""

from pathlib import Path

import hydra_ensembles as he
from cli_cases import COLOURS, fail, succeed


def test_a_build_leaves_a_calibrated_ensemble(run_folder: Path, world: Path) -> None:
    built = he.load(run_folder)
    assert (built.num_members, built.metadata.labels) == (3, COLOURS)
    assert built.metadata.calibration is not None
    sets = ["--id", world / "val", "--ood", world / "stripes"]
    assert "another run" in fail("build", world / "base", *sets, "--prune", 3, "-o", run_folder, "-q")


def test_texts_are_trained_by_a_recipe(world: Path, tmp_path: Path) -> None:
    sets = ["--id", world / "val.csv", "--train", world / "val.csv"]
    few = ["--strategy", "random", "--prune", 3, "--shared-layers", 0]
    tuning = ["--recipe", "sst2", "--set", "recipe.steps=2"]
    succeed("build", world / "text", *sets, *few, *tuning, "-q", "-o", tmp_path / "run")
    assert any("fine-tuned" in line for line in he.load(tmp_path / "run").metadata.history)


def test_a_search_leaves_a_choice_that_other_commands_take(world: Path, tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("- {shared_layers: 2, strategy: random, prune: 1}\n")
    sets = ["--id", world / "val", "--ood", world / "stripes", "--cost", 5, "--set", "price=multiply_adds"]
    both = [world / "base", *sets, "--candidates", tmp_path / "few.yaml", "-q", "-o", tmp_path / "search"]
    assert "planned" not in succeed("search", *both, "--dry-run")
    assert not (tmp_path / "search").exists()
    assert "yours" in succeed("search", *both)
    names = {"search.json", "ensemble"}
    assert names <= {path.name for path in (tmp_path / "search").iterdir()}
    assert "members" in succeed("info", tmp_path / "search")
