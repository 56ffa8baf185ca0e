"""A whole study of classifiers on small models, from training to tables, and the tables by independent code."""

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from other_code import assert_printed, by_other_code, gained, on_level, price
from published import published
from small_studies import SmallTask
from typer.testing import CliRunner

from hydra_ensembles.data.corruptions import CORRUPTIONS
from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.files import write_json
from studies import all_tasks, classifiers, findings, storing
from studies.__main__ import app
from studies.cells import PAPER
from studies.classifiers import CLASSIFIERS
from studies.column_files import read_columns, write_columns
from studies.engine import Run
from studies.measures import FEWEST_SEEDS, Difference
from studies.results import fixed
from studies.rows import DEEP, HYDRA, MC_DROPOUT, SINGLE, SOUP, SWAG
from studies.seed import Seed
from studies.seed_folder import slug
from studies.stored import Study, stored_studies

NAME = "vision-cifar100"
STORED = [stored.name for stored in stored_studies() if stored.name != "zero-shot"]
ROWS = [SINGLE, MC_DROPOUT, "CircAvg", "Hydra (Circ)", HYDRA, "Hydra, tuned"]
SHIFTED = [SINGLE, HYDRA]  # each evaluated on 75 corruptions


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Rows of every kind for one seed, and Single and Hydra for a second."""
    output, task = tmp_path_factory.mktemp("study"), SmallTask(NAME)
    task.settings["shift"] |= {"images": 3, "seeds": [0]}
    task.settings["cost_batch"] = {"cpu": 2}
    task.settings["candidates"] = task.settings["candidates"][:2]
    results = output / "results"
    CLASSIFIERS.run(Run(task, output, results, ROWS, [0]), list(CLASSIFIERS.steps)[:-1])
    CLASSIFIERS.run(Run(task, output, results, SHIFTED, [0]), ["shift", "cost"])
    CLASSIFIERS.run(Run(task, output, results, SHIFTED, [1]), ["report", "store"])
    return Study(NAME, results)


def test_every_row_is_reported_corrupted_and_shown(study: Study) -> None:
    assert study.rows == ROWS
    assert [study.seeds(row) for row in (SINGLE, HYDRA, MC_DROPOUT)] == [[0, 1], [0, 1], [0]]
    for table in ("main", "detection", "scores", "sets"):
        lines = [line for line in findings.TABLES[table](study).splitlines() if line.startswith("| ")]
        assert [row for line in lines[1:] if (row := line[2:].partition(" | ")[0]) != PAPER] == ROWS
    assert study.cost(HYDRA)["latency_ratio"] > 0


def test_corrupted_images_are_measured_by_severity(study: Study) -> None:
    """Numbers are means over the corruptions."""
    columns = read_columns(study.folder / "shift-0.parquet")
    for level in range(5):
        means = [columns[f"{HYDRA}|{name}|brier"][level] for name in CORRUPTIONS]
        assert study.mean(HYDRA, f"severity {level + 1}.brier") == pytest.approx(np.mean(means, dtype=float), rel=2e-3)


def test_the_command_shows_every_table(study: Study) -> None:
    made = CliRunner().invoke(app, ["tables", NAME, "--results", str(study.folder.parent)])
    assert made.exit_code == 0, made.exception
    assert re.findall(rf"^### {NAME}: (\w+)$", made.stdout, re.MULTILINE) == list(findings.TABLES)
    assert findings.main_table(study) in made.stdout
    assert all_tasks.filed(study, all_tasks.made(study))


def test_a_half_is_rounded_alike_whatever_the_order_of_a_sum() -> None:
    assert {fixed(one, 2) for one in (90.775, 90.77499999999999, 90.77500000000002)} == {"90.78"}
    assert (fixed(30.5, 0), fixed(-0.125, 2), fixed(1234.5, 1, "+")) == ("31", "-0.13", "+1,234.5")


def test_the_figure_of_all_tasks_is_of_the_stored_numbers() -> None:
    """If this fails, run `python benchmarks/tables.py`, which draws it on a CPU."""
    assert all_tasks.drawn([published(one.name) for one in stored_studies()])


def test_runs_are_stored_beside_each_other(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row added by a later run is compared with that run's Single; a run with all rows replaces the stored one."""
    results, report, added = tmp_path / "results", tmp_path / NAME / "seed-0" / "report", SOUP
    shutil.copytree(study.folder, results / NAME)
    reported, stored = partial(report_of, study, tmp_path), partial(stored_from, tmp_path)
    groups = {**study.facts["groups"], "far": study.facts["groups"]["far"][:-1]}
    write_json(results / NAME / "study.json", {**study.facts, "groups": groups})  # the suite gained a set since
    reported(added, MC_DROPOUT)
    assert added not in stored().rows
    reported(SINGLE, SINGLE)  # the same run, without its other rows: they stay
    one = stored()
    assert (set(one.rows), one.seeds(HYDRA), one.in_parts) == ({*ROWS, added}, [0, 1], False)
    assert one.facts["groups"] == groups  # earlier rows lack the new set
    warmer = {key: column / 2 if "calibrated." in key else column for key, column in study.columns(SINGLE, 0).items()}
    write_columns(report / f"{slug(SINGLE)}.parquet", warmer)
    reported(DEEP, MC_DROPOUT)  # the same model; another version fitted another temperature
    assert (set(stored().rows), stored().in_parts) == ({*ROWS, added, DEEP}, False)
    storing.forget(results / NAME, [added, DEEP])
    (report / f"{slug(DEEP)}.json").unlink()
    reported(SINGLE, HYDRA)  # acts as another Single
    for _ in range(2):  # storing again changes nothing
        both = stored()
        assert (both.seeds(added), both.seeds(SINGLE), both.in_parts) == ([0], [0, 1], True)
        assert both.facts["choices"] == study.facts["choices"]
        against = both.difference(added, SINGLE, "calibrated.nll")
        assert against == study.difference(MC_DROPOUT, HYDRA, "calibrated.nll")
        turned = both.difference(SINGLE, added, "calibrated.nll")
        assert turned == study.difference(HYDRA, MC_DROPOUT, "calibrated.nll")  # in either order
        for row in (MC_DROPOUT, HYDRA):
            assert both.difference(row, SINGLE, "accuracy") == study.difference(row, SINGLE, "accuracy")
            assert both.across(row, added)
            assert not both.across(row, SINGLE)
        apart = both.difference(added, MC_DROPOUT, "calibrated.nll")  # the same columns, in runs with different Singles
        gap = Difference.of(*([study.numbers(row, 0)["calibrated.nll"]] for row in (SINGLE, HYDRA)))
        assert (apart.value, apart.half_width) == pytest.approx((gap.value, gap.half_width))
        assert apart.as_they_are == Difference(0.0, 0.0, 1)
    reported(MC_DROPOUT, HYDRA)  # stored already: it stays until all rows are made again
    assert stored().difference(MC_DROPOUT, SINGLE, "accuracy") == study.difference(MC_DROPOUT, SINGLE, "accuracy")
    for row in ROWS[1:]:
        reported(row, row)
    with monkeypatch.context() as killed:
        killed.setattr(storing, "write_columns", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stored()
    half = Study(NAME, results)  # the seed being replaced is hidden; others are shown as before
    assert (half.seeds(added), half.seeds(SINGLE)) == ([], [1])
    whole = stored()
    assert (whole.in_parts, whole.seeds(SINGLE)) == (False, [0, 1])
    assert whole.numbers(SINGLE, 0)["accuracy"].value == study.numbers(HYDRA, 0)["accuracy"].value
    write_json(results / NAME / "study.json", {**whole.facts, "runs": {"0": whole.facts["runs"]["0"]}})
    assert stored().facts["groups"] == study.facts["groups"]  # now all rows have the set


def report_of(study: Study, run: Path, row: str, like: str) -> None:
    """Write a run's report for a row, with the content of a row of the study."""
    place = run / NAME / "seed-0" / "report" / slug(row)
    write_columns(place.with_suffix(".parquet"), study.columns(like, 0))
    write_json(place.with_suffix(".json"), study.facts["runs"]["0"]["report"][like])


def stored_from(run: Path) -> Study:
    CLASSIFIERS.run(Run(SmallTask(NAME), run, run / "results", [], [0]), ["store"])
    return Study(NAME, run / "results")


def test_rows_of_another_recipe_are_not_stored_beside_each_other(study: Study, tmp_path: Path) -> None:
    shutil.copytree(study.folder, tmp_path / "results" / NAME)
    task = SmallTask(NAME)
    task.plain["training"]["learning_rate"] *= 3
    with pytest.raises(CheckpointError, match="learning_rate was"):
        CLASSIFIERS.run(Run(task, tmp_path, tmp_path / "results", [], [0]), ["store"])


def test_rows_are_forgotten_and_stored_anew(study: Study, tmp_path: Path) -> None:
    """With the Single of the new run; also a row that has its own Single."""
    results = tmp_path / "results"
    shutil.copytree(study.folder, results / NAME)
    for row, like in ((SINGLE, HYDRA), (MC_DROPOUT, SINGLE)):
        report_of(study, tmp_path, row, like)
    gap = Difference.of([study.numbers(SINGLE, 0)["accuracy"]], [study.numbers(HYDRA, 0)["accuracy"]])
    for _ in range(2):
        storing.forget(results / NAME, [MC_DROPOUT])
        left = [column for file in results.rglob("*.parquet") for column in read_columns(file).items()]
        assert not any(MC_DROPOUT in (name.partition("|")[0], *column.tolist()) for name, column in left)
        assert stored_from(tmp_path).difference(MC_DROPOUT, SINGLE, "accuracy") == gap


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("small", ROWS),
        *((name, [DEEP]) for name in STORED),
        *(pytest.param(name, None, marks=pytest.mark.slow, id=f"{name}, all rows") for name in STORED),
    ],
)
def test_main_table_and_ood_sets_by_other_code(name: str, rows: list[str] | None, request) -> None:
    """For every stored study and a small one: rows as printed, relative to Single's mean."""
    few = Study(NAME, request.getfixturevalue("study").folder.parent) if name == "small" else published(name)
    few.rows = rows or few.rows
    head, _, *lines = (line.strip("| ").split(" | ") for line in findings.main_table(few).splitlines())
    keys = {title: key for key, title in findings.MAIN.items()}
    sets = (few.facts["inside"], few.facts["groups"])
    places = {
        "detection": findings.metrics([*few.facts["groups"], "all"]),
        "scores": [[f"{score}:{group}.auroc"] for score in ("entropy", "mahalanobis") for group in few.facts["groups"]],
        "sets": findings.metrics([f"ood.{one}" for one in few.outside]),
    }
    detected = {
        table: {row: told for line in findings.TABLES[table](few).splitlines() for row, *told in [line.split(" | ")]}
        for table in places
    }
    for row, printed in zip(few.rows, lines[: len(few.rows)], strict=True):
        found = on_level(few, row, lambda columns: by_other_code(columns, *sets))
        report = few.facts["runs"][str(few.seeds(row)[0])]["report"][row]
        told = dict(zip(head, printed, strict=True))
        shown = [(told.pop(title), key) for title, key in keys.items()]
        for table, some in places.items():
            for names, cell in zip(some, detected[table][f"| {row}"], strict=True):
                shown += zip(cell.removesuffix(" |").split(" / "), names, strict=True)
        for cell, key in shown:
            assert_printed(cell, [one[key] for one in found if key in one], key)
        count, memory = report.get("parameters"), few.cost(row).get("peak_memory_bytes")
        assert told.pop("parameters") == (f"{count / 1e6:.1f} M" if count else "–")
        if few.facts["costs"]:
            assert told.pop("cost ↓") == price(few, row)
        if few.cost(SINGLE).get("peak_memory_bytes"):
            assert told.pop("memory ↓") == (f"{memory / 2**20:.0f} MiB" if memory else "–")
        trained = f"{few.facts['trainings'][row]:g}"
        assert told == {"row": row, "trainings ↓": trained, "seeds": str(len(found))}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("text-sst2", [HYDRA, SWAG]),
        *(pytest.param(name, None, marks=pytest.mark.slow, id=f"{name}, all rows") for name in STORED),
    ],
)
def test_intervals_by_other_code(name: str, rows: list[str] | None) -> None:
    """Of what rows gain over Single, after one look at the test set and after all."""
    study = published(name)
    for row in rows or [row for row in study.rows[1:] if len(study.seeds(row)) >= FEWEST_SEEDS]:
        for key in ("accuracy", "calibrated.nll", "near.auroc", "all.auroc"):
            for looks in (1, study.looks(row, SINGLE)):
                gap = study.difference(row, SINGLE, key, looks)
                assert (gap.value, gap.half_width) == pytest.approx(gained(study, row, key, looks), rel=1e-6, abs=1e-9)


def test_a_study_goes_on_where_it_stopped_and_choices_stay(study: Study, tmp_path: Path) -> None:
    output = study.folder.parents[1]
    place = output / NAME / "seed-0" / "report" / f"{slug(HYDRA)}.json"
    before, task = place.stat().st_mtime_ns, SmallTask(NAME)
    classifiers.report(Seed(task, 0, output), HYDRA)
    assert place.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="choose"):
        Seed(task, 0, tmp_path).chosen("CircAvg")
