"""An interrupted run resumes where it stopped, from its own journal only; several processes give the result of one."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from circuit_models import evidence, random_problem
from hydra_ensembles.circuit import extract
from hydra_ensembles.circuit.journal import Journal, Step
from hydra_ensembles.errors import CheckpointError, HydraWarning, StorageError
from processes import by_two_ranks, count_calls


def steps_in(journal: Path) -> int:
    return len(json.loads(journal.read_text())["steps"])


def add_until(after: int, end: Callable[[], object]) -> Callable[..., None]:
    """A replacement for `Journal.add` that interrupts the run after so many steps are written."""
    add = Journal.add

    def add_and_end(journal: Journal, step: Step, path: Path | None) -> None:
        add(journal, step, path)
        if len(journal.steps) == after:
            end()

    return add_and_end


@pytest.mark.parametrize(  # the screened method recomputes its estimates after eight steps
    ("method", "after", "budget"), [("naive", 1, 3), ("exact", 2, 3), ("screened", 8, 11), ("screened", 9, 11)]
)
def test_interrupted_anywhere(tmp_path: Path, monkeypatch, method: str, after: int, budget: int) -> None:
    def stop() -> None:
        assert steps_in(path) == after  # already written: a kill loses no step
        raise KeyboardInterrupt

    problem, path = random_problem(), tmp_path / "journal.json"
    options = {"budget": budget, "method": method, "screen_size": 3}
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_until(after, stop))
        with pytest.raises(KeyboardInterrupt) as stopped:
            problem.extract(journal=path, **options)
    assert any(str(path) in note for note in stopped.value.__notes__)  # shown at the end of the traceback
    resumed, expected = problem.extract(journal=path, **options), problem.extract(**options)
    assert evidence(resumed) == evidence(expected)
    assert (resumed.provenance["audit"], steps_in(path)) == (expected.provenance["audit"], budget)


def test_auto_stays_with_what_the_journal_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    options = {"budget": 3, "screen_size": 3, "journal": path}
    with monkeypatch.context() as patch:
        patch.setattr(extract, "LONGEST", 0.0)  # as if the run took longer
        with pytest.warns(HydraWarning, match="'screened', which is approximate"):
            first = problem.extract(**options)
    assert (first.method, first.provenance["asked"]) == ("circuit/screened", "auto")
    assert json.loads(path.read_text())["settings"]["method"] == "screened"
    assert (problem.extract(**options), problem.extract(budget=3).method) == (first, "circuit/exact")


def test_a_journal_serves_smaller_and_larger_budgets_also_as_it_was_first_written(tmp_path: Path) -> None:
    """The old format: fields by name, steps of one tower without its name."""
    problem, path, as_before = random_problem(), tmp_path / "journal.json", {"method": "exact", "ties": "order"}
    first = problem.extract(budget=2, journal=path, **as_before)
    written = path.read_bytes()
    assert problem.extract(budget=1, journal=path, **as_before).heads == first.heads[:1]
    assert path.read_bytes() == written
    expected = problem.extract(budget=4, **as_before)
    content = json.loads(path.read_text())
    assert content.pop("digest")
    assert evidence(problem.extract(budget=4, journal=path, **as_before)) == evidence(expected)
    steps = [{key: step[key] for key in step if key not in ("tower", "excess")} for step in content["steps"]]
    path.write_text(json.dumps({**content, "steps": steps}))
    assert evidence(problem.extract(budget=4, journal=path, **as_before)) == evidence(expected)
    with pytest.raises(CheckpointError, match=r"settings.ties"):
        problem.extract(budget=4, journal=path)


def test_another_run_is_refused(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    options = {"budget": 2, "journal": path}
    problem.extract(**options)
    changes = {"score": "ood", "method": "naive", "layers": [0, 1], "removed": [(0, 0)], "dtype": torch.float32}
    changes |= {"ties": "order", "max_accuracy_loss": 0.5}
    for name, value in changes.items():
        with pytest.raises(CheckpointError, match=f"settings.{name}"):
            problem.extract(**options | {name: value})
    for change_data in (
        lambda: problem.id_batches.reverse(),
        lambda: problem.id_batches[0][1].add_(1).remainder_(4),
        lambda: problem.ood_batches[0][0][0, 0, 0, 0].add_(1e-6),
    ):
        change_data()
        with pytest.raises(CheckpointError, match="data was"):
            problem.extract(**options)
    with torch.no_grad():
        problem.model.encoder.layers[0].mlp.up.bias[0, 0] += 1e-9
    with pytest.raises(CheckpointError, match="model was"):
        problem.extract(**options)


def test_a_changed_journal_is_refused(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    problem.extract(budget=3, journal=path)
    written = json.loads(path.read_text())
    first, second, third = written["steps"]
    other = {**second, "head": (second["head"] + 1) % 3}
    for steps in ([first, other, third], [first, third], [{**first, "errors": 0}]):
        path.write_text(json.dumps({**written, "steps": steps}))
        with pytest.raises(CheckpointError, match="was changed"):
            problem.extract(budget=4, journal=path)
    del written["digest"]  # as in the old format: contents that no run can have written are still refused
    path.write_text(json.dumps({**written, "steps": [first, first]}))
    with pytest.raises(CheckpointError, match=r"delete it to start over"):
        problem.extract(budget=4, journal=path)


def test_one_run_at_a_time_writes_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, path, refused = random_problem(), tmp_path / "journal.json", []

    def ask() -> None:
        if not refused:
            with pytest.raises(StorageError, match=rf"{path} \(process {os.getpid()}\)") as raised:
                problem.extract(budget=1, journal=path)
            refused.append(raised)
            problem.extract(budget=1, journal=tmp_path / "other.json")  # another file next to it is unaffected

    count_calls(monkeypatch, Journal, "add", ask)
    problem.extract(budget=1, journal=path)
    assert len(refused) == 1
    assert {one.name for one in tmp_path.iterdir()} == {"journal.json", "other.json"}


@pytest.mark.parametrize("method", ["naive", "exact", "screened"])
def test_two_ranks_give_the_ranking_of_one(tmp_path: Path, method: str) -> None:
    problem, journal = random_problem(), tmp_path / "journal.json"  # a journal of two ranks serves one
    options = {"budget": 3, "method": method, "screen_size": 3}
    expected = problem.extract(**options)
    for found in (
        *(one.result() for one in by_two_ranks(lambda rank: problem.extract(**options, journal=journal))),
        problem.extract(**options, journal=journal),
    ):
        assert evidence(found) == evidence(expected)
        assert found.provenance["audit"] == expected.provenance["audit"]


def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    path.write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="not a journal"):
        random_problem().extract(budget=2, journal=path)
    assert path.read_text() == '{"format": 1}'
