"""The studies on real models and data, at a size for a CPU: every stage from data to tables."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shared_paths import shared
from studies.__main__ import app
from studies.dual_recipe import load_dual_recipe
from studies.sets import DataFolder, SharedSets, overlapping


@pytest.fixture
def data() -> Path:
    shared("data")
    return shared("weights").parent


@pytest.mark.slow
def test_a_small_share_of_a_study_on_the_real_model_and_data(data: Path, tmp_path: Path) -> None:
    """Real tokens and weights, three different fine-tunings after a choice of their rate, columns, tables."""
    name = "text-sst2"
    places = ["--results", str(tmp_path / "results")]
    some = ["--share", "0.002", "--seeds", "0", "--rows", "Single;Soup;Hydra", "--stages", "train,report,store"]
    options = ["--data", str(data), "--output", str(tmp_path / "runs"), "--device", "cpu", *some, *places]
    ran = CliRunner().invoke(app, ["run", name, *options])
    assert ran.exit_code == 0, ran.exception
    made = CliRunner().invoke(app, ["tables", name, *places])
    assert made.exit_code == 0, made.exception
    assert "| Hydra |" in made.stdout
    files = sorted((tmp_path / "runs" / name / "seed-0" / "models").glob("single-*/model.safetensors"))
    assert {file.parent.name.split("-")[1] for file in files} == {"0", "1", "2"}
    assert len({file.read_bytes() for file in files}) == len(files)


def test_real_images_of_the_zero_shot_study(data: Path) -> None:
    """Class names are unique within each task; the test rows of CIFAR-10 are the second half."""
    recipe = load_dual_recipe()
    sets = SharedSets(DataFolder(data), recipe.counts)
    prepared = ("images/cars", "images/cub200", "images/flowers102")  # from `python -m studies prepare`
    listed = [one for one in (*sets.main.tasks, sets.main.id) if one.source not in prepared]
    tasks = {one.name: sets.fewer(sets.load(one), one.name) for one in listed}
    assert all(len(set(task.names)) == len(task.names) for task in tasks.values())
    assert (len(tasks["cifar100"].images), tasks["cifar10"].images.rows.min()) == (10_000, 5000)
    assert sets.circuits()[1].rows.max() < 5000
    inside, _ = sets.image_circuits()
    assert len(inside.names) == 200 + 100 - len(overlapping("cifar100, tinyimagenet", "cifar100"))
    assert np.bincount(inside.images.labels >= 200).tolist() == [300, 300]
