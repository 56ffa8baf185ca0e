"""Several processes share an evaluation and come to the numbers of one."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_evaluation import run
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hydra_ensembles._distributed import Ranks, check_unsharded
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.evaluation.evaluation import Evaluation

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where two processes left what they found."""
    found = tmp_path_factory.mktemp("parallel")
    script = Path(__file__).with_name("parallel_evaluation.py")
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), "2", found], stderr=subprocess.PIPE) for rank in range(2)
    ]
    for process in processes:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said.decode()
    return found


def test_two_processes_give_the_numbers_of_one(folder):
    alone = run()
    for rank in range(2):
        together = Evaluation.load(folder / f"{rank}.json")
        assert together.provenance.processes == 2
        assert dataclasses.replace(together, provenance=alone.provenance) == alone


def test_when_one_process_fails_the_other_stops(folder):
    assert (folder / "1.error").read_text() == "RuntimeError: out of memory"
    assert "RuntimeError: out of memory" in (folder / "0.error").read_text()


def test_a_loader_that_is_split_already_is_refused(monkeypatch):
    data = TensorDataset(torch.zeros(4, 2))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    check_unsharded(loader, "alone")  # one process: nothing is split twice
    monkeypatch.setattr("hydra_ensembles._distributed.current_ranks", lambda: Ranks(0, 2))
    with pytest.raises(ConfigError, match="cifar"):
        check_unsharded(loader, "cifar")
