"""Served models run as users run them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _products_as_users_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With oneDNN: a text that equals a held-out one has its score to the bit, whatever the batch."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
