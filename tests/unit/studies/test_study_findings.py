"""A whole study of classifiers on small models, from the first training to the tables, and the tables by other code."""

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from other_code import assert_printed, by_other_code, on_level, price
from published import published
from small_studies import SmallTask
from typer.testing import CliRunner

from hydra_ensembles.data.corruptions import CORRUPTIONS
from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.files import read_json, write_json
from studies import all_tasks, cells, claims, classifiers, findings, storing
from studies import rows as study_rows
from studies.__main__ import app
from studies.cells import PAPER
from studies.claims import judged
from studies.classifiers import CLASSIFIERS
from studies.column_files import read_columns, write_columns
from studies.engine import Run
from studies.measures import Difference
from studies.results import ROOT, fixed
from studies.rows import DEEP, HYDRA, MC_DROPOUT, PACKED, SINGLE, SOUP, SWAG
from studies.samples import device_name
from studies.seed import Seed
from studies.seed_folder import slug
from studies.stored import RESULTS, Study, stored_studies
from studies.task import recipe

NAME = "vision-cifar100"
STORED = [stored.name for stored in stored_studies() if stored.name != "zero-shot"]
ROWS = [SINGLE, MC_DROPOUT, "CircAvg", "Hydra (Circ)", HYDRA, "Hydra, tuned"]
SHIFTED = [SINGLE, HYDRA]  # asked about 75 corruptions each


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Rows of every kind of one seed, and Single and Hydra of a second."""
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
    for table in ("main", "detection", "sets"):
        lines = [line for line in findings.TABLES[table](study).splitlines() if line.startswith("| ")]
        assert [row for line in lines[1:] if (row := line[2:].partition(" | ")[0]) != PAPER] == ROWS
    assert study.cost(HYDRA)["latency_ratio"] > 0
    assert "| taken |" in findings.choices_table(study)
    head, *_ = findings.main_table(study).splitlines()
    assert "| parameters | cost ↓ | trainings ↓ |" in head  # no memory, which is not counted on a CPU


def test_corrupted_images_are_shown_by_severity(study: Study, tmp_path: Path) -> None:
    """Means over the corruptions; beside them, on the task that the paper corrupted, what it prints."""
    columns = read_columns(study.folder / "shift-0.parquet")
    for level in range(5):
        means = [columns[f"{HYDRA}|{name}|brier"][level] for name in CORRUPTIONS]
        assert study.mean(HYDRA, f"severity {level + 1}.brier") == pytest.approx(np.mean(means, dtype=float), rel=2e-3)
    assert len(columns[f"{HYDRA}|severity 1|nll"]) == 3  # images
    lines = [line for line in findings.shift_table(study).splitlines() if line.startswith("| ")]
    titles = ["accuracy ↑", "Brier ↓", "NLL ↓"]
    assert [line.split(" | ")[0][2:] for line in lines] == [one for title in titles for one in (title, *SHIFTED)]
    assert not any("(" in line for line in lines)
    fake = as_another(study, tmp_path, {SINGLE: SINGLE, "Deep Ensembles": SINGLE, "Hydra (Taylor)": HYDRA})
    (best,) = re.findall(r"^\| Hydra \(Taylor\) \| (.*\(71.65\).*) \|$", findings.shift_table(fake), re.MULTILINE)
    assert best.split(" | ")[-2].endswith("(56.50)")
    verdicts = {one["metric"]: one for one in claims.claims(fake) if one["second"] == "Deep Ensembles"}
    assert verdicts["severity 5.accuracy"]["paper"] == pytest.approx(0.0082)
    assert verdicts["severity 5.accuracy"]["ours"] == fake.difference("Hydra (Taylor)", SINGLE, "severity 5.accuracy")
    assert verdicts["severity 5.accuracy"]["verdict"] == "one seed"


def as_another(study: Study, results: Path, rows: dict[str, str], name: str = "vision-tinyimagenet") -> Study:
    """The stored study as one of another task, whose rows have the columns of rows of this one."""
    for file in study.folder.glob("*.parquet"):
        stored = storing.in_rows(read_columns(file))
        taken = {row: stored.get(like, {}) for row, like in rows.items()}
        write_columns(
            results / name / file.name,
            {key: one for row, own in taken.items() for key, one in storing.named(row, own).items()},
        )
    facts = study.facts
    runs = {
        number: {"report": {row: run["report"][like] for row, like in rows.items() if like in run["report"]}}
        for number, run in facts["runs"].items()
    }
    named = {"recipe": {**facts["recipe"], "tasks": {name: recipe()["tasks"][name]}}, "runs": runs}
    trainings = {row: one.trainings for row, one in study_rows.ROWS.items()}
    write_json(results / name / "study.json", {**facts, "study": name, "trainings": trainings, **named})
    return Study(name, results)


def test_means_compare_whichever_seeds_a_row_has(study: Study) -> None:
    """MC Dropout has seed 0 alone, where Single is not what it is on average; means differ as paired rows do."""
    for key in ("accuracy", "calibrated.nll", "all.auroc", "ece"):
        ours = [study.numbers(SINGLE, seed)[key].value for seed in (0, 1)]
        gap = study.numbers(MC_DROPOUT, 0)[key].value - ours[0]
        assert study.mean(SINGLE, key) == pytest.approx(np.mean(ours))
        assert study.mean(MC_DROPOUT, key) == pytest.approx(np.mean(ours) + gap)
    assert study.mean(MC_DROPOUT, "mahalanobis:all.auroc") is None
    assert cells.level(study, [SINGLE, HYDRA, SOUP]) == "Means over 2 seeds"  # of Soup there is nothing
    tables = ("summary", "main", "sets", "detection")
    assert all("(1 a row; 2 of Single, Hydra)" in findings.TABLES[name](study) for name in tables)
    assert "(1 a row; 2 of Single)" in findings.paper_table(study)  # the paper has no Hydra of ours


def test_a_verdict_that_hangs_on_one_set_says_so(study: Study, tmp_path: Path) -> None:
    """The mean over all OOD sets but one, by hand; and a claim whose verdict is another without it."""
    first, *others = study.outside
    own = [
        np.mean([study.numbers(row, 0)[f"ood.{name}.auroc"].value for name in others]) for row in (MC_DROPOUT, SINGLE)
    ]
    gap = study.difference(MC_DROPOUT, SINGLE, f"all but {first}.auroc")
    assert gap is not None
    assert gap.value == pytest.approx(own[0] - own[1])
    claim = {"metric": "all.auroc", "first": HYDRA, "second": SINGLE, "is": "higher", "margin": "0", "ours": gap}
    without = study.difference(HYDRA, SINGLE, f"all but {first}.auroc")
    verdict = judged(without, "higher", 0.0)
    assert first not in [name for name, *_ in claims.hangs_on(study, {**claim, "verdict": verdict})]
    assert (first, without, verdict) in claims.hangs_on(study, {**claim, "verdict": "another"})
    assert claims.hangs_on(study, {**claim, "metric": "accuracy", "verdict": "another"}) == []


def test_rows_that_are_one_model_are_told(study: Study, tmp_path: Path) -> None:
    assert all_tasks.same_models([study], [SINGLE, HYDRA, MC_DROPOUT]) == ""
    both = as_another(study, tmp_path, {SINGLE: SINGLE, HYDRA: HYDRA, SOUP: HYDRA})
    assert f"On TinyImageNet-200 *{SOUP}* and *{HYDRA}* are the same model" in all_tasks.gains_table([both])


def test_a_study_fills_its_blocks_as_soon_as_it_is_stored(study: Study, tmp_path: Path) -> None:
    """Every table of its page, and its column in the tables of all tasks: rows from scratch, too."""
    as_another(study, tmp_path, {SINGLE: SINGLE, MC_DROPOUT: MC_DROPOUT, HYDRA: HYDRA})
    as_another(study, tmp_path, {SINGLE: SINGLE, PACKED: HYDRA}, "vision-eurosat-scratch")
    another, scratch = stored_studies(tmp_path)
    shown = {f"study_{one.name}_{table}" for one in (another, scratch) for table in findings.TABLES}
    made = all_tasks.blocks([study, another, scratch], shown)
    assert set(made) == {*shown, "study_gains", "study_methods", "compared"}
    assert [name for name in sorted(shown) if not made[name].startswith("| ")] == [
        f"study_{one.name}_claims"
        for one in (scratch, another)  # the paper has none of their rows but Single
    ]
    assert "Hydra (Circ)" in made["study_vision-tinyimagenet_claims"]
    assert findings.TOO_FEW in made["study_vision-tinyimagenet_choices"]  # of MC Dropout alone
    head, *lines = (line[2:-2].split(" | ") for line in made["study_methods"].splitlines() if line.startswith("| "))
    assert head[4:] == ["CIFAR-100", "TinyImageNet-200", "EuroSAT, from scratch", "seeds"]
    told = {line[0]: line[1:] for line in lines}
    gained = cells.gains(scratch, PACKED, all_tasks.GAINS)
    assert told[PACKED] == ["1.5", scratch.parameters(PACKED), f"({scratch.work(PACKED)})", "–", "–", gained, "–, –, 2"]
    assert told[MC_DROPOUT][-1] == "1, 1, –"


def test_the_command_shows_every_table(study: Study) -> None:
    made = CliRunner().invoke(app, ["tables", NAME, "--results", str(study.folder.parent)])
    assert made.exit_code == 0, made.exception
    assert re.findall(rf"^### {NAME}: (\w+)$", made.stdout, re.MULTILINE) == list(findings.TABLES)
    assert findings.main_table(study) in made.stdout
    wrong = CliRunner().invoke(app, ["run", NAME, "--seeds", "0;1", "-o", str(study.folder)])
    assert "commas between, as 0,1,2; got '0;1'" in str(wrong.exception)


def test_what_held_out_data_foretold_is_said(study: Study) -> None:
    """Of the rows with a choice, by ranks."""
    choices = study.facts["choices"]
    said = [min(one["calibrated.nll"] for one in choice["measured"]) for choice in choices.values()]
    came = [study.mean(row, "calibrated.nll") for row in choices]
    ranks = np.argsort(np.argsort([said, came], axis=1), axis=1)
    found = findings.foretold(study, "calibrated.nll")
    assert found == (pytest.approx(np.corrcoef(ranks)[0, 1]), 3)
    assert f"NLL {found[0]:+.2f} over 3 rows" in findings.choices_table(study)


def test_settings_that_were_left_out_are_shown_and_a_price_that_was_not_measured_has_no_columns(study: Study) -> None:
    other = Study(NAME, study.folder.parent)
    left_out = [{"setting": {"rate": 9.0}, "why": "it diverged"}]
    other.facts |= {"costs": None, "choices": {"CircAvg": {**study.facts["choices"]["CircAvg"], "left_out": left_out}}}
    *_, last = (line for line in findings.choices_table(other).splitlines() if "| CircAvg" in line)
    assert last.endswith("| – | – | – | left out |")
    head, *_ = findings.main_table(other).splitlines()
    assert "| parameters | trainings ↓ |" in head


def test_prices_are_measured_without_the_models_of_the_run(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of their shapes, by the settings that are stored and the heads that the run ranked; stored beside its reports."""
    results, ranked = tmp_path / "results", f"{NAME}/seed-0/rankings"
    shutil.copytree(study.folder, results / NAME)
    shutil.copytree(study.folder.parents[1] / ranked, tmp_path / ranked)
    task = SmallTask(NAME)
    task.settings["cost_batch"] = {"cpu": 2}
    rows = [SINGLE, MC_DROPOUT, "Hydra (Circ)", HYDRA]
    CLASSIFIERS.run(Run(task, tmp_path, results, [*rows, SWAG], [0]), ["cost", "store"])
    assert f"NOT TO BE HAD: {NAME} cost {SWAG}: no setting of '{SWAG}' is chosen yet" in capsys.readouterr().out
    found = Study(NAME, results)
    assert list(found.facts["costs"]["rows"]) == rows
    about = {"device": device_name(task.device), "dtype": "float32", "torch": torch.__version__, "batch": 2}
    assert {key: found.facts["costs"][key] for key in about} == about
    reports = study.facts["runs"]["0"]["report"]
    for row in (SINGLE, HYDRA, "Hydra (Circ)"):  # whose layers are shared up to the first in which heads differ
        assert found.cost(row)["multiply_adds"] == reports[row]["multiply_adds"]
    assert found.facts["runs"] == study.facts["runs"]
    assert not list(tmp_path.glob(f"{NAME}/seed-*/models"))


def test_the_papers_table_has_both_numbers_and_names_sets_without_fpr95(study: Study) -> None:
    lines = findings.paper_table(study).splitlines()
    (hydra,) = (line for line in lines if line.startswith("| Hydra (Circ) |"))
    ours = 100 * (study.mean("Hydra (Circ)", "accuracy") or 0.0)
    assert hydra.split(" | ")[1] == f"{ours:.2f} (92.11)"
    assert not any(line.startswith(f"| {HYDRA} |") for line in lines)  # the paper has no such row
    assert "mnist" in lines[-1]  # 60 samples


def test_the_papers_numbers_stand_below_rows_of_its_own_tasks_alone() -> None:
    """Textures for their ten classes, places for MiniPlaces; nothing where another task is learnt."""
    shown = {name: findings.TABLES["sets"](few_rows(name, [SINGLE, MC_DROPOUT])) for name in STORED}
    below = {name: re.findall(r"^\| \(paper\) \| (.*) \|$", table, re.MULTILINE) for name, table in shown.items()}
    assert below["text-sst2"][0].startswith("(62.43 / 86.47 / 98.35) | (56.47 / 89.79 / 99.81) |")
    assert "| (95.79 / 20.51 / 93.86) | (89.78 / 36.77 / 96.54) |" in below["vision-cifar100"][0]
    assert below["vision-cifar100"][1] == "(88.88 / 41.03 / 88.97) |  |  |  | "  # it prints OBA's at the far sets
    assert below["vision-tinyimagenet"][0] == " |  | (86.58 / 50.51 / 49.30) |  |  |  | "
    assert below["vision-eurosat-scratch"] == []
    assert "textures for dtd10, places365 for miniplaces" in shown["vision-cifar100"]
    assert "trec (far, 500)" in shown["text-sst2"]


def few_rows(name: str, rows: list[str]) -> Study:
    """A stored study of which tables show some rows."""
    study = published(name)
    study.rows = rows
    return study


def test_a_half_is_rounded_alike_whatever_the_order_of_a_sum() -> None:
    assert {fixed(one, 2) for one in (90.775, 90.77499999999999, 90.77500000000002)} == {"90.78"}
    assert (fixed(30.5, 0), fixed(-0.125, 2), fixed(1234.5, 1, "+")) == ("31", "-0.13", "+1,234.5")


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(RESULTS.glob("*/study.json"))])
def test_the_page_of_all_tables_has_every_table_of_ood_sets(name: str) -> None:
    pages = [path.read_text() for path in (ROOT / "docs").glob("tables_*.md")]
    prefix = "study_" + name.replace("zero-shot", "zero_shot")
    assert all(any(f"<!-- table: {prefix}_{one} -->" in page for page in pages) for one in ("detection", "sets"))


def test_every_row_is_told_and_its_setting_too(study: Study) -> None:
    assert list(findings.WHAT) == list(study_rows.ROWS)
    rate = study.facts["choices"]["CircAvg"]["setting"]["rate"]
    (hydra,) = (one for one in findings.recipes_table(study).splitlines() if one.startswith("| Hydra (Circ) |"))
    assert hydra.endswith(f"| rate {rate} |")  # that of the row whose setting it has


def test_gains_of_all_tasks_are_one_table(study: Study) -> None:
    assert set(all_tasks.TITLES) == set(recipe()["tasks"])
    lines = all_tasks.gains_table([study, study]).splitlines()
    heads = [line for line in lines if "trainings ↓" in line]
    after = "less Single's | trainings ↓ | price ↓ | CIFAR-100 | CIFAR-100 | seeds |"
    assert heads == [f"| NLL ↓, {after}", f"| near ↑, {after}"]
    hydras = [line for line in lines if line.startswith(f"| {HYDRA} |")]
    for line, key in zip(hydras, all_tasks.LEADING, strict=True):
        gain = study.difference(HYDRA, SINGLE, key)
        assert gain is not None
        assert line.replace("*", "").split(" | ")[1:4] == [
            "3",
            f"{study.cost(HYDRA)['latency_ratio']:.2f}x",
            cells.gap_text(gain, key),
        ]
    paper, _ = (line for line in lines if line.startswith("| Hydra (Circ) |"))
    assert paper.split(" | ")[2] == f"({study.work('Hydra (Circ)')})"  # of which no time was measured
    assert not any(line.startswith(f"| {SOUP} |") for line in lines)  # not run
    lines = [line[2:].split(" | ")[:5] for line in all_tasks.methods_table([study]).splitlines()[2:5]]
    assert [line[:4] for line in lines] == [
        [MC_DROPOUT, "1", "–", "–"],
        [HYDRA, "3", study.parameters(HYDRA), f"{study.cost(HYDRA)['latency_ratio']:.2f}x"],
        ["Hydra (Circ)", "4", study.parameters("Hydra (Circ)"), f"({study.work('Hydra (Circ)')})"],
    ]
    assert lines[1][4].removesuffix(" |") == cells.gains(study, HYDRA, all_tasks.GAINS)
    assert 1 < float(study.work(HYDRA).removesuffix("x")) < 3


def test_the_figure_marks_what_was_measured(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a field the marks: price and gain of a row, filled where its time was measured; a cheap row is in it."""
    pytest.importorskip("matplotlib")
    found = all_tasks.price_of
    monkeypatch.setattr(all_tasks, "price_of", lambda one, row: (0.5, False) if row == "CircAvg" else found(one, row))
    (field,) = all_tasks.figure([study]).axes
    rows = [row for row in all_tasks.MARKS if row in study.rows]
    marks = {row: bar.lines[0] for row, bar in zip(rows, field.containers, strict=True)}
    assert list(marks) == ["Hydra", "Hydra (Circ)", "CircAvg"]
    gain = study.difference(HYDRA, SINGLE, "all.auroc")
    assert gain is not None
    assert marks[HYDRA].get_xdata() == pytest.approx(study.cost(HYDRA)["latency_ratio"])
    assert marks[HYDRA].get_ydata() == pytest.approx(100 * gain.value)
    assert [row for row, mark in marks.items() if mark.get_markerfacecolor() != "white"] == [HYDRA]
    assert field.get_xlim()[0] < marks["CircAvg"].get_xdata()[0] == 0.5
    assert not all_tasks.drawn([study], tmp_path / "figure.svg")
    assert all_tasks.drawn([study], all_tasks.draw([study], tmp_path / "figure.svg"))
    monkeypatch.undo()
    assert not all_tasks.drawn([study], tmp_path / "figure.svg")  # of another price: a figure of other numbers is none


def test_the_figure_of_all_tasks_is_of_the_stored_numbers() -> None:
    """Where not: `python benchmarks/tables.py` draws it, on a CPU."""
    assert all_tasks.drawn(stored_studies())


def test_runs_are_stored_beside_each_other(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a later run adds is held against the Single of that run; a run with all rows takes the place."""
    results, report, added = tmp_path / "results", tmp_path / NAME / "seed-0" / "report", SOUP
    shutil.copytree(study.folder, results / NAME)
    reported, stored = partial(report_of, study, tmp_path), partial(stored_from, tmp_path)
    reported(added, MC_DROPOUT)
    reported(SINGLE, SINGLE)  # the same run, whose other rows are elsewhere: they stay
    one = stored()
    assert (set(one.rows), one.seeds(HYDRA), one.in_parts) == ({*ROWS, added}, [0, 1], False)
    warmer = {key: column / 2 if "calibrated." in key else column for key, column in study.columns(SINGLE, 0).items()}
    write_columns(report / f"{slug(SINGLE)}.parquet", warmer)
    reported(DEEP, MC_DROPOUT)  # the same model, to which another version fitted another temperature
    assert (set(stored().rows), stored().in_parts) == ({*ROWS, added, DEEP}, False)
    storing.forget(results / NAME, [added, DEEP])
    (report / f"{slug(DEEP)}.json").unlink()
    reported(SINGLE, HYDRA)  # stands for another Single
    for _ in range(2):  # what is stored already stays as it is
        both = stored()
        assert (both.seeds(added), both.seeds(SINGLE), both.in_parts) == ([0], [0, 1], True)
        assert both.facts["choices"] == study.facts["choices"]
        against = both.difference(added, SINGLE, "calibrated.nll")
        assert against == study.difference(MC_DROPOUT, HYDRA, "calibrated.nll")
        turned = both.difference(SINGLE, added, "calibrated.nll")
        assert turned == study.difference(HYDRA, MC_DROPOUT, "calibrated.nll")  # whichever stands first
        for row in (MC_DROPOUT, HYDRA):
            assert both.difference(row, SINGLE, "accuracy") == study.difference(row, SINGLE, "accuracy")
            assert both.across(row, added)
            assert not both.across(row, SINGLE)
        apart = both.difference(added, MC_DROPOUT, "calibrated.nll")  # the same columns, in runs with two Singles
        gap = Difference.of(*([study.numbers(row, 0)["calibrated.nll"]] for row in (SINGLE, HYDRA)))
        assert apart is not None
        assert (apart.value, apart.half_width) == pytest.approx((gap.value, gap.half_width))
        assert apart.as_they_are == Difference(0.0, 0.0, 1)
    assert all_tasks.seeds_cell([both, study], added) == "1, –"
    for row in ROWS[1:]:
        reported(row, row)
    with monkeypatch.context() as killed:
        killed.setattr(storing, "write_columns", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stored()
    half = Study(NAME, results)  # of the seed that was being replaced nothing is shown, and of others what was
    assert (half.seeds(added), half.seeds(SINGLE)) == ([], [1])
    whole = stored()
    assert (whole.in_parts, whole.seeds(SINGLE)) == (False, [0, 1])
    assert whole.numbers(SINGLE, 0)["accuracy"].value == study.numbers(HYDRA, 0)["accuracy"].value


def report_of(study: Study, run: Path, row: str, like: str) -> None:
    """A run whose row says what a row of the study does."""
    place = run / NAME / "seed-0" / "report" / slug(row)
    write_columns(place.with_suffix(".parquet"), study.columns(like, 0))
    write_json(place.with_suffix(".json"), study.facts["runs"]["0"]["report"][like])


def stored_from(run: Path) -> Study:
    """The study after a run is stored."""
    CLASSIFIERS.run(Run(SmallTask(NAME), run, run / "results", [], [0]), ["store"])
    return Study(NAME, run / "results")


def test_rows_of_another_recipe_are_not_stored_beside_each_other(study: Study, tmp_path: Path) -> None:
    shutil.copytree(study.folder, tmp_path / "results" / NAME)
    task = SmallTask(NAME)
    task.plain["training"]["learning_rate"] *= 3
    with pytest.raises(CheckpointError, match="learning_rate was"):
        CLASSIFIERS.run(Run(task, tmp_path, tmp_path / "results", [], [0]), ["store"])


def test_rows_are_forgotten_and_stored_anew(study: Study, tmp_path: Path) -> None:
    """What is stored stays as it is until it is forgotten; then the row comes with the Single of its new run."""
    results = tmp_path / "results"
    shutil.copytree(study.folder, results / NAME)
    for row, like in ((SINGLE, HYDRA), (MC_DROPOUT, SINGLE)):
        report_of(study, tmp_path, row, like)
    assert stored_from(tmp_path).plain(MC_DROPOUT) == study.plain(MC_DROPOUT)
    for _ in range(2):  # also of a row that has a Single of its own
        storing.forget(results / NAME, [MC_DROPOUT])
        without = Study(NAME, results)
        assert (without.seeds(MC_DROPOUT), without.in_parts) == ([], False)
        assert MC_DROPOUT not in without.facts["choices"]
        assert without.plain(HYDRA) == study.plain(HYDRA)
        anew = stored_from(tmp_path)
        assert (anew.seeds(MC_DROPOUT), anew.in_parts) == ([0], True)
        assert anew.difference(MC_DROPOUT, SINGLE, "accuracy") == Difference.of(
            [study.numbers(SINGLE, 0)["accuracy"]], [study.numbers(HYDRA, 0)["accuracy"]]
        )
    for wrong in ([SINGLE], ["no row"], []):
        with pytest.raises(DataError, match="held against"):
            storing.forget(results / NAME, wrong)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("small", ROWS),
        *((name, [DEEP]) for name in STORED),
        *(pytest.param(name, None, marks=pytest.mark.slow, id=f"{name}, all rows") for name in STORED),
    ],
)
def test_main_table_and_ood_sets_by_other_code(
    name: str, rows: list[str] | None, request: pytest.FixtureRequest
) -> None:
    """Of every stored study, and a small one, rows as they are printed: on the level of Single's mean."""
    few = Study(NAME, request.getfixturevalue("study").folder.parent) if name == "small" else published(name)
    few.rows = rows or few.rows
    head, _, *lines = (line.strip("| ").split(" | ") for line in findings.main_table(few).splitlines())
    keys = {title: key for key, title in findings.MAIN.items()}
    sets = (few.facts["inside"], few.facts["groups"])
    places = {"detection": [*few.facts["groups"], "all"], "sets": [f"ood.{one}" for one in few.outside]}
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
            for place, cell in zip(some, detected[table][f"| {row}"], strict=True):
                three = cell.removesuffix(" |").split(" / ")
                shown += [(one, f"{place}.{key}") for one, key in zip(three, findings.METRICS, strict=True)]
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


def test_a_study_goes_on_where_it_stopped_and_choices_stay(study: Study, tmp_path: Path) -> None:
    output = study.folder.parents[1]
    place = output / NAME / "seed-0" / "report" / f"{slug(HYDRA)}.json"
    before, task = place.stat().st_mtime_ns, SmallTask(NAME)
    classifiers.report(Seed(task, 0, output), HYDRA)
    assert place.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="choose"):
        Seed(task, 0, tmp_path).chosen("CircAvg")
    stored = {**read_json(study.folder / "study.json"), "format": "another"}
    write_json(tmp_path / NAME / "study.json", stored)
    with pytest.raises(DataError, match="another"):
        Study(NAME, tmp_path)
    write_json(tmp_path / NAME / "study.json", study.facts)
    with pytest.raises(DataError, match="lacks seed-0"):
        Study(NAME, tmp_path).columns(HYDRA, 0)
