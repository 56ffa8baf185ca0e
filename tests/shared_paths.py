"""Where real data and weights are stored next to the checkout, and how a test skips without them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """Path below the shared folder; skips the test, naming what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"shared/{relative} is not on this machine")
    return path
