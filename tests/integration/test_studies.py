"""The studies on the real models and data, in counts that a CPU can do: every stage from data to tables."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hydra_ensembles.errors import DataError
from shared_paths import shared
from studies.__main__ import app
from studies.recipe import CLASSIFIERS, load_dual_recipe, load_recipe
from studies.results import Results
from studies.sets import DataFolder, SharedSets, overlapping, suite
from studies.tables import RESULTS


@pytest.fixture
def data() -> Path:
    shared("data")
    return shared("weights").parent


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_tiny_run_on_the_real_model_and_data(name: str, data: Path, tmp_path: Path) -> None:
    if name == "vision-cifar10":
        try:
            DataFolder(data).cifar_folder()
        except DataError as error:
            pytest.skip(str(error))
    places = ["--results", str(tmp_path / "results")]
    options = ["--data", str(data), "--output", str(tmp_path / "runs"), "--tiny", "--device", "cpu", *places]
    ran = CliRunner().invoke(app, ["run", name, *options])
    assert ran.exit_code == 0, ran.exception
    made = CliRunner().invoke(app, ["remake", name, *places])
    assert made.exit_code == 0, made.exception
    assert made.stdout in ran.stdout
    results = Results.load(name, tmp_path / "results")
    sets = suite(load_recipe(name).suite)
    assert results.tasks() == [sets.id.name]
    assert results.outside(sets.id.name, "near", "far", "apart") == [
        one.name for one in (*sets.near, *sets.far, *sets.apart)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_published_tables_follow_from_the_published_columns(name: str) -> None:
    """Every row, contrast and verdict in `results/studies` is made again; one that comes out different raises."""
    made = CliRunner().invoke(app, ["remake", name, "--results", str(RESULTS)])
    assert made.exit_code == 0, made.exception
    assert f"### {name}: main" in made.stdout


def test_text_backbones_of_the_real_model(data: Path, tmp_path: Path) -> None:
    """The fast part of a run: real tokens, real weights, three fine-tunings that differ."""
    options = ["--data", str(data), "--output", str(tmp_path), "--tiny", "--device", "cpu", "--stages", "backbones"]
    ran = CliRunner().invoke(app, ["run", "text-sst2", *options])
    assert ran.exit_code == 0, ran.exception
    files = sorted((tmp_path / "text-sst2" / "seed-0" / "backbones").glob("*/model.safetensors"))
    assert [file.parent.name for file in files] == ["0", "1", "2"]
    assert len({hash(file.read_bytes()) for file in files}) == 3


def test_real_images_of_the_zero_shot_study(data: Path) -> None:
    """Every class of every task has its own name; test rows of CIFAR-10 are the second half."""
    recipe = load_dual_recipe()
    sets = SharedSets(DataFolder(data), recipe.counts)
    prepared = ("images/cars", "images/cub200", "images/flowers102")  # by `python -m studies prepare`
    listed = [one for one in (*sets.main.tasks, sets.main.id) if one.source not in prepared]
    tasks = {one.name: sets.fewer(sets.load(one), one.name) for one in listed}
    assert {name: len(task.names) for name, task in tasks.items()} == {
        "cifar100": 100,
        "caltech101": 101,
        "pets": 37,
        "dtd10": 10,
        "scene15": 15,
        "eurosat": 10,
        "cifar10": 10,
        "tinyimagenet": 200,
    }
    assert len(tasks["cifar100"].images) == 10_000
    assert tasks["cifar10"].images.rows.min() == 5000
    assert sets.circuits()[1].rows.max() < 5000
    inside, _ = sets.image_circuits()
    assert len(inside.names) == 200 + 100 - len(overlapping("cifar100, tinyimagenet", "cifar100"))
    assert np.bincount(inside.images.labels >= 200).tolist() == [300, 300]
