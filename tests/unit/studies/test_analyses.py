"""The analyses on small models, and what their numbers must be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_studies import SmallTask, small_vit
from torch.nn import functional as F

import hydra_ensembles as he
from studies import analyses
from studies.engine import opened
from studies.noise import expand, experiment, gates_after, measure, pruning_step, random_steps
from studies.tables import read_csv

NAME = "vision-cifar100"
FEW: dict[str, Any] = {
    "samples": 20,
    "training": {"steps": 2, "warmup": 1, "reinit_classifier": None, "clip_norm": None, "rates": {NAME: 0.001}},
    "noise": {"images": 30, "severity": 3, "batch": 30, "random": 2},
    "separation": {"samples": 20},
    "overlap": {"draws": 3},
    "shares": [0.34, 0.67],
    "diversity": {"steps": 2, "pool": 2.0, "tasks": {NAME: {"prune": 0.2, "dropout": 0.1}}},
    "members": {"counts": [1, 2], "pool": 2.0, "batches": [4]},
}
ROWS = {  # some rows that each analysis has, and a number of them
    "untrained": ("CircOOD", "near.fpr95"),
    "noise": ("set CircAvg", "whole.gap_change_second_order"),
    "separation": ("svhn|kept", "mahalanobis"),
    "overlap": ("CircAvg, random heads", "divergence"),
    "shares": ("trained|Taylor|4", "all.auroc"),
    "diversity": ("free: order and noise", "all.disagreement"),
    "members": ("MLPs apart, 2", "ratio.4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("analyses")


@pytest.mark.parametrize("name", analyses.ANALYSES)
def test_every_analysis_ends_in_a_table(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = SmallTask(NAME, analyses=FEW, taylor_batches=1)
    task.plain["recovery"]["prune"] = 4  # heads in each of four layers
    with opened(task, folder / NAME, 0) as lab:
        found = analyses.analyse(name, lab)  # type: ignore[arg-type]
        row, number = ROWS[name]
        if number not in ("mahalanobis", "near.fpr95"):
            assert np.isfinite(found[row][number])
        monkeypatch.setitem(analyses.ANALYSES, name, lambda _: pytest.fail("computed again"))  # type: ignore[arg-type]
        assert analyses.analyse(name, lab) == found  # type: ignore[arg-type]
    lines = read_csv(analyses.write_analysis(name, NAME, {0: found}, folder / "tables"))
    assert [line["row"] for line in lines] == list(found)


def batches(count: int = 3) -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 8, 8, generator=draws), torch.arange(8) % 3) for _ in range(count)]


def test_the_expansion_is_that_of_the_loss_and_full_steps_are_pruning() -> None:
    model = small_vit(layers=2, heads=3).double()
    data = [(inputs.double(), labels) for inputs, labels in batches()]
    expansion = expand(model, data)
    step = random_steps(model, 2, 0)[0]
    small = 1e-3
    losses = [measure(model, gates_after(model, step, share), data)["loss"] for share in (0.0, small)]
    slope = small * (expansion.gradient @ step) + small**2 * expansion.second_order(step)
    assert losses[1] - losses[0] == pytest.approx(float(slope), rel=1e-3)
    heads = [he.Head(*divmod(index, 3)) for index in step.nonzero()[:, 0].tolist()]
    assert torch.equal(pruning_step(model, heads), step)
    pruned = he.prune(model, heads)
    with torch.no_grad():
        wanted = torch.cat([F.cross_entropy(pruned(inputs)[0], labels, reduction="none") for inputs, labels in data])
    assert measure(model, gates_after(model, step), data)["loss"] == pytest.approx(float(wanted.mean()))


def test_without_noise_nothing_widens() -> None:
    model = small_vit(layers=2, heads=3)
    found = experiment(model, {"clean": batches(), "noisy": batches()}, {"one": random_steps(model, 2, 0)[0]}, 2, 2, 0)
    assert found["set one"]["whole.gap_change"] == pytest.approx(0, abs=1e-6)
    assert found["conditions"]["share_curved"] < 1
