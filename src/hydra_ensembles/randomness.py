"""Random numbers that belong to one purpose: derived seeds, and blocks that leave no trace in the global state.

A seed is derived from what it is for (member, epoch, step, …), so what happened before, or in which order, does
not matter: a run that resumes in the middle draws the numbers it would have drawn anyway.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on nothing else, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block with torch seeded on the CPU and on `device`; afterwards the states are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def all_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Like `torch_seeded`, with the generators of Python and NumPy too: whatever a data pipeline may use."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch_seeded(seed, device):
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
