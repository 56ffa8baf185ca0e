"""Shared data for all tests of the command line; ensembles are built through the command line itself."""

from pathlib import Path

import pytest

import cli_cases as cases


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine.safetensors`, `bert/`, `val/`, `test/`, `stripes/`, `dots/`, and texts."""
    folder = tmp_path_factory.mktemp("world")
    cases.save_vit(folder / "mine.safetensors")
    cases.save_bert(folder / "bert")
    cases.save_images(folder / "val", 12, seed=1)
    cases.save_images(folder / "test", 4, seed=2)
    cases.save_stripes(folder / "stripes", 18, seed=3)
    cases.save_stripes(folder / "dots", 6, seed=4)
    cases.save_reviews(folder / "val.csv", 160, seed=5)
    cases.save_reviews(folder / "test.jsonl", 20, seed=6)
    (folder / "news.txt").write_text("long long film\n\nthe dull plot\n")
    return folder


@pytest.fixture(scope="session")
def run_folder(world: Path) -> Path:
    """A finished build of an image ensemble, with circuits."""
    folder, sets = world / "run", ["--id", world / "val", "--ood", world / "stripes"]
    naive = ["--prune", 4, "--shared-layers", 0, "--method", "naive", "-q"]  # few heads: quick
    cases.succeed("build", *cases.vit_flags(world / "mine.safetensors"), *sets, *naive, "-o", folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(world: Path) -> Path:
    """A finished build of a text ensemble, with Taylor rankings."""
    folder = world / "text-run"
    flags = ["--strategy", "taylor", "--calibration-batches", 3, "--prune", 3, "--shared-layers", 0, "--quiet"]
    cases.succeed("build", world / "bert", "--id", world / "val.csv", *flags, "--output", folder)
    return folder
