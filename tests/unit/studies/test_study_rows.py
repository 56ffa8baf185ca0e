"""Rows of the classifier studies on small models: each is trained, chosen, and answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_studies import SmallTask

import hydra_ensembles as he
from hydra_ensembles.errors import CheckpointError, DataError, DivergedError
from hydra_ensembles.files import read_json
from studies import classifiers, rows
from studies.classifiers import choose, report
from studies.column_files import read_columns
from studies.engine import Run
from studies.rows import BASELINES, CIRC_AVG, MIMO
from studies.seed import Seed
from studies.seed_folder import slug
from studies.stored import stored_study
from studies.task import recipe

IMAGES, SCRATCH = "vision-cifar100", "vision-eurosat-scratch"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seed]:
    """One seed of a task of each kind; CircAvg's rate is already chosen."""
    output = tmp_path_factory.mktemp("rows")
    made = {name: Seed(SmallTask(name), 0, output) for name in (IMAGES, SCRATCH)}
    place = made[IMAGES].study / "choices" / f"{slug(CIRC_AVG)}.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"setting": {"rate": 0.01}}')
    return made


TUNED = [(IMAGES if "image" in row.kinds else SCRATCH, name) for name, row in BASELINES.items() if row.like is None]


@pytest.mark.parametrize(("name", "row"), [*TUNED, (SCRATCH, MIMO)])
def test_every_setting_of_a_baseline_trains_and_answers(
    seeds: dict[str, Seed], name: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "POINTS", 2)
    seed = seeds[name]
    options = BASELINES[row].options(seed.task)
    assert 2 <= len(options) <= 3
    inputs = next(iter(seed.task.batches(seed.task.half_b)))[0]
    said = []
    for setting in options:
        model = BASELINES[row].make(seed, setting)
        assert isinstance(model, he.Ensemble)
        assert model.num_members == (20 if row == rows.LAPLACE else 3)
        logits = model(inputs)
        assert not torch.allclose(logits[0], logits[1], atol=1e-5)  # members differ
        said.append(logits)
    assert not any(torch.equal(said[0], one) for one in said[1:])  # settings differ too
    again = BASELINES[row].make(seed, options[0])  # cached, or recomputed
    torch.testing.assert_close(again(inputs), said[0])


def test_from_scratch_every_seed_draws_all_weights(seeds: dict[str, Seed]) -> None:
    seed = seeds[SCRATCH]
    one, two, again = seed.fresh(1), seed.fresh(2), seed.fresh(1)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        if tensor.std() > 0:
            assert not torch.equal(tensor, two.state_dict()[name]), name


def test_rankings_are_made_in_full_float32_and_circuits_exactly(tmp_path: Path, monkeypatch) -> None:
    """The studies otherwise use TF32; circuits must not depend on it or on the machine's speed."""
    seed, seen = Seed(SmallTask(IMAGES), 0, tmp_path), []

    def extract(*given: Any, method: str, **_: Any) -> he.HeadRanking:
        seen.append((torch.get_float32_matmul_precision(), method))
        return he.HeadRanking(((0, 0),), (1.0,), "circuit/exact", "avg")

    monkeypatch.setattr(he, "extract_circuit", extract)
    monkeypatch.setattr(seed, "sides", lambda: (None, None, None))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert seed.circuit("avg", 1).method == "circuit/exact"
        assert (seen, torch.get_float32_matmul_precision()) == ([("highest", "exact")], "high")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_baseline_is_chosen_on_half_b_and_reported(tmp_path: Path) -> None:
    """Snapshot, from the choice to the columns; a row without its choice is refused."""
    seed, row = Seed(SmallTask(IMAGES), 0, tmp_path), rows.SNAPSHOT
    with pytest.raises(DataError, match="choose"):
        report(seed, row)
    choose(seed, row)
    assert seed.chosen(row) in BASELINES[row].options(seed.task)
    report(seed, row)
    columns = read_columns(seed.folder / "report" / f"{slug(row)}.parquet")
    assert {"cifar100|correct", "cifar100|calibrated.nll", "cifar10|msp", "svhn|mutual_information"} <= set(columns)


def test_settings_that_diverge_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detected in training or in the outputs; an error if no setting is left."""
    seed = Seed(SmallTask(IMAGES), 0, tmp_path)

    def make(_: Seed, setting: Any) -> he.Ensemble:
        if setting["rate"] == 3:
            raise DivergedError("the loss is not finite")
        model = seed.task.start()
        for weights in model.parameters():
            weights.data *= 1 if setting["rate"] == 1 else torch.nan
        return model

    few = {row: rows.Row(make, 1, rows.rates(*rates)) for row, rates in (("some", (3, 2, 1)), ("none", (3, 2)))}
    monkeypatch.setattr(classifiers, "rows_of", lambda _: few)
    choose(seed, "some")
    assert seed.chosen("some") == {"rate": 1}
    choice = read_json(seed.study / "choices" / "some.json")
    assert [[one["setting"]["rate"] for one in choice[key]] for key in ("measured", "left_out")] == [[1], [3, 2]]
    with pytest.raises(DataError, match=r"no setting of 'none' is left .* infinite"):
        choose(seed, "none")


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    """A trial on a share of the data leaves models that a real run must not reuse."""
    task = SmallTask(IMAGES)
    Seed(task, 0, tmp_path)
    Seed(task, 1, tmp_path)
    task.share = 0.5
    with pytest.raises(CheckpointError, match="share"):
        Seed(task, 0, tmp_path)


@pytest.mark.parametrize("name", recipe()["tasks"])
def test_a_study_has_the_seeds_of_its_recipe(tmp_path: Path, name: str) -> None:
    """So that the command without options reproduces what is stored."""
    task = SmallTask(name)
    study = stored_study(name)
    assert {row: task.seeds_of(row) for row in study.rows} == {row: study.seeds(row) for row in study.rows}
    plan = classifiers.jobs(Run(task, tmp_path, tmp_path, study.rows, []), "report")
    assert {job[1:] for job in plan} == {(seed, row) for row in study.rows for seed in study.seeds(row)}
