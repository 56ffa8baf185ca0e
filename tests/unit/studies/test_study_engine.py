"""The engine of the studies: available stages and rows, failing jobs, and jobs shared by processes."""

import re
from pathlib import Path

import pytest

from hydra_ensembles.errors import DataError, SameMembersError
from studies.engine import Kind, Plan, Run


class Numbers:
    """A task whose rows compute numbers."""

    name, given = "numbers", ()


class NumberSeed:
    def __init__(self, task: Numbers, number: int, output: Path) -> None:
        self.place = output / f"seed-{number}"
        self.place.mkdir(exist_ok=True)


def doubled(seed: NumberSeed, row: str) -> None:
    if row == "three":
        raise DataError("three cannot be doubled")
    if row == "same":
        raise SameMembersError("no second one differs")
    (seed.place / row).touch(exist_ok=False)


def jobs(run: Run, stage: str) -> Plan:
    return {(stage, seed, row): [] for row in run.rows for seed in run.seeds}


def listed(run: Run) -> None:
    (run.results / "all.txt").write_text(" ".join(sorted(path.name for path in run.output.glob("seed-*/*"))))


ROWS = dict.fromkeys(("one", "two", "three", "same"))
KIND = Kind(NumberSeed, lambda _: ROWS, {"double": doubled}, jobs, {"store": listed})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])  # two re-import everything
def test_a_job_that_fails_or_has_no_different_members_stops_neither_the_others_nor_later_stages(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="three"):
        KIND.run(Run(Numbers(), tmp_path, tmp_path, [], [0, 1]), KIND.stages, workers)
    assert (tmp_path / "all.txt").read_text() == "one one two two"
    said = capsys.readouterr().out
    told = re.findall(r"^(FAILED|UNAVAILABLE): numbers double (\w+), seed \d:", said, re.MULTILINE)
    assert sorted(told) == [("FAILED", "three")] * 2 + [("UNAVAILABLE", "same")] * 2
    KIND.run(Run(Numbers(), tmp_path, tmp_path, ["same"], [2]), KIND.stages)  # not a failure
