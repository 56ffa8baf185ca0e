"""A build that was stopped goes on where it was, does nothing twice, and ends with the same bits."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from build_cases import batches, image_model, recipe, same, shuffled
from killed_build import CONFIG, run, watch_replacements

import hydra_ensembles as he
from hydra_ensembles.errors import CheckpointError, HydraError
from hydra_ensembles.pipeline import chain
from hydra_ensembles.pipeline import chain as choose
from hydra_ensembles.pipeline import given as start
from hydra_ensembles.pipeline.run_folder import require_own_folder
from hydra_ensembles.training.finetune import Learner


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build that nobody stopped."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def expected(finished: Path) -> he.Ensemble:
    return he.Ensemble.from_pretrained(finished / "ensemble")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished folder, for a test to take things away from."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each stage works."""
    done: Counter[str] = Counter()

    def counted(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            done[label] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapper)

    counted(choose, "extract_circuit", "rank")
    counted(start, "prune", "prune")
    for name in ("finetune", "fuse", "calibrate"):
        counted(chain, name, name)
    counted(Learner, "update", "update")
    return done


def delete(folder: Path, *names: str) -> None:
    for name in names:
        for path in folder.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("gone", "repeated"),
    [
        ([], {}),
        (["summary.json"], {}),
        (["base", "rankings", "finetune", "members", "fused"], {}),
        (["ensemble", "summary.json"], {"calibrate": 1}),
        (["ensemble", "rankings", "members", "finetune"], {"calibrate": 1}),
        (["ensemble", "fused"], {"calibrate": 1, "fuse": 1}),
        (["ensemble", "fused", "members/1"], {"calibrate": 1, "fuse": 1, "finetune": 1, "prune": 1}),
        (
            ["ensemble", "fused", "members/0", "finetune/member-0"],
            {"calibrate": 1, "fuse": 1, "finetune": 1, "prune": 1, "update": 3},
        ),
        (
            ["ensemble", "fused", "members", "finetune"],
            {"calibrate": 1, "fuse": 1, "finetune": 2, "prune": 2, "update": 6},
        ),
        (
            ["ensemble", "fused", "members", "finetune", "heads.json"],
            {"calibrate": 1, "fuse": 1, "finetune": 2, "prune": 2, "update": 6},
        ),
        (
            ["ensemble", "fused", "members", "finetune", "heads.json", "rankings/acc.*"],
            {"calibrate": 1, "fuse": 1, "finetune": 2, "prune": 2, "update": 6, "rank": 1},
        ),
        (
            ["ensemble", "fused", "members", "finetune", "heads.json", "rankings", "base", "summary.json"],
            {"calibrate": 1, "fuse": 1, "finetune": 2, "prune": 2, "update": 6, "rank": 2},
        ),
    ],
)
def test_only_what_is_missing_is_made(
    folder: Path, expected: he.Ensemble, work: Counter[str], gone: list[str], repeated: dict[str, int]
) -> None:
    delete(folder, *gone)
    assert same(run(folder), expected)
    assert work == repeated
    assert same(he.Ensemble.from_pretrained(folder / "ensemble"), expected)


def test_the_folder_makes_no_difference(expected: he.Ensemble) -> None:
    assert same(run(None), expected)


def test_a_finished_build_is_not_touched(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_summary_made_later_says_the_same(finished: Path, folder: Path) -> None:
    delete(folder, "summary.json")
    run(folder)
    assert json.loads((folder / "summary.json").read_text()) == json.loads((finished / "summary.json").read_text())


def test_a_kill_between_any_two_writes_can_be_resumed(
    tmp_path: Path, expected: he.Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each rename, what a kill at that moment would leave on the disk is put aside, and resumed later.

    Of writes that differ in numbers only (members, steps), and of model cards, the first one stands for all.
    """
    folder, left = tmp_path / "run", tmp_path / "left"
    writes: list[str] = []
    kinds: set[str] = set()

    def put_aside(target: Path) -> None:
        writes.append(str(target.relative_to(folder)))
        kind = target.name if target.name in ("README.md", "seconds.json") else re.sub("[0-9]+|acc|avg", "", writes[-1])
        if kind not in kinds:
            shutil.copytree(folder, left / str(len(writes)))
            kinds.add(kind)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", watch_replacements(put_aside))
        assert same(run(folder), expected)
    assert (writes[0], writes[-1]) == ("run.json", "summary.json")
    assert {name.split("/")[0] for name in writes} == {path.name for path in folder.iterdir()}
    states = sorted(left.iterdir(), key=lambda path: int(path.name))
    assert len(states) > 15
    for state in states:
        assert same(run(state), expected), writes[int(state.name) - 1]
        assert not list(state.rglob(".*")) or state is states[0]  # no litter; before `run.json` it may be anybody's


def test_a_killed_process_is_resumed(tmp_path: Path, expected: he.Ensemble) -> None:
    """The real thing once, in the middle of fine-tuning; the slow tests do it in every stage."""
    script = str(Path(__file__).with_name("killed_build.py"))
    command = [sys.executable, script, str(tmp_path), "finetune/member-1", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (tmp_path / "members" / "0" / "config.json").exists()
    assert not (tmp_path / "members" / "1").exists()
    assert same(run(tmp_path), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": dataclasses.replace(CONFIG, prune=3)}, r"config\.prune was 2 and is 3"),
        (
            {"config": dataclasses.replace(CONFIG, recipe=None)},
            r"config\.recipe was ",
        ),
        (
            {"config": dataclasses.replace(CONFIG, recipe=recipe(steps=9, evaluate_every=2))},
            r"config\.recipe\.steps was 3 and is 9",
        ),
        ({"model": image_model(5)}, r"model\.weights was '[0-9a-f]+… and is"),
        ({"model": image_model().with_metadata(labels=("a", "b", "c"))}, r"model\.metadata was '[0-9a-f]+…"),
        ({"train": shuffled(16)}, r"data\.train was"),
        ({"id": shuffled(16, seed=5)}, r"data\.ranking was .*; data\.validation was"),
        ({"ood": batches(12, seed=3)}, r"data\.ood was"),
        ({"validation": batches(12, seed=8)}, r"data\.validation was"),
    ],
)
def test_the_folder_of_another_build_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    usual = {"train": shuffled(12), "id": shuffled(16, seed=2), "ood": batches(8, seed=3, shift=1.5)}
    asked = {"model": image_model(), "config": CONFIG, **usual, "output": folder, "progress": False, **change}
    with pytest.raises(CheckpointError, match=message):
        he.build(**asked)
    run(folder)  # and nothing happened to it


def test_a_folder_that_is_no_build_is_refused(folder: Path, tmp_path: Path) -> None:
    delete(folder, "run.json")
    with pytest.raises(CheckpointError, match=r"has base, .*, but no run\.json"):
        run(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="which is a file; name a folder"):
        run(tmp_path / "file")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("build an ensemble")
    with pytest.raises(CheckpointError, match=r"has todo\.txt, but no run\.json .* give a new or an empty one"):
        run(tmp_path / "notes")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["todo.txt"]


def test_settings_alone_and_hidden_files_are_no_obstacle(tmp_path: Path) -> None:
    for name in ("config.yaml", ".run.json.x.tmp"):  # what a command line killed early leaves
        (tmp_path / name).write_text("")
    require_own_folder(tmp_path)
    (tmp_path / "red").mkdir()
    with pytest.raises(CheckpointError, match=r"has red, but no run\.json"):
        require_own_folder(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    require_own_folder(tmp_path)


@pytest.mark.parametrize(
    ("damaged", "gone", "message"),
    [
        ("run.json", [], r"run\.json cannot be read \(.*delete .*run to start over"),
        ("ensemble/config.json", [], r"run/ensemble, which .* cannot be used: .*Delete .*run/ensemble and run this"),
        ("ensemble/model.safetensors", [], r"Delete .*run/ensemble and run this again"),
        ("fused/model.safetensors", ["ensemble"], r"Delete .*run/fused and run this again"),
        ("members/1/model.safetensors", ["ensemble", "fused"], r"Delete .*run/members/1 and run this again"),
        ("heads.json", ["ensemble", "fused", "members"], r"Delete .*run/heads\.json and run this again"),
        (
            "rankings/acc.json",
            ["ensemble", "fused", "members", "heads.json"],
            r"Delete .*run/rankings/acc\.json and run this again",
        ),
        (
            "rankings/acc.journal",
            ["ensemble", "fused", "members", "heads.json", "rankings/acc.json"],
            r"acc\.journal is not a journal .* delete the file to start anew",
        ),
        (
            "finetune/member-0/rate-0.05/checkpoint.json",
            ["ensemble", "fused", "members"],
            r"member-0/rate-0\.05/checkpoint\.json cannot be read .*; delete its folder to start afresh",
        ),
    ],
)
def test_a_damaged_product_is_named_with_what_to_delete(
    folder: Path, expected: he.Ensemble, damaged: str, gone: list[str], message: str
) -> None:
    delete(folder, *gone)
    content = (folder / damaged).read_bytes()
    (folder / damaged).write_bytes(content[: len(content) // 2])
    with pytest.raises(HydraError, match=message):
        run(folder)
    if damaged == "run.json":
        return
    place = folder / damaged
    delete(
        folder,
        str((place.parent if place.suffix == ".safetensors" or "config" in damaged else place).relative_to(folder)),
    )
    if "finetune" in damaged:
        delete(folder, "finetune/member-0")
    assert same(run(folder), expected)


def test_lost_times_do_not_matter(folder: Path, expected: he.Ensemble) -> None:
    delete(folder, "summary.json")
    (folder / "seconds.json").write_text("[1")
    assert same(run(folder), expected)
    assert json.loads((folder / "summary.json").read_text())["seconds"] == {}


def test_of_several_processes_only_the_first_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    settings = he.HydraConfig(prune=3, strategy="random", calibrate=False)
    one = he.build(image_model(), settings, output=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    assert same(one, he.build(image_model(), settings, output=tmp_path, progress=False))
    assert (tmp_path / "ensemble" / "config.json").exists()


def test_ensembles_are_read_back_to_where_the_model_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    original = he.Ensemble.from_pretrained

    def read(source: Any, **options: Any) -> he.Ensemble:
        places.append(options["device"])
        return original(source, **options)

    monkeypatch.setattr(he.Ensemble, "from_pretrained", read)
    assert run(folder).device == torch.device("cpu")
    assert places == [torch.device("cpu")]
