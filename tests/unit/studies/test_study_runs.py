"""Whole studies in small: from data to rows and tables, for classifiers and zero-shot."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_studies import SmallTask, SmallZeroShot

import hydra_ensembles as he
from checkpoint_models import same_state
from hydra_ensembles.errors import CheckpointError, DataError, DivergedError, SameMembersError
from hydra_ensembles.files import read_json
from studies import engine, methods
from studies.classifiers import ClassifierLab
from studies.distilled import phases, write_distilled
from studies.engine import Method, choose, opened, run
from studies.rows import SINGLE, Rows, published
from studies.tables import Study, read_csv

IMAGES, SCRATCH = "vision-cifar100", "vision-eurosat-scratch"
SOME = [SINGLE, "MC Dropout", "Soup", "Hydra (Circ)", "Hydra", "Hydra, distilled"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of classifiers that ran whole."""
    output = tmp_path_factory.mktemp("classifiers")
    return run(SmallTask(IMAGES), output, SOME, [0])


def test_a_study_ends_in_rows_and_tables(finished: Path) -> None:
    rows = Rows.read(finished / "rows.parquet")
    assert rows.runs == {method: [0] for method in SOME}
    assert rows.about["tasks"] == {"cifar100": {"near": ["cifar10"], "far": ["dtd10", "miniplaces", "mnist", "svhn"]}}
    columns = rows.columns("Hydra", 0)
    stored = published(rows)  # a part of it
    compared = [SINGLE, "MC Dropout", "Soup", "Hydra", "Hydra, distilled", "Hydra (Circ)"]
    assert [method for method, _ in stored] == compared
    assert "cifar100|held-out|correct" in stored["Hydra", 0]
    assert "cifar100|cifar100|brier" not in stored["Hydra", 0]
    assert {"cifar100|svhn|mahalanobis", "cifar100|gaussian_noise 5|correct"} <= set(columns)
    assert "cifar100|svhn|correct" not in columns
    told = {(line["method"], line["metric"]): line for line in read_csv(finished / "tables" / f"{IMAGES}.csv")}
    accuracy = columns["cifar100|cifar100|correct"].mean()
    assert float(told["Hydra", "accuracy"]["value"]) == pytest.approx(float(accuracy), abs=1e-5)
    assert {"severity 3.accuracy", "shift.nll", "mahalanobis:all.auroc"} <= {key for method, key in told}
    names = {path.stem.removeprefix(IMAGES) for path in (finished / "tables").iterdir()}
    assert names == {"", "_choices", "_claims", "_models", "_pairs", "_seeds", "_sets", "_times"}
    chosen = read_csv(finished / "tables" / f"{IMAGES}_choices.csv")
    assert {"MC Dropout", "CircAvg"} == {line["method"] for line in chosen if line["chosen"] == "taken"}


def test_a_finished_study_is_not_computed_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(he, "finetune", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(engine, "measure_costs", lambda *_, **__: [])
    before = (finished / "rows.parquet").read_bytes()
    run(SmallTask(IMAGES), finished.parent, SOME, [0])
    assert (finished / "rows.parquet").read_bytes() == before


def test_a_folder_of_other_settings_is_refused(finished: Path) -> None:
    """A trial on a share of the data leaves models that a real run must not reuse."""
    task = SmallTask(IMAGES)
    task.share = 0.5
    with pytest.raises(CheckpointError, match="share"):
        run(task, finished.parent, [SINGLE], [0])


def test_settings_of_a_distilled_hydra_are_chosen_on_held_out_data(tmp_path: Path) -> None:
    """Members beyond the seed's own three are fine-tunings of other seeds; unlabelled rows may be of another source."""
    task = SmallTask(f"{IMAGES}-distilled")
    cheap = methods.LOOKED_FOR[0]
    task.plain[cheap] = [{"mlp": "mean", "lost": 1}, {"rows": "others"}, {"rows": "plain", "members": 5}]
    task.plain |= {methods.LOOKED_FOR[1]: [{}, {"epochs": 1}], "seeds_of": {3: task.plain["methods"]}}
    for part in itertools.chain(*phases([0, 1, 2])):
        folder = run(task, tmp_path, part[0], part[1], part[2].removeprefix("cost,").split(","))
    measured = read_json(folder / "choices" / "hydra-distilled-cheap.json")["measured"]
    assert [one["setting"] for one in measured] == task.plain[cheap]
    assert len({one["calibrated.nll"] for one in measured}) == 3
    with opened(task, folder, 0) as lab:
        assert isinstance(lab, ClassifierLab)
        five = [he.load(folder / f"seed-{seed}" / "models" / f"single-{index}") for seed, index in ((1, 0), (2, 0))]
        assert [same_state(one, other) for one, other in zip(lab.fine_tunings(5)[3:], five, strict=True)] == [True] * 2
        pruned = task.methods[cheap].make(lab, task.plain[cheap][0])
    assert [len(layer) for layer in pruned.heads[0]] == [3, 3, 3, 2]
    assert pruned.config.sharing.mlp
    paths = write_distilled(tmp_path / "results", folder)
    assert [path.name for path in paths] == ["distill_settings.csv", "distill.csv"]
    assert [line["members"] for line in read_csv(paths[0])] == [*[""] * 4, "3", "3", "3", "3", "5"]
    assert [line["method"] for line in read_csv(paths[1])] == list(task.methods)[:-1]


TUNED = [
    (IMAGES if "image" in row.kinds else SCRATCH, name)
    for name, row in methods.BASELINES.items()
    if row.like is None and isinstance(row, methods.Row)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("baselines")


@pytest.mark.parametrize(("name", "method"), [*TUNED, (SCRATCH, methods.MIMO)])
def test_every_setting_of_a_baseline_trains_and_answers(folder: Path, name: str, method: str) -> None:
    task = SmallTask(name)
    with opened(task, folder / name, 0) as lab:
        assert isinstance(lab, ClassifierLab)
        inputs = next(iter(task.batches(task.inside["B"])))[0]
        options = task.methods[method].settings(task)
        assert 2 <= len(options) <= 3
        said = []
        for setting in options:
            model = task.methods[method].make(lab, setting)
            assert model.num_members == (20 if method == methods.LAPLACE else 3)
            said.append(model(inputs))
            assert not torch.allclose(said[-1][0], said[-1][1], atol=1e-5)  # members differ
        assert not any(torch.equal(said[0], one) for one in said[1:])  # settings differ too


class FewMethods(SmallTask):
    """A task with methods of a test."""

    few: Mapping[str, Method] = {}

    @property
    def methods(self) -> Mapping[str, Method]:
        return self.few


def test_failures_stop_nothing_and_diverging_settings_are_left_out(tmp_path: Path, capsys: Any) -> None:
    task = FewMethods(IMAGES)

    def scaled(lab: ClassifierLab, setting: Any) -> he.Ensemble:
        if setting.get("rate") == 3:
            raise DivergedError("the loss is not finite")
        model = task.start()
        for weights in model.parameters():
            weights.data *= torch.nan if setting.get("rate") == 2 else 1
        return model

    def same(lab: ClassifierLab, setting: Any) -> he.Ensemble:
        raise SameMembersError("no second one differs")

    rates = [{"rate": rate} for rate in (3, 2, 1)]
    few = {SINGLE: Method(scaled), "some": Method(scaled, settings=lambda _: rates), "same": Method(same)}
    task.few = few
    run(task, tmp_path, [], [0], ["choose", "report", "tables"])  # members that do not differ are no failure
    choice = read_json(tmp_path / IMAGES / "choices" / "some.json")
    assert [[one["setting"]["rate"] for one in choice[key]] for key in ("measured", "left_out")] == [[1], [3, 2]]
    assert "UNAVAILABLE: vision-cifar100 report same" in capsys.readouterr().out
    few["none"] = Method(scaled, settings=lambda _: rates[:2])
    with opened(task, tmp_path / IMAGES, 0) as lab, pytest.raises(DataError, match="no setting of 'none'"):
        choose(lab, "none")
    few["bad"] = Method(lambda lab, _: scaled(lab, {"rate": 2}))
    with pytest.raises(DataError, match="finite"):
        run(task, tmp_path, ["bad"], [0], ["report"])


# --- zero-shot -------------------------------------------------------------------------------------------------------


def test_the_zero_shot_study_from_pairs_to_tables(tmp_path: Path) -> None:
    task = SmallZeroShot()
    folder = run(task, tmp_path, stages=["report", "cost", "tables"])
    study = Study(Rows.read(folder / "rows.parquet"))
    assert study.methods == list(task.methods)
    assert (study.detections, len(study.tasks)) == (["cifar100", "tinyimagenet"], 5)
    found = study.plain("ViLU", 0)
    assert found["cifar100.own.all.auroc"] == found["cifar100.vilu:all.auroc"] != found["cifar100.all.auroc"]
    same = [study.plain(method, 0)["cifar100.accuracy"] for method in (SINGLE, "Temperature Scaling")]
    assert same[0] == same[1]
    with opened(task, folder, 0) as lab:
        for method in (SINGLE, "Hydra (Circ)"):  # members in turn are the one model whose cost is measured
            one = task.calibration()
            whole = lab.whole(method)
            inputs = next(iter(task.batches(one.samples)))[0]
            expected = lab.answering(method, {})(one).member_logits
            torch.testing.assert_close(whole(inputs), expected[:, : len(inputs)], atol=1e-4, rtol=1e-4)
        members = [lab.member(methods_family(task, "Hydra (Circ)"), index) for index in range(3)]
        assert len({str(member.image.heads) + str(member.text.heads) for member in members}) == 3


def methods_family(task: SmallZeroShot, method: str) -> Any:
    return task.methods[method].family  # type: ignore[attr-defined]
