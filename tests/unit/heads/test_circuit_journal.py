"""A run that is interrupted goes on where it was, and only where it belongs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from circuit_models import Problem, evidence, random_problem
from circuit_process import BUDGET

from hydra_ensembles.circuit import extract
from hydra_ensembles.errors import HydraError
from hydra_ensembles.heads.ranking import HeadRanking

PROCESS = Path(__file__).with_name("circuit_process.py")
METHODS = ("naive", "exact", "screened")


def steps_in(journal: Path) -> int:
    return len(json.loads(journal.read_text())["steps"]) if journal.exists() else 0


@pytest.mark.parametrize("method", ["exact", "screened"])
def test_a_killed_run_ends_with_the_same_ranking(tmp_path: Path, method: str) -> None:
    journal, output = tmp_path / "journal.json", tmp_path / "ranking"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROCESS), str(output), str(journal), method, "60"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while steps_in(journal) < 1 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert steps_in(journal) == 1
    problem = random_problem()
    resumed = problem.extract(budget=BUDGET, method=method, journal=journal, screen_size=3)
    expected = problem.extract(budget=BUDGET, method=method, screen_size=3)
    assert evidence(resumed) == evidence(expected)
    assert resumed.provenance["audit"] == expected.provenance["audit"]


class InterruptedRunError(Exception):
    """Stands for anything that ends a run."""


@pytest.mark.parametrize(
    ("method", "after", "budget"),
    [
        *((method, after, BUDGET) for method in METHODS for after in (1, 2, 4)),
        *(("screened", after, 11) for after in (3, 7, 8, 9)),  # it starts afresh after eight steps
    ],
)
def test_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: int, budget: int
) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    options = {"budget": budget, "method": method, "screen_size": 3}

    class Interrupted(extract.Journal):
        def add(self, step: extract.Step) -> None:
            super().add(step)
            if len(self.steps) == after:
                raise InterruptedRunError

    with monkeypatch.context() as patch:
        patch.setattr(extract, "Journal", Interrupted)
        with pytest.raises(InterruptedRunError):
            problem.extract(journal=path, **options)
    assert steps_in(path) == after
    assert evidence(problem.extract(journal=path, **options)) == evidence(problem.extract(**options))
    assert steps_in(path) == budget


def test_a_finished_journal_needs_no_work(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    first = problem.extract(budget=4, journal=path)
    written = path.read_bytes()
    again = problem.extract(budget=4, journal=path)
    assert again == first
    assert path.read_bytes() == written
    assert problem.extract(budget=2, journal=path).heads == first.heads[:2]


def test_a_larger_budget_goes_on(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    problem.extract(budget=2, journal=path)
    assert evidence(problem.extract(budget=5, journal=path)) == evidence(problem.extract(budget=5))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    problem.extract(budget=2, journal=path, score="avg")
    for options, named in (
        ({"score": "acc"}, "score: avg there, acc here"),
        ({"method": "naive"}, "method: exact there, naive here"),
        ({"layers": [0, 1]}, r"layers: \[0, 1, 2\] there, \[0, 1\] here"),
        ({"removed": [(0, 0)]}, r"removed: \[\] there, \['0.0'\] here"),
        ({"dtype": torch.float32}, "dtype: torch.float64 there, torch.float32 here"),
    ):
        # accuracy is extracted without OOD data, so other data may be what is named
        with pytest.raises(HydraError, match=f"{named}|another data set"):
            problem.extract(**{"budget": 2, "journal": path, "score": "avg"} | options)


def test_another_model_is_refused(tmp_path: Path) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    problem.extract(budget=2, journal=path)
    with torch.no_grad():
        problem.model.encoder.layers[0].mlp.up.bias[0, 0] += 1e-9
    with pytest.raises(HydraError, match=r"journal of another model.*delete the file"):
        problem.extract(budget=2, journal=path)


@pytest.mark.parametrize("change", ["id_image", "id_label", "ood_image", "order"])
def test_other_data_is_refused(tmp_path: Path, change: str) -> None:
    problem, path = random_problem(), tmp_path / "journal.json"
    problem.extract(budget=2, journal=path)
    if change == "id_label":
        problem.id_batches[0][1][1] = (problem.id_batches[0][1][1] + 1) % 4
    elif change == "order":
        problem.id_batches.reverse()
    else:
        batches = problem.id_batches if change == "id_image" else problem.ood_batches
        batches[0][0][0, 0, 0, 0] += 1e-6
    with pytest.raises(HydraError, match=r"journal of another data set.*delete the file"):
        problem.extract(budget=2, journal=path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"steps": []}'])
def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.json"
    path.write_text(content)
    with pytest.raises(HydraError, match=r"journal.json is not a journal"):
        random_problem().extract(budget=2, journal=path)
    assert path.read_text() == content


def test_a_shuffling_loader_gives_the_same_samples_again(tmp_path: Path) -> None:
    problem = random_problem()
    images = torch.cat([images for images, _ in problem.id_batches])
    labels = torch.cat([labels for _, labels in problem.id_batches])
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    shuffled = Problem(problem.model, loader, problem.ood_batches)
    path = tmp_path / "journal.json"
    state = torch.get_rng_state()
    first = shuffled.extract(budget=2, journal=path, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert shuffled.extract(budget=4, journal=path, seed=3).heads[:2] == first.heads
    with pytest.raises(HydraError, match="another data set"):
        shuffled.extract(budget=4, journal=path, seed=4)


def test_rankings_with_provenance_survive_saving(tmp_path: Path) -> None:
    ranking = random_problem().extract(budget=3, method="screened", screen_size=2)
    ranking.save(tmp_path / "ranking.json")
    assert HeadRanking.load(tmp_path / "ranking.json") == ranking
