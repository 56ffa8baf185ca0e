"""A saved ranking loads equal, and a change of its file is noticed."""

import json
from pathlib import Path

import pytest

import hydra_ensembles as he
from hydra_ensembles.errors import HydraError

MADE = {"seed": 3, "removed": ((0, 0), he.Head(1, 2)), "nested": {"sizes": (1, 2), "none": None}}
RANKING = he.HeadRanking(((2, 1), (0, 0), (1, 3, "text")), (0.1, 1 / 3, 5e-324), "m", "acc", MADE, only=3)


def test_every_change_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    RANKING.save(path)
    assert he.HeadRanking.load(path) == RANKING
    text = path.read_text()
    written = json.loads(text)
    contents = [json.dumps({**written, name: "other"}) for name in written]
    contents += ["{}", "[]", json.dumps({**written, "more": 1}), text[:-40]]
    for content in contents:
        path.write_text(content)
        with pytest.raises(HydraError, match=path.name):
            he.HeadRanking.load(path)
