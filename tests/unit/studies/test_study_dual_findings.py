"""Tables of the zero-shot study from stored columns: means over tasks, claims, and what the documents show."""

import json
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from other_code import assert_printed, by_other_code, on_level, price
from published import published_zero_shot
from typer.testing import CliRunner

from hydra_ensembles.files import write_json
from studies.__main__ import app
from studies.claims import claims
from studies.column_files import read_columns, write_columns
from studies.dual_findings import CLASSIFICATION, TABLES
from studies.measures import Columns
from studies.rows import HYDRA_CIRC
from studies.seed_folder import slug
from studies.stored import DualStudy
from studies.storing import FORMAT, SINGLE, in_rows, named, store

OUTSIDE = {"near": {"a": 900}, "far": {"b": 1100, "c": 900}}
ROWS = (SINGLE, "Temperature Scaling", "Taylor", HYDRA_CIRC)
PLACES = {"pets": 12, "cifar100": 12, "tinyimagenet": 12}
SEEDS = 3  # the fewest of which a difference is judged


def made_up(folder: Path, right: dict[str, float], hopeless: tuple[str, ...] = (), seeds: int = SEEDS) -> DualStudy:
    """Seeds of rows that are right so often; on `hopeless` tasks never. The rightest separate OOD data best.

    Columns and numbers of the same rows are made once; files and facts are a test's own, to change them.
    """
    files, known = _stored(tuple(right.items()), hopeless, seeds)
    (folder / "zero-shot").mkdir(parents=True)
    for name, content in files.items():
        (folder / "zero-shot" / name).write_bytes(content)
    study = DualStudy("zero-shot", folder)
    study._once |= known
    return study


@cache
def _stored(
    right: tuple[tuple[str, float], ...], hopeless: tuple[str, ...], seeds: int
) -> tuple[dict[str, bytes], dict[Any, Any]]:
    """The files of a study, and what is known of its rows, seed by seed."""
    with TemporaryDirectory() as place:
        study = _written(Path(place), dict(right), hopeless, seeds)
        for row, seed in product(ROWS, range(seeds)):
            study.numbers(row, seed)
        kinds = ("columns", "numbers")
        known = {key: one for key, one in study._once.items() if isinstance(key, tuple) and key[0] in kinds}
        return {path.name: path.read_bytes() for path in study.folder.iterdir()}, known


def _written(folder: Path, right: dict[str, float], hopeless: tuple[str, ...], seeds: int) -> DualStudy:
    tasks: dict[str, Any] = {
        name: {"domain": "seen" if name == "tinyimagenet" else "unseen", "classes": classes, "samples": 400}
        for name, classes in PLACES.items()
    }
    for name in ("tinyimagenet", "cifar100"):
        tasks[name]["outside"] = OUTSIDE
    for seed in range(seeds):
        draws, columns = np.random.default_rng(seed), dict[str, np.ndarray]()
        for task in tasks:
            for row in ROWS:
                share = 0.0 if task in hopeless else right.get(row, 0.5)
                doubt, correct = draws.uniform(0.1, 0.9, 400), draws.uniform(size=400) < share
                own = {"msp": doubt, "entropy": doubt, "mutual_information": doubt, "doubt": doubt}
                own |= {"nll": 2 - share + doubt, "brier": doubt, "calibrated.doubt": doubt, "calibrated.nll": doubt}
                own |= {"calibrated.brier": doubt}
                columns |= {f"{row}|{task}|{task}|{key}": one.astype(np.float16) for key, one in own.items()}
                columns[f"{row}|{task}|{task}|correct"] = correct
                for name, count in {**OUTSIDE["near"], **OUTSIDE["far"]}.items() if "outside" in tasks[task] else ():
                    drawn = (draws.uniform(0.1, 0.9, count) + share / 2).astype(np.float16)
                    columns |= {f"{row}|{task}|{name}|{key}": drawn for key in ("msp", "entropy", "mutual_information")}
        write_columns(folder / "zero-shot" / f"seed-{seed}.parquet", columns)
    circuit = {"id_samples": 3, "ood_samples": 4, "pruned": 2}
    measured = [{"pseudo_count": 1.0, "nll": 0.5}, {"pseudo_count": 10.0, "nll": 0.25}]
    networks = [{"optimizer": "sgd", "learning_rate": 0.01, "nll": 0.66}]
    taken = {"optimizer": "sgd", "learning_rate": 0.01}
    run = {
        "choices": {
            "BayesVLM": {"row": "BayesVLM", "setting": {"pseudo_count": 10.0}, "measured": measured},
            "ViLU": {"row": "ViLU", "setting": taken, "measured": networks},
        },
        "report": {row: {} for row in ROWS},
        "samples": 9,
        "circuits": {"avg image+text": circuit, "avg image": circuit},
    }
    choice = {"steps": 20, "learning_rate": 1e-4, "projection_rate": 30.0}
    tried = [{**choice, "steps": steps, "accuracy": steps / 100, "names": 7} for steps in (10, 20)]
    facts = {
        "format": FORMAT,
        "study": "zero-shot",
        "recipe": {"least_over_chance": 3.0},
        "model": {"name": "made up", "description": "It is no model."},
        "tasks": tasks,
        "trainings": dict.fromkeys(ROWS, 1),
        "choice": {"choice": choice, "measured": tried},
        "costs": None,
        "runs": {str(seed): run for seed in range(seeds)},
        "device": "a machine",
        "versions": {"torch": "2"},
    }
    (folder / "zero-shot" / "study.json").write_text(json.dumps(facts))
    return DualStudy("zero-shot", folder)


def test_prices_and_scores_of_every_row_are_shown(tmp_path: Path) -> None:
    study = made_up(tmp_path, {})
    study.facts["costs"] = {
        "batch": 8,
        "dtype": "float32",
        "device": "a machine",
        "rows": {HYDRA_CIRC: {"latency_ratio": 1.5, "parameters": 2e6, "peak_memory_bytes": 3 << 20}},
    }
    assert f"| {HYDRA_CIRC} | 2.0 M | 1.50x | 3 MiB | 1 | 3 |" in TABLES["price"](study)
    assert f"| {SINGLE} | – | – | – | 1 | 3 |" in TABLES["price"](study)
    told = next(line for line in TABLES["detection"](study).splitlines() if line.startswith(f"| {HYDRA_CIRC}"))
    own, first, second = (told.strip("| ").split(" | ")[place] for place in (3, 7, 8))
    assert first == second == own.split(" / ")[0]  # the score is the same in all columns that are made up


def test_settings_of_rows_are_shown_with_what_chose_them(tmp_path: Path) -> None:
    told = TABLES["settings"](made_up(tmp_path, {}))
    assert "| BayesVLM | pseudo count 1 | 0.500 | 0 of 3 |" in told
    assert "| BayesVLM | pseudo count 10 | 0.250 | 3 of 3 |" in told
    assert "| ViLU | optimizer sgd, learning rate 0.01 | 0.660 | 3 of 3 |" in told


def test_rows_that_some_seeds_lack_and_circuits_that_are_not_there_are_said(tmp_path: Path) -> None:
    study = made_up(tmp_path, {})
    study.facts["runs"]["2"] = {**study.facts["runs"]["2"], "report": {SINGLE: {}}}
    study.facts["runs"]["0"] = {**study.facts["runs"]["0"], "circuits": {}}
    told = TABLES["main"](study)
    assert f"Means over 3 seeds (Temperature Scaling 2, Taylor 2, {HYDRA_CIRC} 2)" in told
    assert "Circuits: none." in told


def test_a_row_of_a_later_run_is_held_against_the_single_of_that_run(tmp_path: Path) -> None:
    study = made_up(tmp_path, {HYDRA_CIRC: 0.9})
    held = (("Taylor", HYDRA_CIRC), (HYDRA_CIRC, SINGLE))
    before = {row: study.difference(row, against, "unseen.accuracy") for row, against in held}
    for seed in range(SEEDS):
        single = named(SINGLE, study.columns(HYDRA_CIRC, seed))  # stands for another Single
        write_columns(study.folder / f"again-{seed}-x.parquet", {"rows": np.array(["Taylor"]), **single})
    later = DualStudy("zero-shot", tmp_path)
    assert {row: later.difference(row, SINGLE, "unseen.accuracy") for row in before} == before
    assert "later run" in TABLES["main"](later)


def test_means_are_over_the_unseen_tasks_and_their_samples(tmp_path: Path) -> None:
    study = made_up(tmp_path, {})
    found, columns = study.numbers(HYDRA_CIRC, 1), study.columns(HYDRA_CIRC, 1)
    for task in PLACES:
        assert found[f"{task}.accuracy"].value == columns[f"{task}|{task}|correct"].mean()
    mean = np.mean([columns[f"{task}|{task}|correct"].mean() for task in ("pets", "cifar100")])
    assert found["unseen.accuracy"].value == pytest.approx(mean)
    assert set(found["unseen.accuracy"].influences) == {"pets", "cifar100"}
    assert not [key for key in found if key.startswith("pets") and "auroc" in key]


@pytest.mark.parametrize("score", ["vilu", "neglabel"])
def test_a_row_that_brings_a_score_is_judged_and_shown_by_it(tmp_path: Path, score: str) -> None:
    study = made_up(tmp_path, {})
    for seed in range(SEEDS):
        place = study.folder / f"seed-{seed}.parquet"
        columns = read_columns(place)
        for task in PLACES:
            right = columns[f"Taylor|{task}|{task}|correct"]
            columns[f"Taylor|{task}|{task}|{score}"] = np.where(right, -9.0, 9.0)  # it knows who is right,
            for name in "abc":
                columns[f"Taylor|{task}|{name}|{score}"] = np.full(len(columns[f"Taylor|cifar100|{name}|msp"]), 10.0)
        write_columns(place, columns)  # and what is foreign
    again = DualStudy("zero-shot", tmp_path)
    found, other, plain = again.numbers("Taylor", 0), again.numbers(HYDRA_CIRC, 0), again.plain("Taylor")[0]
    for key in ("near.auroc", "all.auroc", "ood.c.auroc", "far.fpr95", "ood.b.aupr"):
        best = float("fpr95" not in key)
        assert plain[f"cifar100.own.{key}"] == best != plain[f"cifar100.{key}"]
    sure = score == "vilu"  # the other one is no confidence
    assert (found["pets.own.ece"].value < 0.01, plain["unseen.own.aece"] < 0.01) == (sure, sure)
    for key in ("all.auroc", "ood.a.auroc", "ece", "aurc"):
        assert other[f"cifar100.own.{key}"].value == other[f"cifar100.{key}"].value
    cells = {name: row_of(TABLES[name](again), "Taylor") for name in ("main", "sets", "ece")}
    assert cells["main"].count("**100.00**") == 6
    assert cells["sets"][1:3] == ["**100.00** / – / 100.00", "**100.00** / 0.00 / 100.00"]  # of 900 and 1,100 images
    assert ("**0.01**" in cells["ece"]) == sure


def row_of(table: str, row: str) -> list[str]:
    """Cells of a row of a table."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_papers_numbers_stand_below_ours_in_every_table_of_ood_sets() -> None:
    study = published_zero_shot()
    study.rows = [HYDRA_CIRC]
    for name, title, told in (
        ("main", "cifar100 near ↑", "(79.78)"),
        ("main", "aECE ↓", "(3.35)"),
        ("sets", "cifar100: cifar10 (near)", "(79.24 / 53.48 / 74.92)"),
        ("sets", "tinyimagenet: dtd10 (far)", "(76.69 / 77.49 / 32.71)"),
        ("detection", "tinyimagenet all", "(76.82 / 68.05 / 47.85)"),
    ):
        table = TABLES[name](study)
        assert row_of(table, "(paper)")[row_of(table, "row").index(title)] == told


def test_rows_wait_for_their_single_and_sets_that_a_suite_got_later_for_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, run = made_up(tmp_path, {}, seeds=2), tmp_path / "run" / "zero-shot"
    more = {**study.facts["tasks"], "cifar100": {**study.facts["tasks"]["cifar100"]}}
    more["cifar100"]["outside"] = {**OUTSIDE, "far": {**OUTSIDE["far"], "d": 900}}

    def stored(seeds: range, rows: tuple[str, ...]) -> DualStudy:
        for seed in seeds:
            report = run / f"seed-{seed}" / "report"
            for row in rows:
                columns = study.columns(row if row in ROWS else HYDRA_CIRC, seed)
                new = {key.replace("|c|", "|d|"): one for key, one in columns.items() if "cifar100|c|" in key}
                write_columns(report / f"{slug(row)}.parquet", {**columns, **new})
                write_json(report / f"{slug(row)}.json", {})
        facts = {**study.facts, "tasks": more, "trainings": dict.fromkeys((*ROWS, "NegLabel"), 1)}
        store(run, tmp_path, facts, lambda seed: study.facts["runs"][str(seed)])
        return DualStudy("zero-shot", tmp_path)

    assert "NegLabel" not in stored(range(1), ("NegLabel",)).rows
    assert "seed 0 wait" in capsys.readouterr().out
    added = stored(range(1), (SINGLE, "NegLabel"))
    assert added.seeds("NegLabel") == [0]
    assert list(added.groups("cifar100")["far"]) == ["b", "c"]
    assert "NegLabel" in TABLES["sets"](added)
    whole = stored(range(2), (*ROWS, "NegLabel"))
    assert list(whole.groups("cifar100")["far"]) == ["b", "c", "d"]
    assert "cifar100: d (far)" in TABLES["sets"](whole)


def test_tasks_near_chance_leave_the_means_by_rule(tmp_path: Path) -> None:
    study = made_up(tmp_path, {}, hopeless=("cifar100",))
    assert (study.counted, study.left_out) == (["pets"], ["cifar100"])
    numbers = study.numbers(SINGLE, 0)
    assert numbers["unseen.accuracy"].value == numbers["pets.accuracy"].value
    assert "leave the means: cifar100" in TABLES["main"](study)
    nothing = made_up(tmp_path / "other", {}, hopeless=("pets", "cifar100"))
    assert "unseen.accuracy" not in nothing.numbers(SINGLE, 0)
    assert all(one["verdict"] == "not testable" for one in claims(nothing) if one["scope"] == "unseen")
    assert all(table(nothing) for table in TABLES.values())


def test_claims_have_their_sign_and_margin(tmp_path: Path) -> None:
    study = made_up(tmp_path, {HYDRA_CIRC: 0.9, "Taylor": 0.3})
    found = {(one["scope"], one["metric"], one["first"], one["second"]): one for one in claims(study)}
    assert found["unseen", "accuracy", HYDRA_CIRC, SINGLE]["verdict"] == "reproduced"
    assert found["unseen", "nll", HYDRA_CIRC, SINGLE]["verdict"] == "reproduced"  # lower
    assert found["tinyimagenet", "near.auroc", HYDRA_CIRC, SINGLE]["verdict"] == "reproduced"
    assert found["cifar100", "all.auroc", HYDRA_CIRC, "Taylor"]["verdict"] == "reproduced"
    assert found["unseen", "accuracy", HYDRA_CIRC, "BayesVLM"]["verdict"] == "not testable"
    assert found["unseen", "accuracy", HYDRA_CIRC, SINGLE]["paper"] == pytest.approx(0.0035)


def test_every_table_is_made_again_from_results(tmp_path: Path) -> None:
    study = made_up(tmp_path, {})
    ran = CliRunner().invoke(app, ["zero-shot", "--from-results", "--results", str(tmp_path)])
    assert ran.exit_code == 0, ran.exception
    assert ran.stdout == CliRunner().invoke(app, ["tables", "zero-shot", "--results", str(tmp_path)]).stdout
    found = {name: table(study) for name, table in TABLES.items()}
    for shown in found.values():
        assert shown in ran.stdout
        lines = [line for line in shown.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1
    assert study.facts["choice"]["measured"][1]["accuracy"] == 0.2
    assert "| 20.00 | taken |" in found["choices"]


@cache
def by_task(row: str) -> list[dict[str, float]]:
    """Numbers of the published study by seed, `TASK.key`, by other code."""
    study = published_zero_shot()

    def numbers(columns: Columns) -> dict[str, float]:
        of_task = ((task, by_other_code(asked, task, study.groups(task))) for task, asked in in_rows(columns).items())
        return {f"{task}.{key}": value for task, found in of_task for key, value in found.items()}

    return on_level(study, row, numbers)


def means(found: list[dict[str, float]], tasks: list[str], key: str) -> list[float]:
    """Of every seed the mean over tasks, where all of these have the number."""
    each = [[one.get(f"{task}.{key}") for task in tasks] for one in found]
    return [float(np.mean(one)) for one in each if None not in one]


@pytest.mark.parametrize("rows", [[HYDRA_CIRC, "ViLU"], pytest.param(None, marks=pytest.mark.slow, id="all rows")])
def test_the_published_main_table_by_other_code(rows: list[str] | None) -> None:
    """Rows as they are printed: unseen tasks that count, and OOD sets of both ID tasks."""
    study = published_zero_shot()
    study.rows = rows or study.rows
    head, _, *lines = (line.strip("| ").split(" | ") for line in TABLES["main"](study).splitlines())
    ours = [line for line in lines if line[0] in study.rows]
    for row, cells in zip(study.rows, ours, strict=True):
        found = by_task(row)
        told = dict(zip(head, cells, strict=True))
        for key, title in CLASSIFICATION.items():
            assert_printed(told.pop(title), means(found, study.counted, key), key)
        for task in study.detections:
            for group in (*study.groups(task), "all"):
                assert_printed(told.pop(f"{task} {group} ↑"), means(found, [task], f"own.{group}.auroc"), "auroc")
        assert told == {"row": row, **({"cost": price(study, row)} if study.facts["costs"] else {})}


@pytest.mark.parametrize("row", [HYDRA_CIRC, "ViLU"])
def test_every_task_by_other_code(row: str) -> None:
    """A table a metric, as it is printed; beside it what the paper has of the same task."""
    study = published_zero_shot()
    study.rows = [row]
    tasks = list(study.facts["tasks"])
    keys = {"tasks": "accuracy", "brier": "brier", "nll": "nll", "ece": "own.ece", "aece": "own.aece"}
    places = [*([task] for task in tasks), study.counted]
    for name, key in keys.items():
        for some, cell in zip(places, row_of(TABLES[name](study), row)[1:], strict=True):
            assert_printed(cell, means(by_task(row), some, key), key)
    paper = row_of(TABLES["aece"](study), "(paper)")[1:]
    assert paper[tasks.index("pets")] == {HYDRA_CIRC: "(2.31)", "ViLU": "(5.50)"}[row]
