"""Damaged files are refused or answer as before: a sample of what `make attack` runs."""

from functools import partial
from pathlib import Path

import pytest

from attack import files
from attack.counting import outcome_of
from attack.edits import Edit
from attack.targets import TARGETS
from hydra_ensembles.errors import CheckpointError

IMAGES, EVERY_DAY = 0, 7  # the first target, and how many are quick: checkpoints, ranking and evaluation
SAMPLE, MANY = 5, 40  # edits per target, with its digests and again with recomputed ones; MANY for long work


def test_another_answer_is_seen_and_one_that_no_format_can_notice_is_told_apart(tmp_path: Path) -> None:
    files.prepare(TARGETS[IMAGES], tmp_path / str(IMAGES))
    weights = Edit("model.safetensors", "tensors", ("negative", "readout.classifier.weight"))
    assert files.answers_alike(str(tmp_path), (IMAGES, True, weights)) == "apart"
    with pytest.raises(CheckpointError, match="SHA-256"):
        files.answers_alike(str(tmp_path), (IMAGES, False, weights))
    assert files.answers_alike(str(tmp_path), (IMAGES, False, Edit("README.md", "folder", ("missing",)))) == "same"


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=() if index < EVERY_DAY else pytest.mark.slow) for index in range(len(TARGETS))],
    ids=[target.name for target in TARGETS],
)
def test_damaged_files_are_refused_or_answer_as_before(index: int, tmp_path: Path) -> None:
    original = files.prepare(TARGETS[index], tmp_path / str(index))
    sample = SAMPLE if index < EVERY_DAY else MANY  # it has files that are never read again
    cases = [case for anew in (False, True) for case in files.cases_of(index, original, anew, sample, seed=0)]
    assert len(cases) == 2 * sample
    outcomes = [(case, *outcome_of(partial(files.answers_alike, str(tmp_path)), case)) for case in cases]
    assert not [one for one in outcomes if one[1] not in ("refused", "same", "apart")]
    assert sum(outcome == "refused" for _, outcome, _ in outcomes) > len(cases) // 16
