"""Where real data and weights are stored next to the checkout, and how a test skips without them."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """Path below the shared folder; skips the test, naming what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"shared/{relative} is not on this machine")
    return path


def real_model(name: str) -> Path:
    """Folder that fetch_weights.py of the shared folder made, below `HYDRA_MODELS`; skips the test without it."""
    folder = Path(os.environ.get("HYDRA_MODELS", SHARED / "weights")) / name
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: python fetch_weights.py {name} {folder}, and HYDRA_MODELS={folder.parent}")
    return folder
