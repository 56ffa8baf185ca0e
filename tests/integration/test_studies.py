"""The studies on real models and data, at a size for a CPU: from data to tables."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shared_paths import shared
from studies.__main__ import app
from studies.sets import DataFolder
from studies.suites import overlapping
from studies.tables import read_csv
from studies.zero_shot import ZeroShotTask, zero_shot_recipe


@pytest.fixture
def data() -> Path:
    shared("data")
    return shared("weights").parent


@pytest.mark.slow
def test_a_small_share_of_a_study_on_the_real_model_and_data(data: Path, tmp_path: Path) -> None:
    """Real tokens and weights, three different fine-tunings after a choice of their rate, rows, tables."""
    name = "text-sst2"
    some = ["--share", "0.002", "--seeds", "0", "--methods", "Single;Soup;Hydra", "--stages", "choose,report,tables"]
    ran = CliRunner().invoke(app, ["run", name, "--data", str(data), "-o", str(tmp_path), "--device", "cpu", *some])
    assert ran.exit_code == 0, ran.exception
    told = read_csv(tmp_path / name / "tables" / f"{name}.csv")
    assert {line["method"] for line in told} == {"Single", "Soup", "Hydra"}
    files = sorted((tmp_path / name / "seed-0" / "models").glob("single-*/model.safetensors"))
    assert len({file.read_bytes() for file in files}) == len(files) >= 3


def test_real_images_of_the_zero_shot_study(data: Path) -> None:
    """Class names are unique within each task; the test rows of CIFAR-10 are the second half."""
    sets = ZeroShotTask(zero_shot_recipe(), DataFolder(data), torch.device("cpu")).images_of
    prepared = ("images/cars", "images/cub200", "images/flowers102")  # from `python -m studies prepare`
    listed = [one for one in (*sets.main.tasks, sets.main.id) if one.source not in prepared]
    tasks = {one.name: sets.fewer(sets.load(one), one.name) for one in listed}
    assert all(len(set(task.names)) == len(task.names) for task in tasks.values())
    assert (len(tasks["cifar100"].images), tasks["cifar10"].images.rows.min()) == (10_000, 5000)
    assert sets.circuits()[1].rows.max() < 5000
    inside, _ = sets.image_circuits()
    assert len(inside.names) == 200 + 100 - len(overlapping("cifar100, tinyimagenet", "cifar100"))
    assert np.bincount(inside.images.labels >= 200).tolist() == [300, 300]
