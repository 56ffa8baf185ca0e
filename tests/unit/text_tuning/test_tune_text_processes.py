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

from hydra_ensembles.training.text import tune_text


def launch(folder: Path, *words: str, processes: int = 2) -> list[tuple[int, str]]:
    """What torchrun and accelerate launch do, without their waiting; exit statuses and what was printed."""
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
            [sys.executable, script, str(folder), *words],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, output) for process, output in zip(running, printed, strict=True)]


def test_two_processes_tune_as_one_with_the_whole_batch(tmp_path):
    """Two processes, two batches each: one update over all 24 pairs, as one process makes it."""
    pytest.importorskip("accelerate")
    for status, output in launch(tmp_path):
        assert status == 0, output
    first, second = (load_file(tmp_path / f"tuned-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    start = tiny_dual(dtype=torch.float64)
    recipe = dataclasses.replace(RECIPE, gradient_accumulation=1)
    whole = pairs(24, 24, dtype=torch.float64)
    expected = tune_text(start, whole, recipe, train_image_projection=True, progress=False).state_dict()
    gaps = {name: (tensor - expected[name]).abs().max().item() for name, tensor in first.items()}
    assert max(gaps.values()) < 1e-12
    assert max((tensor - start.state_dict()[name]).abs().max().item() for name, tensor in first.items()) > 1e-3


def test_processes_that_disagree_about_labels_say_so(tmp_path):
    """Two of the four batches of an update have labels; nobody waits for the other process's labels."""
    pytest.importorskip("accelerate")
    for status, output in launch(tmp_path, "some"):
        assert status != 0
        assert "2 of 4 batches have labels" in output
