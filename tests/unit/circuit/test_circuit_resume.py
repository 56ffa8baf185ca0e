"""An interrupted run resumes where it stopped, from its own folder only; several processes give the result of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from circuit_models import evidence, random_problem
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.store import Store
from processes import count_calls


@pytest.mark.parametrize("method", ["naive", "exact"])
def test_interrupted_anywhere_and_continued_with_a_larger_budget(tmp_path: Path, monkeypatch: Any, method: str) -> None:
    problem, calls = random_problem(), list[None]()
    with monkeypatch.context() as patch:
        count_calls(patch, Store, "step", lambda: calls.append(None), lambda: len(calls) == 3)
        with pytest.raises(KeyboardInterrupt):
            problem.extract(output=tmp_path, budget=3, method=method)
    assert len(list((tmp_path / "heads").glob("*.json"))) == 2  # the start, and the first head
    for budget in (3, 2, 4):
        resumed = problem.extract(output=tmp_path, budget=budget, method=method)
        assert evidence(resumed) == evidence(problem.extract(budget=budget, method=method))


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    problem = random_problem()
    problem.extract(budget=2, output=tmp_path)
    changes: dict[str, Any] = {"score": "ood", "method": "naive", "layers": [0, 1]}
    changes |= {"dtype": torch.float32, "ties": "order"}
    for name, value in changes.items():
        with pytest.raises(CheckpointError, match={"layers": "candidates", "dtype": "data"}.get(name, name)):
            problem.extract(**{"budget": 2, "output": tmp_path, name: value})
    for change_data in (
        lambda: problem.id_batches.reverse(),
        lambda: problem.id_batches[0][1].add_(1).remainder_(4),
        lambda: problem.ood_batches[0][0][0, 0, 0, 0].add_(1e-6),
    ):
        change_data()
        with pytest.raises(CheckpointError, match="data"):
            problem.extract(budget=2, output=tmp_path)
    problem = random_problem()
    with torch.no_grad():
        problem.model.encoder.layers[0].mlp.up.bias[0, 0] += 1e-9
    with pytest.raises(CheckpointError, match="model"):
        problem.extract(budget=2, output=tmp_path)
