"""The engine of the studies: available stages and rows, failing jobs, and jobs shared by processes."""

import re
from pathlib import Path

import pytest
import torch

from hydra_ensembles.errors import DataError, SameMembersError
from hydra_ensembles.files import read_json
from studies.engine import COSTS, Kind, Plan, Run, write_costs
from studies.storing import newest_costs


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


def test_costs_that_were_measured_side_by_side_stay_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, both = tmp_path / "numbers", {"one": {"latency": 1.0}, "two": {"latency": 2.0}}

    def measured(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        write_costs(study, torch.device("cpu"), 8, rows)
        found: dict[str, dict[str, float]] = read_json(study / COSTS)["rows"]
        return found

    assert measured(both) == both
    assert measured({"one": {"latency": 3.0}, "three": {"latency": 3.0}}) == both
    assert "side by side with two" in capsys.readouterr().out
    before, found = {"rows": both}, {"rows": {"one": {"latency": 5.0}}}
    assert newest_costs("numbers", before, found, ["one", "two"]) is before
    assert newest_costs("numbers", before, found, ["one"]) is found  # the second row no longer exists
