"""A whole study of classifiers on small models, from the first training to the tables, and the tables by other code."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from small_studies import SmallTask

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, write_json
from studies import classifiers, findings
from studies.findings import Study, judged
from studies.measures import Difference
from studies.rows import HYDRA, MC_DROPOUT, SINGLE
from studies.seed import Seed, slug
from studies.workers import Workers

NAME = "vision-cifar100"
ROWS = [SINGLE, MC_DROPOUT, "CircAvg", "Hydra (Circ)", HYDRA, "Hydra, tuned"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Rows of every kind of one seed, and Single and Hydra of a second."""
    output, task = tmp_path_factory.mktemp("study"), SmallTask(NAME)
    task.settings["shift"] |= {"images": 3, "seeds": [0]}
    task.settings["cost_batch"] = 2
    task.settings["candidates"] = task.settings["candidates"][:2]
    with Workers(task, output, 1) as pool:
        for stage in classifiers.STEPS:
            pool.run(classifiers.jobs_of(task, stage, ROWS, [0]))
        pool.run(classifiers.jobs_of(task, "report", [SINGLE, HYDRA], [1]))
    classifiers.cost(Seed(task, 0, output), [SINGLE, HYDRA])
    classifiers.collect(task, output, output / "results")
    return Study(NAME, output / "results")


def test_every_row_is_reported_corrupted_and_shown(study: Study) -> None:
    assert study.rows == ROWS
    assert [study.seeds(row) for row in (SINGLE, HYDRA, MC_DROPOUT)] == [[0, 1], [0, 1], [0]]
    tables = [findings.main_table, findings.sets_table, findings.shift_table]
    for table in tables:
        lines = [line for line in table(study).splitlines() if line.startswith("| ")]
        assert [line[2:].partition(" | ")[0] for line in lines[1:]] == ROWS
    shifted = study.facts["runs"]["0"]["shift"][SINGLE]
    assert len(shifted) == 75
    assert {one["severity"] for one in shifted} == {1, 2, 3, 4, 5}
    assert study.cost(HYDRA)["latency_ratio"] > 0
    assert "| taken |" in findings.choices_table(study)
    assert {one["verdict"] for one in findings.claims(study)} <= {
        "reproduced",
        "not reproduced",
        "tie",
        "not run",
        "one seed",
    }


def test_the_main_table_by_other_code(study: Study) -> None:
    """From the stored columns with numpy and scikit-learn."""
    columns = np.load(study.folder / "seed-0.npz")
    for row in study.rows:
        own = {key: columns[f"{row}|cifar100|{key}"].astype(float) for key in ("correct", "calibrated.nll", "msp")}
        found = study.numbers(row, 0)
        assert found["accuracy"].value == pytest.approx(own["correct"].mean())
        assert found["calibrated.nll"].value == pytest.approx(own["calibrated.nll"].mean())
        areas = []
        for name in ("dtd10", "miniplaces", "mnist", "svhn"):
            other = columns[f"{row}|{name}|msp"].astype(float)
            truth = [0] * len(own["msp"]) + [1] * len(other)
            areas.append(roc_auc_score(truth, np.concatenate([own["msp"], other])))
        assert found["far.auroc"].value == pytest.approx(np.mean(areas))
    assert (
        f"| {SINGLE} | {100 * np.mean([study.numbers(SINGLE, seed)['accuracy'].value for seed in (0, 1)]):.2f} |"
        in (findings.main_table(study))
    )


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


@pytest.mark.parametrize(
    ("value", "half_width", "claimed", "margin", "verdict"),
    [
        (0.02, 0.01, "higher", 0.0, "reproduced"),
        (0.02, 0.03, "higher", 0.0, "tie"),
        (-0.02, 0.01, "higher", 0.0, "not reproduced"),
        (-0.002, 0.001, "not lower", 0.005, "reproduced"),
        (-0.004, 0.003, "not lower", 0.005, "tie"),
        (-0.02, 0.003, "not lower", 0.005, "not reproduced"),
        (0.002, 0.001, "not higher", 0.005, "reproduced"),
        (0.02, 0.003, "not higher", 0.005, "not reproduced"),
    ],
)
def test_a_claim_has_a_margin(value: float, half_width: float, claimed: str, margin: float, verdict: str) -> None:
    assert judged(Difference(value, half_width, 3), claimed, margin) == verdict
