"""What the documents say of the results, and that the stored rows agree with the stored tables."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from studies.claims import judged, verdict
from studies.rows import COMPARED, HELD_OUT, MOST_OUTSIDE, MOST_SEEDS, SINGLE, Rows
from studies.tables import Study, cell, read_csv

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results"
TABLES = RESULTS / "tables"
STUDIES = sorted(
    path.stem.removesuffix("_seeds") for path in TABLES.glob("*_seeds.csv") if path.stem != "analysis_seeds"
)
CIFAR100, CIFAR10, TINY, SST2 = "vision-cifar100", "vision-cifar10", "vision-tinyimagenet", "text-sst2"
HYDRA, CIRC, DEEP = "Hydra", "Hydra (Circ)", "Deep Ensembles"


@cache
def pairs(study: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """Lines of a table of differences; a pair stands there in one order."""
    return {(one["first"], one["second"], one["metric"]): one for one in read_csv(TABLES / f"{study}_pairs.csv")}


def told(study: str, first: str, second: str, metric: str, looks: str = "") -> str:
    """What a table says of a difference: better, worse, or nothing where it is not certain."""
    column, turned = f"significant{looks}", {"better": "worse", "worse": "better", "": ""}
    if line := pairs(study).get((first, second, metric)):
        return line[column]
    return turned[pairs(study)[second, first, metric][column]]


EVERYWHERE = ("calibrated.nll", "near.auroc")
CLAIMS = [  # (studies, first, second, metrics, what holds of all of them)
    ((CIFAR100, CIFAR10, TINY), HYDRA, SINGLE, ("accuracy", "aurc", *EVERYWHERE), "better"),
    ((CIFAR100, TINY), "Soup", SINGLE, ("accuracy", "aurc", *EVERYWHERE), "better"),
    ((CIFAR100, CIFAR10, TINY), DEEP, SINGLE, ("accuracy", "aurc", *EVERYWHERE), "better"),
    ((SST2,), DEEP, SINGLE, ("calibrated.nll",), "better"),
    ((SST2,), HYDRA, SINGLE, EVERYWHERE, ""),
    ((CIFAR10, TINY), HYDRA, SINGLE, ("far.auroc",), "better"),
    ((CIFAR100, CIFAR10, TINY), HYDRA, "Single, trained as long", ("near.auroc",), "better"),
    ((TINY,), HYDRA, "Single, trained as long", ("accuracy", "calibrated.nll"), "worse"),
    ((CIFAR100, TINY), CIRC, SINGLE, ("calibrated.nll", "aurc", "mahalanobis:all.auroc"), "worse"),
    ((TINY,), CIRC, SINGLE, ("accuracy", "near.auroc", "far.auroc"), "worse"),
    ((CIFAR100,), CIRC, SINGLE, ("near.auroc",), "better"),
    ((CIFAR100, TINY), CIRC, "Random heads", ("accuracy", "calibrated.nll", "near.auroc"), "better"),
    ((CIFAR100, TINY), CIRC, "Hydra (Taylor)", ("accuracy", "calibrated.nll", "near.auroc"), "better"),
    ((SST2, CIFAR10), CIRC, SINGLE, ("accuracy", "calibrated.nll"), ""),
    ((CIFAR100, CIFAR10, TINY), "Laplace (last layer)", SINGLE, ("near.auroc", "far.auroc"), "better"),
    ((CIFAR100, CIFAR10, TINY), "Laplace (last layer)", SINGLE, ("calibrated.nll", "aurc"), "worse"),
]


@pytest.mark.parametrize(("studies", "first", "second", "metrics", "holds"), CLAIMS)
def test_what_is_said_of_methods(
    studies: tuple[str, ...], first: str, second: str, metrics: tuple[str, ...], holds: str
) -> None:
    found = {(study, metric): told(study, first, second, metric) for study in studies for metric in metrics}
    assert found == dict.fromkeys(found, holds)


def test_hydras_gain_survives_all_looks_at_the_test_sets() -> None:
    for study in (CIFAR100, CIFAR10, TINY):
        assert [told(study, HYDRA, SINGLE, metric, "_all_looks") for metric in EVERYWHERE] == ["better"] * 2


def test_zero_shot_gains_are_small() -> None:
    assert told("zero-shot", "BayesVLM", SINGLE, "unseen.nll") == "better"
    assert abs(float(pairs("zero-shot")["BayesVLM", SINGLE, "unseen.nll"]["difference"])) < 0.01
    assert told("zero-shot", "Temperature Scaling", SINGLE, "unseen.accuracy") == ""


def test_distance_tells_foreign_images_better_than_confidence() -> None:
    """By about ten points and more, whatever the model."""
    for study in (CIFAR100, TINY):
        found = {(one["method"], one["metric"]): one for one in read_csv(TABLES / f"{study}.csv")}
        for method in (SINGLE, "Soup", HYDRA, DEEP):
            gap = float(found[method, "mahalanobis:all.auroc"]["value"]) - float(found[method, "all.auroc"]["value"])
            assert gap > 0.04, (study, method)


def test_what_hydra_costs() -> None:
    """A third more work than Single for three members above a trunk of ten layers."""
    for study in (CIFAR100, TINY):
        costs = {one["method"]: one for one in read_csv(TABLES / f"{study}_costs.csv")}
        assert float(costs[HYDRA]["work"]) == pytest.approx(1.33, abs=0.02)
        assert float(costs[DEEP]["work"]) == pytest.approx(3, abs=0.01)
        assert float(costs["Soup"]["work"]) == 1
    counted = {one["contender"]: one for one in read_csv(TABLES / "inference_counts.csv")}
    assert int(counted["single"]["parameters"]) == 86_567_656
    assert float(counted["hydra-k0"]["limit"]) == pytest.approx(2.43, abs=0.01)


def test_a_cascade_is_nearly_as_good_as_its_last_stage() -> None:
    """On CIFAR-100, asked for a tenth, over five seeds; half of the traffic foreign makes it dearer, not worse."""
    table = [one for one in read_csv(TABLES / "cascade_traffic.csv") if one["task"] == "cifar100"]
    mine = [one for one in table if one["method"] == "cascade soup-deep"]

    def mean(column: str, *cell: str) -> float:
        found = [one for one in mine if (one["traffic"], one["declined_at_once"], one["limit"]) == cell]
        assert len(found) == 5
        return sum(float(one[column]) for one in found) / len(found)

    for place in (("known", "nothing", ""), ("half foreign", "nothing", ""), ("half foreign", "nothing", "0.2")):
        assert mean("nll", *place) - mean("deep_nll", *place) < 0.003
        assert mean("deep_accuracy", *place) - mean("accuracy", *place) < 0.003
    told = ((0.10, 1.30, "known", ""), (0.34, 2.03, "half foreign", ""), (0.20, 1.62, "half foreign", "0.2"))
    for asked, price, traffic, limit in told:  # docs/how-to/escalate.md
        assert mean("asked", traffic, "nothing", limit) == pytest.approx(asked, abs=0.006)
        assert mean("price", traffic, "nothing", limit) == pytest.approx(price, abs=0.02)
    assert mean("asked", "half foreign", "unfamiliar", "") == pytest.approx(0.07, abs=0.006)
    assert mean("known_declined", "half foreign", "unfamiliar", "") == pytest.approx(0.05, abs=0.006)


def test_monitors_alarm_rarely_and_old_ones_nearly_as_soon() -> None:
    """Of 2,000 unchanged streams hardly any; after a million rows at most three times as late as after a thousand."""
    table = read_csv(TABLES / "monitor_simulation.csv")
    same = [one for one in table if one["part"] == "no change"]
    assert {one["streams"] for one in same} == {"2000"}
    assert {one["rows_after"] for one in same} == {"20000"}
    for one in same:
        assert float(one["share"]) <= float(one["allowed"]) + 3.3 * (float(one["allowed"]) / 2000) ** 0.5
    delays: dict[str, dict[str, float]] = {}
    for one in table:
        if one["part"] in ("inputs", "audit") and one["median_delay"]:
            delays.setdefault(one["cell"], {})[one["rows_before"]] = float(one["median_delay"])
    both = {cell: found for cell, found in delays.items() if {"1000", "1000000"} <= set(found)}
    assert len(both) == 16  # seven changes of inputs, nine audits
    assert all(found["1000000"] <= 3 * found["1000"] for found in both.values()), both
    (price,) = (one for one in table if one["part"] == "price")
    assert float(price["share"]) < 0.01


def test_the_attack_found_no_forbidden_outcome() -> None:
    for line in read_csv(TABLES / "attack.csv"):
        assert (line["other"], line["raw"], line["slow"]) == ("0", "0", "0"), line["what"]


def tables_of(page: str) -> Iterator[list[dict[str, str]]]:
    """The tables of a page: a dictionary a row, by head; marks of better and worse are left out."""
    for block in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


def same(shown: str, stored: float) -> bool:
    """Whether a printed number is a stored one, rounded."""
    number = re.sub(r"[ x%+]", "", shown)
    return abs(float(number) - stored) <= 0.501 * 10 ** -len(number.partition(".")[2])


SHOWN = {"accuracy ↑": ("accuracy", 100), "NLL ↓": ("calibrated.nll", 1), "near ↑": ("near.auroc", 100)}
SHOWN |= {"far ↑": ("far.auroc", 100), "by distance ↑": ("mahalanobis:all.auroc", 100)}
UNSEEN = {"accuracy ↑": ("unseen.accuracy", 100), "NLL ↓": ("unseen.nll", 1), "ECE ↓": ("unseen.ece", 100)}
UNSEEN |= {"near ↑": ("tinyimagenet.near.auroc", 100), "CIFAR-100, all ↑": ("cifar100.all.auroc", 100)}
PAGES = {"cifar100": [CIFAR100], "cifar10": [CIFAR10], "sst2": [SST2], "zero_shot": ["zero-shot"]}
PAGES |= {"tinyimagenet": [TINY, f"{TINY}-faster"]}


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_studies_show_the_numbers_of_the_tables(page: str) -> None:
    for study, rows in zip(PAGES[page], tables_of(f"docs/study_{page}.md"), strict=True):
        stored = {(one["method"], one["metric"]): float(one["value"]) for one in read_csv(TABLES / f"{study}.csv")}
        for row in rows:
            for column, (metric, unit) in (UNSEEN if study == "zero-shot" else SHOWN).items():
                assert same(row[column], unit * stored[row[""], metric]), (row[""], column)


TABLE2 = {"accuracy ↑": ("accuracy", 100), "Brier ↓": ("brier", 1), "NLL ↓": ("nll", 1), "ECE ↓": ("ece", 100)}
TABLE2 |= {"aECE ↓": ("aece", 100), "AUROC ↑": ("all.auroc", 100), "FPR95 ↓": ("all.fpr95", 100)}
TABLE2 |= {"AUPR ↑": ("all.aupr", 100)}


def test_table_2_at_size_shows_the_numbers_of_the_tables() -> None:
    study = "text-sst2-base"
    stored = {(one["method"], one["metric"]): float(one["value"]) for one in read_csv(TABLES / f"{study}.csv")}
    (rows, _) = tables_of("docs/study_sst2_base.md")
    for row in rows:
        for column, (metric, unit) in TABLE2.items():
            ours = row[column].partition(" (")[0].strip("*")
            assert same(ours, unit * stored[row[""], metric]), (row[""], column)


BOTH = "confidence and familiarity"
COMPARED_SHARES = [("single softmax", "softmax threshold"), ("single", "confidence")]
COMPARED_SHARES += [(one, BOTH) for one in ("single", "soup", "cascade soup-hydra", "hydra", "deep", "hydra circ")]
IMAGES = ("cifar100", "dinov2-s")
SHARES = {"CIFAR-100: answered ↑": (IMAGES, "accepted"), "wrong": (IMAGES, "errors")}
SHARES |= {"a fifth near: wrong ↓": (IMAGES, "near_errors"), "a fifth far: wrong ↓": (IMAGES, "far_errors")}
SHARES |= {"TinyImageNet-200: answered ↑": (("tinyimagenet", "dinov2-s"), "accepted")}
SHARES |= {"SST-2, MiniLM: answered ↑": (("sst2", "minilm-l6"), "accepted")}
SHARES |= {"SST-2, 12 x 768: answered ↑": (("sst2", "nomic-12x768"), "accepted")}


def test_readme_and_results_show_the_numbers_of_the_tables() -> None:
    """Shares that may be answered under a promise, and gains over a single model."""
    lines = [one for one in read_csv(TABLES / "promise_shares.csv") if one["risk"] == "0.05"]
    methods = ("single", "single", "soup", "hydra", "deep")

    def stored(task: str, place: int, number: str) -> float:
        rule = "confidence" if place == 0 else "confidence and familiarity"
        wanted = (task, methods[place], rule)
        return 100 * mean(float(one[number]) for one in lines if (one["task"], one["method"], one["rule"]) == wanted)

    (shown, *_) = tables_of("README.md")
    first, gains = list(tables_of("docs/results.md"))
    for place, row in enumerate(shown):
        assert same(row["answered"], stored("cifar100", place, "accepted"))
        assert same(row["of these wrong"], stored("cifar100", place, "errors"))
        assert same(row["foreign answered"], stored("cifar100", place, "foreign_accepted"))
    for row, (method, rule) in zip(first, COMPARED_SHARES, strict=True):
        for column, (task, number) in SHARES.items():
            wanted = (*task, method, rule)
            keys = ("task", "backbone", "method", "rule")
            found = [float(one[number]) for one in lines if tuple(one[key] for key in keys) == wanted]
            assert same(row[column], 100 * mean(found)) if found else row[column] == "–", (row[""], column)
    for row in gains:
        for column, study in (
            ("CIFAR-100", CIFAR100),
            ("CIFAR-10", CIFAR10),
            ("TinyImageNet-200", TINY),
            ("SST-2", SST2),
        ):
            line = pairs(study)[row[""].removesuffix(", the paper's"), SINGLE, "calibrated.nll"]
            assert same(row[f"{column}: NLL"], float(line["difference"])), (row[""], study)


MAIN = ("accuracy", "calibrated.nll", "calibrated.ece", "aurc", "near.auroc", "far.auroc", "mahalanobis:all.auroc")


@pytest.mark.parametrize("name", [name for name in STUDIES if (RESULTS / "rows" / f"{name}.parquet").exists()])
def test_the_stored_rows_give_the_numbers_of_the_tables(name: str) -> None:
    """Numbers of test sets exactly; those of OOD sets, of which at most 1,000 samples are stored, nearly."""
    study = Study(Rows.read(RESULTS / "rows" / f"{name}.parquet"))
    stored = {(one["method"], int(one["seed"])): one for one in read_csv(TABLES / f"{name}_seeds.csv")}
    assert set(study.methods) <= set(COMPARED)
    assert max(len(study.seeds(method)) for method in study.methods) <= MOST_SEEDS
    keys = MAIN if study.alone else ("unseen.accuracy", "unseen.nll", "unseen.aurc", "cifar100.all.auroc")
    for method in study.methods:
        for seed in study.seeds(method)[:2]:
            numbers = study.numbers(method, seed)
            for key in (key for key in keys if stored[method, seed][key]):  # MC Dropout has no distances
                near = 0.012 if key.endswith("auroc") else 2e-4
                assert numbers[key].value == pytest.approx(float(stored[method, seed][key]), abs=near), (method, key)
    places = study.rows.places
    outside = [place for place in places if len({*place.split("|"), HELD_OUT}) == 3]
    assert max(len(places[place]) for place in outside) <= MOST_OUTSIDE


def test_files_are_small_and_whole() -> None:
    assert max(path.stat().st_size for path in RESULTS.rglob("*.*")) < 4.5e6
    assert sum(path.stat().st_size for path in RESULTS.rglob("*.*")) < 20e6
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    for path in TABLES.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            widths = {len(line) for line in csv.reader(file)}
        assert len(widths) == 1, path.name
        known = path.stem.partition("_")[0] in STUDIES or path.stem.startswith("analysis_") or path.name in listed
        assert known, path.name


def test_the_papers_claims_are_judged_by_the_stored_tables() -> None:
    stored = (TABLES / "paper_claims.csv").read_text(encoding="utf-8").splitlines()
    made = [[cell(value) for value in line] for line in judged(TABLES)]
    assert list(csv.reader(stored)) == made
    assert {line[6] for line in made[1:]} <= {"holds", "differs", "not decided", "not testable here"}
    assert all(line[3] for line in made[1:] if line[6] in ("holds", "differs"))
    assert len(read_csv(TABLES / "diversity.csv")) == 8
    (shown,) = [table for table in tables_of("docs/paper.md") if "holds" in table[0]]
    for row in shown:
        found = Counter(line[6] for line in made if line[1] == row["section"])
        assert {name: int(row[name]) for name in list(row)[1:]} == {name: found[name] for name in list(row)[1:]}


@pytest.mark.parametrize(
    ("low", "high", "claimed", "least", "said"),
    [
        (0.1, 0.2, "higher", 0.0, "holds"),
        (-0.2, -0.1, "higher", 0.0, "differs"),
        (-0.2, 0.1, "lower", 0.0, "not decided"),
        (-0.004, 0.2, "not lower", -0.005, "holds"),
        (-0.2, 0.004, "not higher", 0.005, "holds"),
        (1.3, 1.4, "not higher", 1.07, "differs"),
    ],
)
def test_a_claim_holds_if_its_interval_is_on_the_claimed_side(
    low: float, high: float, claimed: str, least: float, said: str
) -> None:
    assert verdict((0.0, low, high, 3), {"study": "some", "is": claimed}, least) == said
