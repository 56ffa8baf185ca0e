from pathlib import Path

import pytest
import torch
from small_studies import small_vit

from studies import int8


def test_quantised_weights_answer_nearly_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "RISKS", {"pictures": 0.4})
    monkeypatch.setattr(int8, "TURNS", 1)
    model, images = small_vit(layers=2, heads=2).eval(), torch.randn(600, 3, 8, 8)
    batches = list(zip(images.split(50), model(images)[0].argmax(1).split(50), strict=True))
    plain, quantised, anew = int8.compared("pictures", model, batches[:4], batches[4:8], batches[8:], tmp_path)
    assert plain["accuracy"] == plain["same_labels"] == 1
    assert quantised["accuracy"] == quantised["same_labels"] == anew["accuracy"] > 0.9
    assert (anew["weights"], anew["wrong"] <= anew["risk"], quantised["nll"] > 0) == ("int8", True, True)
    assert 0 < quantised["aurc"] - plain["aurc"] < 0.1
