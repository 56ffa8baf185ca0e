"""Metrics and their intervals, against a bootstrap and Student's t; verdicts; rows that come back as written."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, roc_auc_score

from hydra_ensembles.errors import DataError
from studies.measures import Difference, Number, numbers, plain_numbers
from studies.rows import SINGLE, Rows, write_rows
from studies.tables import Study, judged, write_tables

GROUPS = {"near": ["like"], "far": ["grey", "noise"]}


def columns(seed: int, edge: float = 0.0, count: int = 1200) -> dict[str, npt.NDArray[np.float64]]:
    """Columns of a model that is right more often where its doubt is low; `edge` improves all of them."""
    draws = np.random.default_rng(0)  # samples are equal for every model; its answers differ by seed
    noise = np.random.default_rng(seed)
    hard = draws.random(count)
    doubt = np.clip(0.6 * hard + 0.1 * noise.random(count), 0.001, 0.95)
    correct = draws.random(count) > np.clip(doubt - edge, 0, 1)
    nll = np.where(correct, -np.log(1 - doubt), -np.log(doubt / 3))
    found = {"correct": correct, "doubt": doubt, "entropy": doubt**0.9, "mutual_information": doubt / 10}
    found |= {"mahalanobis": 40 + 30 * hard + noise.random(count)}
    for prefix in ("", "calibrated_"):
        found |= {f"{prefix}doubt": doubt, f"{prefix}nll": nll, f"{prefix}brier": (doubt - correct) ** 2}
    whole = {f"own|{key}": one for key, one in found.items()}
    for place, (name, size) in enumerate({"like": 900, "grey": 1100, "noise": 1000}.items()):
        far = np.clip(draws.random(size) * 0.7 + 0.1 * place + edge, 0.001, 0.99) + 0.01 * noise.random(size)
        scores = {"doubt": far, "entropy": far**0.9, "mutual_information": far / 10, "mahalanobis": 50 + 40 * far}
        whole |= {f"{name}|{key}": one for key, one in scores.items()}
    return whole


def test_metrics_are_those_of_other_libraries() -> None:
    found, given = plain_numbers(one := columns(1), "own", GROUPS), columns(1)
    labels = np.r_[np.zeros(1200), np.ones(1100)]
    doubts = np.r_[given["own|doubt"], given["grey|doubt"]]
    assert found["ood.grey.auroc"] == pytest.approx(roc_auc_score(labels, doubts))
    assert found["ood.grey.aupr"] == pytest.approx(average_precision_score(labels, doubts))
    assert found["far.auroc"] == pytest.approx((found["ood.grey.auroc"] + found["ood.noise.auroc"]) / 2)
    assert "ood.like.fpr95" not in found  # fewer than 1,000 samples
    assert found["accuracy"] == one["own|correct"].mean()
    assert spearmanr(given["own|doubt"], given["own|entropy"]).statistic == pytest.approx(1)
    assert found["entropy:all.auroc"] == pytest.approx(found["all.auroc"])


def test_influences_have_the_deviation_that_a_bootstrap_finds() -> None:
    """For the paired difference of two models on the same samples."""
    one, other = columns(1, 0.08), columns(2)

    def differences(*models: Mapping[str, Any]) -> dict[str, Number]:
        ours, theirs = (numbers(model, "own", GROUPS) for model in models)
        return {key: ours[key].minus(theirs[key]) for key in ours}

    draws, sizes = np.random.default_rng(5), {key.partition("|")[0]: len(part) for key, part in one.items()}
    replicates = []
    for _ in range(100):
        rows = {name: draws.integers(size, size=size) for name, size in sizes.items()}
        taken = [{key: part[rows[key.partition("|")[0]]] for key, part in model.items()} for model in (one, other)]
        replicates.append({key: found.value for key, found in differences(*taken).items()})
    for key, exact in differences(one, other).items():
        assert exact.deviation == pytest.approx(float(np.std([each[key] for each in replicates])), rel=0.25), key


def test_intervals_have_seeds_and_samples() -> None:
    """Gains of 0.1, 0.2 and 0.3 without sample variance: Student's half width, 4.3027 · 0.1 / √3."""
    flat: Callable[[float], Number] = lambda value: Number(value, {"own": np.zeros(50)})  # noqa: E731
    found = Difference.of([flat(1.1), flat(1.2), flat(1.3)], [flat(1.0)] * 3)
    assert (found.value, found.half_width) == (pytest.approx(0.2), pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4))
    assert not found.certain
    corrected = Difference.of([flat(1.1), flat(1.2), flat(1.3)], [flat(1.0)] * 3, looks=2)
    assert corrected.half_width == pytest.approx(6.2053 * 0.1 / 3**0.5, rel=1e-4)  # of 97.5 %, from a table
    swinging, other = Number(1.5, {"own": np.array([1.0, -1.0] * 200)}), Number(1.0, {"own": np.zeros(400)})
    alone = Difference.of([swinging], [other])
    assert alone.half_width == pytest.approx(1.96 * 1.00125 / 20, rel=1e-3)
    assert [Difference.of([swinging] * count, [other] * count).certain for count in (1, 2, 3)] == [False, False, True]
    three = Difference.of([swinging] * 3, [other] * 3)
    assert (three.verdict("accuracy"), three.verdict("calibrated.nll")) == ("better", "worse")


@pytest.mark.parametrize(
    ("value", "claimed", "verdict"),
    [
        (0.02, "higher", "reproduced"),
        (-0.02, "higher", "not reproduced"),
        (0.005, "higher", "tie"),
        (-0.02, "lower", "reproduced"),
        (-0.03, "not lower", "not reproduced"),
        (0.005, "not lower", "reproduced"),
    ],
)
def test_verdicts_have_a_margin(value: float, claimed: str, verdict: str) -> None:
    assert judged(Difference(value, 0.01, 3), claimed, 0.01) == verdict
    assert judged(Difference(value, 0.01, 2), claimed, 0.01) == "too few seeds"


def write_study(path: Path, **about: Any) -> Study:
    """Three seeds of Single and of a better Hydra, the latter without the last."""
    runs = {(SINGLE, seed): columns(seed) for seed in (0, 1, 2)} | {
        ("Hydra", seed): columns(5 + seed, 0.1) for seed in (0, 1)
    }
    placed = {run: {f"own|{key}": column for key, column in one.items()} for run, one in runs.items()}
    write_rows(path, {"study": "small", "tasks": {"own": GROUPS}, **about}, placed)
    return Study(Rows.read(path))


def test_rows_come_back_as_written_and_give_tables(tmp_path: Path) -> None:
    study = write_study(tmp_path / "rows.parquet")
    assert study.rows.runs == {SINGLE: [0, 1, 2], "Hydra": [0, 1]}
    back, given = study.rows.columns("Hydra", 1), columns(6, 0.1)
    assert set(back) == {f"own|{key}" for key in given}
    for key, column in given.items():
        np.testing.assert_allclose(back[f"own|{key}"].astype(float), column, rtol=1e-3, atol=1e-6)
    single = [study.plain(SINGLE, seed)["accuracy"] for seed in (0, 1, 2)]
    gains = [study.plain("Hydra", seed)["accuracy"] - single[seed] for seed in (0, 1)]
    assert study.mean("Hydra", "accuracy") == pytest.approx(np.mean(single) + np.mean(gains))
    without = study.difference("Hydra", SINGLE, "all but like.auroc")
    far = study.difference("Hydra", SINGLE, "far.auroc")
    assert without is not None
    assert far is not None
    assert without.value == pytest.approx(far.value)
    files = {path.name for path in write_tables(study, tmp_path / "tables")}
    assert files == {f"small{name}.csv" for name in ("", "_seeds", "_pairs", "_sets", "_claims")}
    (tmp_path / "rows.parquet").write_bytes(b"no rows")
    with pytest.raises(DataError, match="rows"):
        Rows.read(tmp_path / "rows.parquet")
