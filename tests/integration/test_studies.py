"""The studies on real models and data, at a size for a CPU: every stage from data to tables."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from shared_paths import shared
from studies.__main__ import app
from studies.dual_recipe import load_dual_recipe
from studies.sets import DataFolder, SharedSets, overlapping
from studies.task import recipe


@pytest.fixture
def data() -> Path:
    shared("data")
    return shared("weights").parent


@pytest.fixture
def prepared(data: Path, tmp_path: Path) -> Path:
    """The shared folder, with a few TinyImageNet training images as a stand-in for each split."""
    folder = tmp_path / "shared" / "data" / "images"
    folder.mkdir(parents=True)
    for one in (data / "data" / "images").iterdir():
        if one.name != "tinyimagenet":
            (folder / one.name).symlink_to(one)
    (folder.parent / "text").symlink_to(data / "data" / "text")
    (tmp_path / "shared" / "weights").symlink_to(data / "weights")
    (folder / "tinyimagenet").mkdir()
    whole = data / "data" / "images" / "tinyimagenet"
    for name, source in {"train-0": "train", **{one: one for one in ("train", "validation", "test")}}.items():
        (folder / "tinyimagenet" / f"{name}.parquet").symlink_to(whole / f"{source}.parquet")
    some = pq.read_table(whole / "train.parquet").slice(0, 64)
    for place in range(1, 5):
        pq.write_table(some, folder / "tinyimagenet" / f"train-{place}.parquet")
    return tmp_path / "shared"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vision-tinyimagenet", "text-sst2"])
def test_a_small_share_of_a_study_on_the_real_model_and_data(
    name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real tokens or images, real weights, three different fine-tunings, columns, tables.

    A trial has four images per class, 800 per set: at 28 pixels a side, a CPU needs minutes.
    """
    settings = recipe()
    if name.startswith("vision"):
        settings["tasks"][name]["input_size"] = 28
    monkeypatch.setattr("studies.__main__.recipe", lambda: settings)
    places = ["--results", str(tmp_path / "results")]
    some = ["--share", "0.002", "--seeds", "0", "--rows", "Single;Soup;Hydra", "--stages", "train,report,store"]
    options = ["--data", str(prepared), "--output", str(tmp_path / "runs"), "--device", "cpu", *some, *places]
    ran = CliRunner().invoke(app, ["run", name, *options])
    assert ran.exit_code == 0, ran.exception
    made = CliRunner().invoke(app, ["tables", name, *places])
    assert made.exit_code == 0, made.exception
    assert "| Hydra |" in made.stdout
    files = sorted((tmp_path / "runs" / name / "seed-0" / "models").glob("single-*/model.safetensors"))
    assert len({hash(file.read_bytes()) for file in files}) == 3


def test_real_images_of_the_zero_shot_study(data: Path) -> None:
    """Class names are unique within each task; the test rows of CIFAR-10 are the second half."""
    recipe = load_dual_recipe()
    sets = SharedSets(DataFolder(data), recipe.counts)
    prepared = ("images/cars", "images/cub200", "images/flowers102")  # from `python -m studies prepare`
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
