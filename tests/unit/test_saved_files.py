"""Saved results load equal, every change is detected, and files from before digests are still read."""

import json
from pathlib import Path
from typing import Any

import pytest

import hydra_ensembles as he
from hydra_ensembles.errors import DataError, HeadError, HydraError
from sample_evaluations import evaluation
from unit.pipeline import build_cases as cases

MADE = {"seed": 3, "removed": ((0, 0), he.Head(1, 2)), "nested": {"sizes": (1, 2), "none": None}}
RANKING = he.HeadRanking(((2, 1), (0, 0), (1, 3, "text")), (0.1, 1 / 3, 5e-324), "m", "acc", MADE, only=3)
SAVED: dict[str, tuple[Any, type[HydraError]]] = {
    "ranking": (RANKING, HeadError),
    "evaluation": (evaluation(), DataError),
    "atlas": (he.atlas(cases.image_model(), cases.batches(), layers=[0], inputs=1, progress=False), DataError),
}


@pytest.mark.parametrize("kind", SAVED)
def test_every_change_of_a_file_is_noticed(kind: str, tmp_path: Path) -> None:
    (saved, error), path = SAVED[kind], tmp_path / "file.json"
    saved.save(path)
    assert type(saved).load(path) == saved
    text = path.read_text()
    written = json.loads(text)
    changes = [{name: "other"} for name in written] + [{"more": 1}]
    contents = [json.dumps(one) for one in (*({**written, **change} for change in changes), {}, [], {"format": "x"})]
    contents += [json.dumps({key: written[key] for key in written if key != name}) for name in written]
    for content in (*contents, text[:-40]):
        path.write_text(content)
        if content == contents[-1]:  # without the digest, the last field
            assert type(saved).load(path) == saved
        else:
            with pytest.raises(error, match=path.name):
                type(saved).load(path)
