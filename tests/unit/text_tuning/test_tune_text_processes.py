import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_tuning import RECIPE
from safetensors.torch import load_file
from tuning_cases import pairs, tiny_dual

from hydra_ensembles.text_tuning import tune_text


def launch(folder: Path, processes: int = 2) -> None:
    """What torchrun and accelerate launch do, without their waiting."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    script = str(Path(__file__).with_name("parallel_tuning.py"))
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


def test_two_processes_tune_as_one_with_the_whole_batch(tmp_path):
    """Two processes, two batches each: one update over all 24 pairs, as one process makes it."""
    pytest.importorskip("accelerate")
    launch(tmp_path)
    first, second = (load_file(tmp_path / f"tuned-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    start = tiny_dual(dtype=torch.float64)
    recipe = dataclasses.replace(RECIPE, gradient_accumulation=1)
    whole = pairs(24, 24, dtype=torch.float64)
    expected = tune_text(start, whole, recipe, train_image_projection=True, progress=False).state_dict()
    gaps = {name: (tensor - expected[name]).abs().max().item() for name, tensor in first.items()}
    assert max(gaps.values()) < 1e-12
    assert max((tensor - start.state_dict()[name]).abs().max().item() for name, tensor in first.items()) > 1e-3
