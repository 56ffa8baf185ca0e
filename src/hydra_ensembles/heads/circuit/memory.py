"""How much memory there is, and what is kept in it."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ...model.ensemble import Ensemble
from .base_activations import GroupActivations
from .samples import Samples, tokens_of

_FALLBACK = 1 << 30  # where the system does not say how much is free


def default_budget(device: torch.device) -> int:
    """Half of the free memory of a GPU, a quarter of that of the host, shared with the other local ranks."""
    if device.type == "cuda":
        return _free_on_gpu(device) // 2
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = 4 * _FALLBACK
    return free // 4 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _free_on_gpu(device: torch.device) -> int:
    """What the driver has left, and what PyTorch holds without using it."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def default_batch_size(model: Ensemble, samples: Samples) -> int:
    """Samples (or pairs of candidate and sample) in a batch: enough to keep the device busy, if they fit."""
    if model.device.type != "cuda":
        return 64
    encoder = model.config.encoder
    hidden = encoder.mlp_width * (2 if encoder.gated else 1)
    one = max(tokens_of(model, group) for group in samples.groups) * hidden * model.dtype.itemsize
    return max(1, min(2048, _free_on_gpu(model.device) // (32 * one)))


def gradient_batch_size(model: Ensemble, samples: Samples, batch_size: int) -> int:
    """Samples in a batch whose activations are held in all blocks at once, for a gradient."""
    if model.device.type != "cuda":
        return batch_size
    encoder = model.config.encoder
    values = encoder.layers * (12 * encoder.width + 3 * encoder.mlp_width * (2 if encoder.gated else 1))
    one = max(tokens_of(model, group) for group in samples.groups) * values * model.dtype.itemsize
    return max(1, min(512, _free_on_gpu(model.device) // (4 * one)))


@dataclass(frozen=True)
class MemoryPlan:
    """What is kept: levels of the current model, and slots for candidates in each group of samples."""

    base_levels: tuple[int, ...]
    slots: tuple[int, ...]


def plan(budget: int, groups: list[GroupActivations], layers: int) -> MemoryPlan:
    """Divide a budget in bytes.

    At most half goes to the current model: all levels where they fit, else evenly spaced ones. The rest is
    for candidates, in proportion to the size of the groups.
    """
    level = sum(group.levels[0].nbytes for group in groups)
    kept = min(layers, max(1, budget // 2 // level))
    base_levels = tuple(sorted({index * layers // kept for index in range(kept)}))
    left = max(0, budget - level * len(base_levels))
    slots = tuple(left * len(group) // level for group in groups)
    return MemoryPlan(base_levels, slots)
