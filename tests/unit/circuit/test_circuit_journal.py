"""A run that is interrupted goes on where it was, and only where it belongs; several processes are as one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from circuit_process import BUDGET, KILLED
from torch.utils.data import DataLoader, TensorDataset

from circuit_models import Problem, evidence, random_problem
from hydra_ensembles.circuit import extract
from hydra_ensembles.circuit.extract import Journal, Step
from hydra_ensembles.errors import CheckpointError, HydraWarning, StorageError
from hydra_ensembles.heads.ranking import HeadRanking

PROCESS = Path(__file__).with_name("circuit_process.py")
METHODS = ("naive", "exact", "screened")


def steps_in(journal: Path) -> int:
    return len(json.loads(journal.read_text())["steps"])


def start_process(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROCESS), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_run_ends_with_the_same_ranking(tmp_path: Path) -> None:
    process = start_process(tmp_path, "screened", 2)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == KILLED, errors
    journal = tmp_path / "screened.journal"
    assert steps_in(journal) == 2
    options = {"budget": BUDGET, "method": "screened", "screen_size": 3}
    resumed, expected = random_problem().extract(**options, journal=journal), random_problem().extract(**options)
    assert evidence(resumed) == evidence(expected)
    assert resumed.provenance["audit"] == expected.provenance["audit"]


@pytest.mark.parametrize(
    ("method", "after", "budget"),
    [
        ("naive", 1, BUDGET),
        ("exact", 4, BUDGET),
        *(("screened", after, 11) for after in (7, 8, 9)),  # it starts afresh after eight steps
    ],
)
def test_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: int, budget: int
) -> None:
    problem, path, add = random_problem(), tmp_path / "journal.json", Journal.add
    options = {"budget": budget, "method": method, "screen_size": 3}

    def add_and_stop(journal: Journal, step: Step, path: Path | None) -> None:
        add(journal, step, path)
        if len(journal.steps) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_and_stop)
        with pytest.raises(KeyboardInterrupt):
            problem.extract(journal=path, **options)
    assert steps_in(path) == after
    assert evidence(problem.extract(journal=path, **options)) == evidence(problem.extract(**options))
    assert steps_in(path) == budget


def test_a_circuit_that_may_not_cost_much_ends_again_where_it_ended(tmp_path: Path) -> None:
    problem, path = random_problem(seed=1), tmp_path / "journal.json"
    with torch.no_grad():
        for inputs, labels in problem.id_batches:  # the model is right about all of them
            labels.copy_(problem.model(inputs)[0].argmax(-1))
    options = {"score": "ood", "budget": 12, "max_accuracy_loss": 0.1, "journal": path}
    with pytest.warns(HydraWarning, match="max_accuracy_loss"):
        first = problem.extract(**options)
    with pytest.warns(HydraWarning, match=f"after {len(first)} of 12"):
        again = problem.extract(**options)
    assert evidence(again) == evidence(first)


def test_auto_stays_with_what_the_journal_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    options = {"budget": 3, "screen_size": 3, "journal": path}
    with monkeypatch.context() as patch:
        patch.setattr(extract, "MINUTES", 0.0)  # as if it took longer
        with pytest.warns(HydraWarning, match="'screened', which is approximate"):
            first = problem.extract(**options)
    assert (first.method, first.provenance["asked"]) == ("circuit/screened", "auto")
    assert json.loads(path.read_text())["settings"]["method"] == "screened"
    assert problem.extract(**options) == first
    assert problem.extract(budget=3).method == "circuit/exact"


def test_finished_shorter_and_longer(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    first = problem.extract(budget=4, journal=path)
    written = path.read_bytes()
    assert problem.extract(budget=4, journal=path) == first
    assert problem.extract(budget=2, journal=path).heads == first.heads[:2]
    assert path.read_bytes() == written
    assert evidence(problem.extract(budget=6, journal=path)) == evidence(problem.extract(budget=6))


def test_a_journal_as_it_was_first_written_is_continued(tmp_path: Path) -> None:
    """The format of before: fields by name, steps of one tower without the tower's name."""
    problem, path, as_before = random_problem(), tmp_path / "journal.json", {"method": "exact", "ties": "order"}
    expected = problem.extract(budget=5, journal=path, **as_before)
    content = json.loads(path.read_text())
    assert content.pop("digest")
    assert set(content) == {"format", "model", "data", "settings", "start", "steps"}
    assert content["format"] == "hydra_ensembles circuit journal 1"
    assert set(content["settings"]) == {"score", "method", "layers", "removed", "dtype", "audit_steps"}
    steps = [{key: step[key] for key in step if key not in ("tower", "excess")} for step in content["steps"][:3]]
    path.write_text(json.dumps({**content, "steps": steps}))
    assert evidence(problem.extract(budget=5, journal=path, **as_before)) == evidence(expected)
    with pytest.raises(CheckpointError, match=r"settings.ties"):
        problem.extract(budget=5, journal=path)


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
    for steps in ([first, other, third], [second, first, third], [first, third], [{**first, "errors": 0}]):
        path.write_text(json.dumps({**written, "steps": steps}))
        with pytest.raises(CheckpointError, match="was changed"):
            problem.extract(budget=4, journal=path)
    del written["digest"]  # one of before: what no run can have written is refused all the same
    outside = {**second, "layer": 99}
    for change in ({"steps": [first, first]}, {"steps": [first, outside]}, {"start": None}, {"start": {"errors": 1}}):
        path.write_text(json.dumps({**written, **change}))
        with pytest.raises(CheckpointError, match=r"delete it to start anew"):
            problem.extract(budget=4, journal=path)


def test_one_run_at_a_time_writes_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, path, add = random_problem(), tmp_path / "journal.json", Journal.add
    refused: list[str] = []

    def add_and_ask(journal: Journal, step: Step, place: Path | None) -> None:
        add(journal, step, place)
        if place == path:
            with pytest.raises(StorageError) as raised:
                problem.extract(budget=1, journal=path)
            refused.append(str(raised.value))
            problem.extract(budget=1, journal=tmp_path / "other.json")  # beside it is free

    monkeypatch.setattr(Journal, "add", add_and_ask)
    problem.extract(budget=1, journal=path)
    assert len(refused) == 1
    assert f"{path} (process {os.getpid()})" in refused[0]
    assert {one.name for one in tmp_path.iterdir()} == {"journal.json", "other.json"}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"steps": []}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="not a journal"):
        random_problem().extract(budget=2, journal=path)
    assert path.read_text() == content


def test_shuffling_loaders_give_the_same_samples_again(tmp_path: Path) -> None:
    """Also one that draws from a generator of its own; random numbers are left as they were."""
    problem, generator = random_problem(), torch.Generator().manual_seed(3)

    def shuffled(batches: list, generator: torch.Generator | None) -> DataLoader:
        data = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator)

    loaders = Problem(problem.model, shuffled(problem.id_batches, None), shuffled(problem.ood_batches, generator))
    path, states = tmp_path / "journal.json", (torch.get_rng_state(), generator.get_state())
    first = loaders.extract(budget=2, journal=path, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    torch.rand(5)
    torch.rand(2, generator=generator)
    assert loaders.extract(budget=4, journal=path, seed=3).heads[:2] == first.heads
    with pytest.raises(CheckpointError, match="data was"):
        loaders.extract(budget=4, journal=path, seed=4)


# --- several processes -------------------------------------------------------------------------------------


def test_two_ranks_give_the_ranking_of_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start_process(tmp_path, ",".join(METHODS), RANK=rank, LOCAL_RANK=rank, GLOO_SOCKET_IFNAME="lo", **shared)
        for rank in ("0", "1")
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    for method in METHODS:
        first, second = (HeadRanking.load(tmp_path / f"{method}.{rank}") for rank in range(2))
        expected = random_problem().extract(budget=BUDGET, method=method, screen_size=3)
        assert first == second
        assert evidence(first) == evidence(expected)
        assert first.provenance["audit"] == expected.provenance["audit"]
        journal = tmp_path / f"{method}.journal"  # of two ranks: that of one
        again = random_problem().extract(budget=BUDGET, method=method, screen_size=3, journal=journal)
        assert evidence(again) == evidence(expected)
