"""An interrupted build resumes where it stopped, repeats nothing, and gives the same bits."""

import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from build_cases import batches, image_model, recipe, same, shuffled

import hydra_ensembles as he
from checkpoint_models import same_state
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.pipeline import build as chain
from hydra_ensembles.training.distill import RECIPE
from hydra_ensembles.training.finetune import EnsembleLearner
from processes import count_calls, watch_replacements

TUNING = recipe(steps=3, evaluate_every=2)
CONFIG = he.HydraConfig(prune=2, members=2, recipe=TUNING, shared_layers=1, seed=2)  # circuits differ
GIVEN = {"train": shuffled(12), "id": shuffled(16, 8, seed=2), "ood": batches(8, 8, seed=3, shift=1.5)}


def model(seed: int = 4) -> he.Ensemble:
    """A model of two layers: quick to save, load and train."""
    return image_model(seed, layers=2)


def run(folder: Path | None, **changes: Any) -> he.Ensemble:
    """The build that all tests interrupt; its loaders shuffle."""
    return he.build(**{"model": model(), "config": CONFIG, **GIVEN, "output": folder, "progress": False, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def expected(finished: Path) -> he.Ensemble:
    return he.load(finished / "ensemble")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished folder, from which tests delete parts."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    for name in ("extract_circuit", "finetune", "fuse"):
        count_calls(monkeypatch, chain, name, lambda name=name: done.update([name]))
    count_calls(monkeypatch, EnsembleLearner, "update", lambda: done.update(["update"]))
    return done


def delete(folder: Path, *names: str) -> None:
    for name in names:
        for path in folder.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


BOTH = {"fuse": 1, "finetune": 2, "update": 6}  # members


@pytest.mark.parametrize(
    ("gone", "repeated"),
    [
        (["rankings", "finetune", "members"], {}),
        (["ensemble*", "members/0*", "finetune/member-0"], {"fuse": 1, "finetune": 1, "update": 3}),
        (["ensemble*", "members", "finetune", "heads*", "rankings/acc*"], {**BOTH, "extract_circuit": 1}),
    ],
)
def test_only_what_is_missing_is_made(
    folder: Path, expected: he.Ensemble, work: Counter[str], gone: list[str], repeated: dict[str, int]
) -> None:
    delete(folder, *gone)
    assert same(run(folder), expected)
    assert work == repeated


def test_a_finished_build_is_not_touched_and_the_folder_makes_no_difference(
    folder: Path, expected: he.Ensemble
) -> None:
    assert same(run(None), expected)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    run(folder)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_distillation_goes_on_with_the_members_there_are(tmp_path: Path, work: Counter[str], monkeypatch) -> None:
    together = {"strategy": "branches", "prune": None, "average_trunk": True, "training": "apart", "distill": True}
    config = replace(CONFIG, **together, recipe=recipe(steps=3, train_groups=("stem", "attention", "readout")))
    with monkeypatch.context() as patched:
        patched.setattr(chain, "compare_with_base", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, config=config)
    updates = work["update"]
    taught, members = run(tmp_path, config=config), [he.load(tmp_path / "members" / name) for name in "01"]
    assert (work["finetune"], work["update"]) == (2, updates)
    trained, fused = recipe(steps=3), he.fuse(members, average=1)
    expected = he.distill(fused, members, GIVEN["train"], replace(RECIPE, seed=trained.seed), progress=False)
    assert same_state(taught, expected)


def test_a_kill_between_any_two_writes_can_be_resumed(tmp_path: Path, expected: he.Ensemble, monkeypatch) -> None:
    """Before each rename, copy the state that a kill at that moment would leave, and resume it later.

    Of writes that differ only in numbers (members, steps), the first is tried.
    """
    folder, left = tmp_path / "run", tmp_path / "left"
    writes: list[str] = []
    kinds: set[str] = set()

    def put_aside(target: Path) -> None:
        writes.append(str(target.relative_to(folder)))
        kind = re.sub("[0-9]+|acc|avg", "", writes[-1])
        if kind not in kinds:
            shutil.copytree(folder, left / str(len(writes)))
            kinds.add(kind)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", watch_replacements(put_aside))
        assert same(run(folder), expected)
    assert writes[0] == "run.json"
    states = sorted(left.iterdir(), key=lambda path: int(path.name))
    assert len(states) > 8
    for state in states:
        assert same(run(state), expected), writes[int(state.name) - 1]


def test_the_folder_of_another_build_is_refused(folder: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"config": replace(CONFIG, prune=3)}, "config"),
        ({"model": model(5)}, "model"),
        ({"train": shuffled(16)}, "data"),
        ({"ood": batches(12, seed=3)}, "data"),
    ]
    for change, token in changes:
        with pytest.raises(CheckpointError, match=token):
            run(folder, **change)
    run(folder)  # the folder is unchanged
