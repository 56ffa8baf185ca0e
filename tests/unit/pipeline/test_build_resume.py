"""An interrupted build resumes where it stopped, repeats nothing, and gives the same bits."""

import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_cases import batches, image_model, recipe, same, shuffled

import hydra_ensembles as he
from hydra_ensembles.errors import CheckpointError, HydraError
from hydra_ensembles.pipeline import build_data as given
from hydra_ensembles.pipeline import chain
from hydra_ensembles.training.finetune import EnsembleLearner
from processes import count_calls, watch_replacements

TUNING = recipe(steps=3, evaluate_every=2)
CONFIG = he.HydraConfig(prune=2, members=2, method="naive", recipe=TUNING, shared_layers=1, seed=2)  # circuits differ
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
    return he.Ensemble.from_pretrained(finished / "ensemble")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished folder, from which tests delete parts."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    stages = {"extract_circuit": chain, "finetune": chain, "fuse": chain, "calibrate": chain, "prune": given}
    for name, owner in {**stages, "update": EnsembleLearner}.items():
        count_calls(monkeypatch, owner, name, lambda name=name: done.update([name]))
    return done


def delete(folder: Path, *names: str) -> None:
    for name in names:
        for path in folder.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


FUSED = ["ensemble", "fused"]
ONE_MEMBER = {"calibrate": 2, "fuse": 1, "finetune": 1, "prune": 1}
TWO_MEMBERS = {"calibrate": 2, "fuse": 1, "finetune": 2, "prune": 2, "update": 6}


@pytest.mark.parametrize(
    ("gone", "repeated"),
    [
        (["base", "rankings", "finetune", "members", "fused"], {}),
        (["ensemble", "rankings", "members", "finetune"], {"calibrate": 2}),  # the result, and the base for comparison
        ([*FUSED, "members/0", "finetune/member-0"], {**ONE_MEMBER, "update": 3}),
        ([*FUSED, "members", "finetune", "heads.json", "rankings/acc.*"], {**TWO_MEMBERS, "extract_circuit": 1}),
        ([*FUSED, "members", "finetune", "heads.json", "rankings", "base"], {**TWO_MEMBERS, "extract_circuit": 2}),
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
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_kill_between_any_two_writes_can_be_resumed(tmp_path: Path, expected: he.Ensemble, monkeypatch) -> None:
    """Before each rename, copy the state that a kill at that moment would leave, and resume it later.

    For writes that differ only in numbers (members, steps), model cards, and saved models other than members, only
    the first is tried: test_checkpoint_saving.py interrupts saves between any two files.
    """
    folder, left = tmp_path / "run", tmp_path / "left"
    writes: list[str] = []
    kinds: set[str] = set()

    def put_aside(target: Path) -> None:
        writes.append(str(target.relative_to(folder)))
        kind = writes[-1].partition("/")[0] if writes[-1].startswith(("base", *FUSED)) else writes[-1]
        kind = target.name if target.name == "README.md" else re.sub("[0-9]+|acc|avg", "", kind)
        if kind not in kinds:
            shutil.copytree(folder, left / str(len(writes)))
            kinds.add(kind)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", watch_replacements(put_aside))
        assert same(run(folder), expected)
    assert (writes[0], *writes[-2:]) == ("run.json", "summary.json", "run.json")
    assert {name.split("/")[0] for name in writes} == {path.name for path in folder.iterdir()}
    states = sorted(left.iterdir(), key=lambda path: int(path.name))
    assert len(states) > 12
    for state in states:
        assert same(run(state), expected), writes[int(state.name) - 1]
        assert not list(state.rglob(".*")) or state is states[0]  # no temporary files, unless they predate `run.json`


def test_the_folder_of_another_build_is_refused(folder: Path) -> None:
    longer = replace(CONFIG, recipe=recipe(steps=9, evaluate_every=2))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"config": replace(CONFIG, prune=3)}, r"config\.prune was 2 and is 3"),
        ({"config": longer}, r"config\.recipe\.steps"),
        ({"model": model(5)}, r"model\.weights"),
        ({"train": shuffled(16)}, r"data\.train"),
        ({"id": shuffled(16, seed=5)}, r"data\.ranking.*data\.validation"),
        ({"ood": batches(12, seed=3)}, r"data\.ood"),
    ]
    for change, message in changes:
        with pytest.raises(CheckpointError, match=message):
            run(folder, **change)
    run(folder)  # the folder is unchanged


def test_a_damaged_product_is_named_and_made_anew_when_deleted(folder: Path, expected: he.Ensemble) -> None:
    """From the last product to the first, without those that depend on it."""
    for damaged, product, gone in (
        ("members/1/model.safetensors", "members/1", FUSED),
        ("rankings/acc.journal", "rankings/acc.journal", [*FUSED, "members", "heads.json", "rankings/acc.json"]),
    ):
        delete(folder, *gone)
        content = (folder / damaged).read_bytes()
        (folder / damaged).write_bytes(content[: len(content) // 2])
        with pytest.raises(HydraError, match=f"{re.escape(str(folder / product))}.*[Dd]elete"):
            run(folder)
        delete(folder, product)
        assert same(run(folder), expected)
