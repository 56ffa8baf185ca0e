"""From a saved dual encoder and a packed data folder to the figure of both towers' Taylor scores."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from zero_shot_models import NAMES, dual_of

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import tower_scores  # noqa: E402
import tower_scores_figure  # noqa: E402

sys.path.remove(str(BENCHMARKS))

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, and `data/images/tinyimagenet/validation.parquet` as the pack of the studies lays it out."""
    place = tmp_path_factory.mktemp("towers")
    dual = dual_of(next(case for case in DUAL_CASES if case.name == "transformers-same-widths"))
    metadata = replace(dual.image.metadata, preprocessing=he.ImagePreprocessing((32, 32)))
    image = he.Ensemble.from_state(dual.image.config, dual.image.state_dict(), metadata)
    he.DualEncoder(image, dual.text, dual.projections, dual.logit_scale).save_pretrained(place / "model")
    generator, cells = np.random.default_rng(0), []
    for _ in range(COUNT):
        stored = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stored, "PNG")
        cells.append({"bytes": stored.getvalue(), "path": None})
    table = pa.table({"image": cells, "label": [number % len(NAMES) for number in range(COUNT)]})
    features = {"label": {"names": list(NAMES), "_type": "ClassLabel"}}
    table = table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    path = place / "data" / "images" / "tinyimagenet" / "validation.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(table, path)
    return place


@pytest.fixture(scope="module")
def result(folder: Path) -> Any:
    arguments = ["--model", str(folder / "model"), "--data", str(folder), "--device", "cpu", "--images", "8"]
    tower_scores.main([*arguments, "--batch-size", "3", "--output", str(folder / "out" / "scores.json")])
    return json.loads((folder / "out" / "scores.json").read_text())


def test_the_file_says_what_was_computed_and_on_what(result: Any) -> None:
    shapes = {name: np.array(tower["scores"]).shape for name, tower in result["towers"].items()}
    assert shapes == {"image": (2, 4), "text": (3, 4)}
    assert all(np.array(tower["scores"]).min() > 0 for tower in result["towers"].values())
    assert (result["model"], result["images"], result["classes"]) == ("model", 8, len(NAMES))
    assert result["hardware"].startswith("CPU")


def test_the_figure_is_the_same_every_time(result: Any) -> None:
    pytest.importorskip("matplotlib")
    drawn = tower_scores_figure.drawing(result)
    assert drawn == tower_scores_figure.drawing(result)
    assert "image tower, 2 layers of 4 heads" in drawn
    assert "text tower, 3 layers of 4 heads" in drawn


def test_the_table_compares_layers_at_the_same_depth() -> None:
    def tower(*means: float) -> dict[str, Any]:
        return {"layers": len(means), "heads": 3, "scores": [[mean, 2 * mean, math.nan] for mean in means]}

    towers = {"image": tower(1e-6, 2e-6, 3e-6, 4e-6), "text": tower(2e-6, 1e-6)}
    facts = {"model": "m", "images": 2000, "data": "d", "classes": 7, "hardware": "h", "versions": {"torch": "t"}}
    assert tower_scores_figure.image_is_higher({"towers": towers}) == ([False, True], 2)
    text = tower_scores_figure.rendered({"towers": towers, **facts})
    assert "| image | 4 × 3 | 1.00e-06 | 3.50e-06 | 8.00e-06 | 1.50e-06 | 6.00e-06 |" in text
    assert "at 1 of 2 places (not at 1, counted from the input)" in text


def test_until_there_are_results_the_table_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tower_scores_figure, "RESULTS", tmp_path / "none.json")
    assert tower_scores_figure.table().startswith("Not computed yet: run `python benchmarks/tower_scores.py")
