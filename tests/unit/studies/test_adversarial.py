from pathlib import Path

import numpy as np
import pytest
import torch
from small_studies import CLASSES, Pictures, SmallFolder, SmallTask

import hydra_ensembles as he
from hydra_ensembles.data.dataset import ImageDataset
from studies import adversarial
from studies.samples import MEAN, STD
from studies.suites import SetRef
from studies.tables import read_csv


class Larger(SmallFolder):
    """Enough pictures to fit familiarity on a part of them."""

    def load(self, reference: SetRef) -> ImageDataset:
        labels = np.arange(600) % 3
        return ImageDataset(Pictures(labels, len(reference.name)), labels, CLASSES, reference.name)


def test_every_model_is_attacked_within_the_radius(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adversarial, "RISK", 0.98)
    monkeypatch.setattr(adversarial, "STEPS", 5)
    monkeypatch.setattr(adversarial, "RADII", (60,))
    task = SmallTask("vision-cifar100", Larger())
    for _ in range(2):  # a second run replaces the lines
        path = adversarial.write_lines(tmp_path / "found.csv", adversarial.of_task(task, tmp_path / "run", 0, 60))
    lines = read_csv(path)
    assert [line["model"] for line in lines] == [name for name in adversarial.MODELS for _ in range(3)]
    for clean, *after in zip(*[iter(lines)] * 3, strict=True):
        assert all(float(line["accuracy"]) < float(clean["accuracy"]) for line in after)
        assert all(float(line["wrong_accepted"]) > float(clean["wrong_accepted"]) for line in after)

    model = he.load(next((tmp_path / "run").rglob("models/single-0")))
    held = task.batches(task.inside["B"])
    safe = he.calibrate(model, held, risk=0.98, train=task.batches(task.inside["calibrate"]))
    inputs, labels = next(iter(held))
    moved = adversarial.attacked(safe, inputs, labels, 4 / 255, 10.0, (MEAN, STD)) - inputs
    pixels = (inputs + moved) * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert pixels.amin() > -1e-6
    assert pixels.amax() < 1 + 1e-6
    assert (moved.abs() * torch.tensor(STD)[:, None, None]).amax() * 255 == pytest.approx(4, rel=1e-4)
