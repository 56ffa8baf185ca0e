import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from finetune_cases import batches, own_batches, tiny
from parallel_run import RECIPE
from safetensors.torch import load_file

from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.loop import EveryNth


def test_every_nth_batch_is_shared_out_evenly():
    shares = [EveryNth(list(range(7)), rank, 3) for rank in range(3)]
    assert [list(share) for share in shares] == [[0, 3], [1, 4], [2, 5]]
    assert [len(share) for share in shares] == [2, 2, 2]


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def launch(folder: Path, processes: int = 2) -> None:
    """What torchrun and accelerate launch do, without their waiting."""
    pytest.importorskip("accelerate")
    script = str(Path(__file__).with_name("parallel_run.py"))
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, script, str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    for process in running:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    launch(tmp_path)
    images = torch.cat([x for x, _ in batches(64, 4)])
    labels = torch.cat([y for _, y in batches(64, 4)])
    double = list(zip(images.split(8), labels.split(8), strict=True))  # batches 0 and 1 together, and so on
    expected = {
        "list": finetune(tiny(), double, RECIPE, batches(40, 7), progress=False),
        "own": finetune(tiny(), own_batches(64, 8), RECIPE, batches(40, 7), progress=False),  # in the same order
    }
    for name in ("list", "loader", "own"):
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
        measured = [(tmp_path / f"{name}-{rank}.txt").read_text() for rank in range(2)]
        assert measured[0] == measured[1]
        changed = any(not torch.equal(tensor, tiny().state_dict()[key]) for key, tensor in first.items())
        assert changed
    for name, alone in expected.items():
        trained = load_file(tmp_path / f"{name}-0.safetensors")
        for key, tensor in alone.state_dict().items():
            torch.testing.assert_close(trained[key], tensor, rtol=1e-4, atol=1e-6)
        accuracy = f"validation/accuracy {alone.metadata.metrics['validation/accuracy']!r}"
        assert accuracy in (tmp_path / f"{name}-0.txt").read_text()
