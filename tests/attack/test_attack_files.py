"""Stored files that were damaged are refused or answer as before: a sample of the attack that `make attack` runs."""

from functools import partial
from pathlib import Path

import pytest

from attack import files
from attack.counting import count
from attack.edits import Edit, apply, edits
from attack.targets import TARGETS
from hydra_ensembles.errors import CheckpointError

SAMPLE = 4  # edits of each format with its digests, and as many with digests written anew


def test_edits_are_those_of_the_seed_and_change_something(tmp_path: Path) -> None:
    original = files.prepare(TARGETS[0], tmp_path / "0")
    found = edits(original, 300, 0)
    assert len(set(found)) == 300
    assert found == edits(original, 300, 0)
    assert set(found) != set(edits(original, 300, 1))
    assert {edit.kind for edit in found} == {"bytes", "json", "tensors", "folder"}
    unchanged = []
    for edit in found:
        path = tmp_path / "0" / "one" / edit.file
        if edit.kind != "folder":
            apply(tmp_path / "0" / "one", edit, {})
            if path.read_bytes() == original[edit.file]:
                unchanged.append(edit)
            path.write_bytes(original[edit.file])
    assert len(unchanged) < 10  # such as two equal bytes that change places


def test_another_answer_is_seen_and_one_that_no_format_can_notice_is_told_apart(tmp_path: Path) -> None:
    files.prepare(TARGETS[0], tmp_path / "0")
    weights = Edit("model.safetensors", "tensors", ("negative", "readout.classifier.weight"))
    assert files.answers_alike(str(tmp_path), (0, True, weights)) == "apart"
    with pytest.raises(CheckpointError, match="SHA-256"):
        files.answers_alike(str(tmp_path), (0, False, weights))
    assert files.answers_alike(str(tmp_path), (0, False, Edit("README.md", "folder", ("missing",)))) == "same"


@pytest.mark.parametrize("anew", [False, True], ids=["as they were", "digests written anew"])
def test_damaged_files_are_refused_or_answer_as_before(anew: bool, tmp_path: Path) -> None:
    cases = []
    for index, target in enumerate(TARGETS):
        original = files.prepare(target, tmp_path / str(index))
        cases += files.cases_of(index, original, anew, SAMPLE, seed=0)
    row = count("a sample", partial(files.answers_alike, str(tmp_path)), cases)
    assert row.failures == 0, row.examples
    assert row.cases == SAMPLE * len(TARGETS)
    assert row.refused > row.cases // 4
