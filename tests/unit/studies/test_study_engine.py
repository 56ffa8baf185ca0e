"""The engine of the studies: stages and rows that there are, jobs that fail, jobs that processes share."""

import re
from pathlib import Path

import pytest

from hydra_ensembles.errors import ConfigError, DataError
from studies.engine import Job, Kind, Run


class Numbers:
    """A task whose rows are numbers."""

    name, given = "numbers", ()


class NumberSeed:
    def __init__(self, task: Numbers, number: int, output: Path) -> None:
        self.place = output / f"seed-{number}"
        self.place.mkdir(exist_ok=True)


def doubled(seed: NumberSeed, row: str) -> None:
    if row == "three":
        raise DataError("three cannot be doubled")
    (seed.place / row).touch(exist_ok=False)


def rounds(run: Run, stage: str) -> list[list[Job]]:
    return [[(stage, seed, row) for row in run.rows for seed in run.seeds]]


def listed(run: Run) -> None:
    (run.results / "all.txt").write_text(" ".join(sorted(path.name for path in run.output.glob("seed-*/*"))))


ROWS = dict.fromkeys(("one", "two", "three"))
KIND = Kind(NumberSeed, lambda _: ROWS, {"double": doubled}, rounds, {"store": listed})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])  # two import everything once more
def test_a_job_that_fails_stops_neither_the_others_nor_later_stages(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="three"):
        KIND.run(Run(Numbers(), tmp_path, tmp_path, [], [0, 1]), KIND.stages, workers)
    assert (tmp_path / "all.txt").read_text() == "one one two two"
    failed = re.findall(r"^FAILED: ([^:]+):", capsys.readouterr().out, re.MULTILINE)
    assert sorted(failed) == [f"numbers double three, seed {seed}" for seed in (0, 1)]


def test_what_made_nothing_to_store_is_what_is_raised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="three cannot be doubled"):
        KIND.run(Run(Numbers(), tmp_path, tmp_path / "missing", ["three"], [0]), KIND.stages)
    with pytest.raises(FileNotFoundError):
        KIND.run(Run(Numbers(), tmp_path, tmp_path / "missing", ["one"], [0]), KIND.stages)


@pytest.mark.parametrize(("rows", "stages", "token"), [(["four"], ["store"], "four"), ([], ["halve"], "double, store")])
def test_unknown_rows_and_stages_are_refused_before_anything_runs(
    rows: list[str], stages: list[str], token: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=token):
        KIND.run(Run(Numbers(), tmp_path, tmp_path, rows, [0]), ["double", *stages])
    assert not list(tmp_path.iterdir())
