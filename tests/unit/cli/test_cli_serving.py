"""`hydra-ensembles export`."""

import json

import hydra_ensembles as he
from cli_cases import fail, succeed
from served_models import pretend


def test_export_writes_what_the_library_writes(run_folder, world, tmp_path, monkeypatch):
    one = he.Ensemble.from_pretrained(run_folder / "ensemble")
    pretend(monkeypatch, one)
    out = succeed("export", run_folder, tmp_path / "model.pt2", "--example", world / "dots", "--device", "cpu")
    assert "model.pt2.json" in out
    about = json.loads((tmp_path / "model.pt2.json").read_text())
    assert about["compared"]["batches"] == [1, 7, 32, 6]
    pretend(monkeypatch, one, lambda found: {**found, "score": found["score"] + 1})
    assert "score" in fail("export", run_folder, tmp_path / "other.pt2")
    assert not (tmp_path / "other.pt2").exists()
    assert ".onnx" in fail("export", run_folder, tmp_path / "model.bin")
