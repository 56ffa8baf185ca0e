"""Columns come back as written; intervals against a bootstrap, and verdicts (numbers: test_study_findings.py)."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import entr, softmax

from studies.claims import judged
from studies.column_files import read_columns, write_columns
from studies.measures import Array, Columns, Difference, Number, numbers
from studies.storing import thinned, whole

GROUPS = {"near": ["like"], "far": ["grey", "noise"]}


def columns(seed: int, edge: float = 0.0, count: int = 1200) -> dict[str, npt.NDArray[np.float64]]:
    """Columns of a model that is right more often where its doubt is low; `edge` improves all of them."""
    draws = np.random.default_rng(0)  # samples are equal for every model; its answers differ by seed
    noise = np.random.default_rng(seed)
    hard = draws.random(count)
    doubt = np.clip(0.6 * hard + 0.1 * noise.random(count), 0.001, 0.95)
    correct = draws.random(count) > np.clip(doubt - edge, 0, 1)
    nll = np.where(correct, -np.log(1 - doubt), -np.log(doubt / 3))
    found = {"correct": correct, "msp": doubt, "entropy": doubt**0.9, "mutual_information": doubt / 10}
    found |= {"mahalanobis": 40 + 30 * hard + noise.random(count)}
    for prefix in ("", "calibrated."):
        found |= {f"{prefix}doubt": doubt, f"{prefix}nll": nll, f"{prefix}brier": (doubt - correct) ** 2}
    whole = {f"own|{key}": one for key, one in found.items()}
    for place, (name, size) in enumerate({"like": 900, "grey": 1100, "noise": 1000}.items()):
        far = np.clip(draws.random(size) * 0.7 + 0.1 * place + edge, 0.001, 0.99) + 0.01 * noise.random(size)
        scores = {"msp": far, "entropy": far**0.9, "mutual_information": far / 10, "mahalanobis": 50 + 40 * far}
        whole |= {f"{name}|{key}": one for key, one in scores.items()}
    return whole


def test_influences_of_an_area_with_ties_are_what_samples_weigh() -> None:
    """Measured by duplicating each sample."""
    found = {key: one[:300].astype(float) for key, one in columns(1).items() if key.startswith("own|")}
    found["own|msp"] = np.round(found["own|msp"], 1)  # seven distinct scores
    exact = numbers(found, "own", {})["aurc"]
    weighed = []
    for row in range(300):
        twice = {key: np.append(one, one[row]) for key, one in found.items()}
        weighed.append(301 * (numbers(twice, "own", {})["aurc"].value - exact.value))
    influence = exact.influences["own"]
    np.testing.assert_allclose(np.array(weighed) - np.mean(weighed), influence, atol=0.03 * np.abs(influence).max())


def test_influences_have_the_deviation_that_a_bootstrap_finds() -> None:
    """For the paired difference of two models on the same samples."""
    one, other = columns(1, 0.08), columns(2)

    def differences(*models: Columns) -> dict[str, Number]:
        ours, theirs = (numbers(model, "own", GROUPS) for model in models)
        return {key: ours[key].minus(theirs[key]) for key in ours}

    draws, sizes = np.random.default_rng(5), {key.partition("|")[0]: len(part) for key, part in one.items()}
    replicates = []
    for _ in range(100):
        rows = {name: draws.integers(size, size=size) for name, size in sizes.items()}
        drawn = [{key: part[rows[key.partition("|")[0]]] for key, part in model.items()} for model in (one, other)]
        replicates.append({key: found.value for key, found in differences(*drawn).items()})
    for key, exact in differences(one, other).items():
        assert exact.deviation == pytest.approx(float(np.std([each[key] for each in replicates])), rel=0.25), key


def test_intervals_have_seeds_and_samples() -> None:
    """Gains of 0.1, 0.2 and 0.3 without sample variance: Student's half width, 4.3027 · 0.1 / √3."""
    flat: Callable[[float], Number] = lambda value: Number(value, {"own": np.zeros(50)})  # noqa: E731
    found = Difference.of([flat(1.1), flat(1.2), flat(1.3)], [flat(1.0)] * 3)
    assert found.value == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert not found.certain
    corrected = Difference.of([flat(1.1), flat(1.2), flat(1.3)], [flat(1.0)] * 3, looks=2)
    assert corrected.half_width == pytest.approx(6.2053 * 0.1 / 3**0.5, rel=1e-4)  # of 97.5 %, from a table
    swinging = Number(1.5, {"own": np.array([1.0, -1.0] * 200)})
    alone = Difference.of([swinging], [Number(1.0, {"own": np.zeros(400)})])
    assert alone.half_width == pytest.approx(1.96 * 1.00125 / 20, rel=1e-3)
    other = Number(1.0, {"own": np.zeros(400)})
    assert not alone.certain  # one seed is never certain
    assert not Difference.of([swinging] * 2, [other] * 2).certain  # nor are two
    assert Difference.of([swinging] * 3, [other] * 3).certain


@pytest.mark.parametrize(("there", "verdict"), [(0.3, "reproduced"), (0.1, "tie")])
def test_of_two_runs_it_counts_both_ways(there: float, verdict: str) -> None:
    """Both as gains over each run's Single, and as a direct difference of the rows."""
    found = Difference(0.5, 0.2, 3, as_they_are=Difference(there, 0.2, 3))
    assert found.certain == (verdict == "reproduced")
    assert judged(found, "higher", 0.0) == verdict


@pytest.mark.parametrize(
    ("value", "half_width", "claimed", "margin", "verdict"),
    [
        (0.02, 0.01, "higher", 0.0, "reproduced"),
        (0.02, 0.03, "higher", 0.0, "tie"),
        (-0.02, 0.01, "higher", 0.0, "not reproduced"),
        (-0.002, 0.001, "not lower", 0.005, "reproduced"),
        (-0.004, 0.003, "not lower", 0.005, "tie"),
        (0.002, 0.001, "not higher", 0.005, "reproduced"),
        (0.02, 0.01, "lower", 0.0, "not reproduced"),
    ],
)
def test_a_claim_has_a_margin(value: float, half_width: float, claimed: str, margin: float, verdict: str) -> None:
    assert judged(Difference(value, half_width, 3), claimed, margin) == verdict
    assert judged(Difference(value, half_width, 1), claimed, margin) == "one seed"


HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # all float16 values: both zeros, infinities, all NaNs
COLUMNS: Mapping[str, Array] = {
    "rows": np.array(["Taylor", "Hydra (Circ), 3", "ß|∂"]),
    "Single|own|msp": HALVES,
    "Single|own|correct": np.arange(1001) % 3 == 0,
    "Single|own|mutual_information": np.array([1 / 3]),
    "Hydra|own|msp": HALVES[::-1],  # not contiguous
    "Hydra|own|correct": np.zeros(0, dtype=bool),
    "Hydra|own|entropy": np.zeros(0, dtype=np.float16),
    "Hydra|own|mutual_information": np.zeros(0),
    "": np.array([np.nan, -0.0, np.inf, 5e-324]),
}


def test_columns_come_back_as_they_were_given(tmp_path: Path) -> None:
    place = tmp_path / "a folder" / "seed-0.parquet"
    write_columns(place, COLUMNS)
    found = read_columns(place)
    assert found.keys() == COLUMNS.keys()
    for name, column in found.items():
        assert (column.dtype, column.tobytes()) == (COLUMNS[name].dtype, COLUMNS[name].tobytes())
    assert read_columns(tmp_path / "seed-1.parquet") == {}


@pytest.mark.parametrize("classes", [2, 50])
def test_what_follows_from_doubt_is_not_kept_and_comes_back(classes: int) -> None:
    """NLL of correct answers and entropy of two classes follow from doubt, unless it is too small for float16.

    Brier scores and distances are rounded.
    """
    draws = np.random.default_rng(0)
    probs = softmax(draws.exponential(6, (500, 1)) * draws.normal(size=(500, classes)), axis=1)  # [N, C]
    labels, answers = draws.integers(classes, size=500), probs.argmax(axis=1)
    labels[::2] = answers[::2]
    places = np.arange(500)
    columns = {
        "own|correct": answers == labels,
        "own|msp": 1 - probs[places, answers],
        "own|nll": -np.log(probs[places, labels]),
        "own|brier": ((probs - np.eye(classes)[labels]) ** 2).sum(axis=1),
        "own|entropy": entr(probs).sum(axis=1),
        "own|mahalanobis": draws.uniform(256, 511, 500),
        "ood|nll": np.ones(3),  # has no doubt column
    }
    kept = {name: column.astype(bool if "correct" in name else np.float16) for name, column in columns.items()}
    thin = thinned(kept)
    gone = {name.partition("|")[2]: np.isnan(column) for name, column in thin.items() if name.startswith("own")}
    assert (gone["nll"] == columns["own|correct"]).mean() > 0.99
    assert gone["entropy"].mean() > 0.9 if classes == 2 else not gone["entropy"].any()
    assert not gone["msp"].any()
    back = whole(thin)
    for name, column in back.items():
        assert column.dtype == kept[name].dtype
        step = 2.0**-15 if "brier" in name else 2.0**-23
        np.testing.assert_allclose(column.astype(float), kept[name].astype(float), rtol=2.0**-8, atol=step)
