"""Shared data for all tests of the command line; models are made through the command line itself."""

from pathlib import Path

import pytest

import cli_cases as cases


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Foreign models `mine.safetensors` and `bert/`, ours `base/` and `text/`, data, and texts."""
    folder = tmp_path_factory.mktemp("world")
    cases.converted_vit(cases.save_vit(folder / "mine.safetensors"), folder / "base")
    cases.succeed("convert", cases.save_bert(folder / "bert"), "-o", folder / "text")
    cases.save_images(folder / "val", 12, seed=1)
    cases.save_images(folder / "test", 4, seed=2)
    cases.save_stripes(folder / "stripes", 18, seed=3)
    cases.save_stripes(folder / "dots", 6, seed=4)
    cases.save_reviews(folder / "val.csv", 160, seed=5)
    cases.save_reviews(folder / "test.jsonl", 20, seed=6)
    (folder / "news.txt").write_text("long long film\n\nthe dull plot\n")
    return folder


@pytest.fixture(scope="session")
def safe(world: Path) -> Path:
    """The calibrated image model."""
    cases.succeed("calibrate", world / "base", "--data", world / "val", "--share", 0.8, "-o", world / "safe")
    return world / "safe"


@pytest.fixture(scope="session")
def safe_text(world: Path) -> Path:
    """The calibrated text model."""
    cases.succeed("calibrate", world / "text", "--data", world / "val.csv", "-o", world / "safe-text")
    return world / "safe-text"


@pytest.fixture(scope="session")
def run_folder(world: Path) -> Path:
    """A finished build of an image ensemble, with circuits."""
    sets = ["--id", world / "val", "--ood", world / "stripes"]
    few = ["--prune", 4, "--shared-layers", 0, "-q"]  # few heads: quick
    cases.succeed("build", world / "base", *sets, *few, "-o", world / "run")
    return world / "run"
