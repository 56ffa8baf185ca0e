"""Where the real data and weights lie beside the checkout, and how a test skips when they do not."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """Path below the shared folder, or a skip that says what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"shared/{relative} is not on this machine")
    return path
