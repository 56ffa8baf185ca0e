"""The promise on errors: is it kept in simulation, and what share may each method answer under it?

`simulate` draws calibration rows from populations whose risk is known exactly; `shares` compares methods on stored rows.
Both go through `hydra_ensembles.promise.certify`, the function that `calibrate` calls.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import torch
from scipy.stats import norm
from tqdm import tqdm

from hydra_ensembles.errors import TooFewSamplesError
from hydra_ensembles.metrics.conformal import conformal_threshold
from hydra_ensembles.promise import certify

from .rows import Array, Rows
from .tables import write_csv

RISKS = (0.005, 0.01, 0.02, 0.05)
SIZES = (300, 500, 1000, 2000, 5000, 10000)
LEVEL, UNFAMILIAR = 0.95, 0.05
POPULATION, SEED = 400_000, 20261119
DRAWS = 2000
SIMULATION = "promise_simulation.csv"
SHARES = "promise_shares.csv"

Numbers = npt.NDArray[np.float64]


# --- simulation ------------------------------------------------------------------------------------------------------


class Population:
    """Rows with a confidence, a chance of being wrong, a distance from the known, and a label that is answered."""

    def __init__(self, kind: str, seed: int) -> None:
        draws = np.random.default_rng(seed)
        z = draws.normal(3.2, 2.2, POPULATION)
        right = 1.0 / (1.0 + np.exp(-np.abs(z)))
        self.sure: Numbers = right
        self.wrong: Numbers = np.clip(1.0 - right + 0.002, 0.0, 1.0)
        if kind == "overconfident":  # claims far more than is true
            self.sure = 1.0 - (1.0 - right) ** 2
        elif kind == "not monotone":  # the surest rows of all are often wrong
            self.wrong = np.where(right > np.quantile(right, 0.97), 0.06, self.wrong)
        elif kind == "tied":  # seven values
            self.sure = np.digitize(right, np.quantile(right, [0.05, 0.2, 0.4, 0.6, 0.8, 0.9])).astype(np.float64)
        self.far: Numbers = draws.normal(0.0, 1.0, POPULATION) - 2.0 * (right - right.mean())  # unsure rows are farther
        self.label = (draws.random(POPULATION) < 0.3).astype(np.int64)
        if "label" in kind:  # one label is answered wrongly more often
            self.wrong = np.where(self.label == 1, np.minimum(1.0, 1.5 * self.wrong), self.wrong)

    def risk(self, accepted: npt.NDArray[np.bool_]) -> float:
        """The share of accepted answers that is wrong; 0 if nothing is accepted."""
        return float(self.wrong[accepted].mean()) if accepted.any() else 0.0


KINDS = ("calibrated", "overconfident", "not monotone", "tied")


def drawn(
    population: Population, rows: int, risk: float, familiar: bool, draws: np.random.Generator
) -> tuple[float, float]:
    """The true risk and the accepted share of one calibration; nothing is accepted where nothing can be promised."""
    places = draws.integers(0, POPULATION, rows)
    limit = math.inf
    if familiar:  # the threshold comes from as many rows apart
        apart = population.far[draws.integers(0, POPULATION, rows)]
        limit = conformal_threshold(torch.from_numpy(apart), 1.0 - UNFAMILIAR)
        places = places[population.far[places] <= limit]
    correct = draws.random(len(places)) >= population.wrong[places]
    try:
        promise = certify(population.sure[places], correct, risk, level=LEVEL)
    except TooFewSamplesError:
        return 0.0, 0.0
    accepted = (population.sure >= promise.threshold) & (population.far <= limit)
    return population.risk(accepted), float(accepted.mean())


def drawn_by_label(population: Population, rows: int, risk: float, draws: np.random.Generator) -> tuple[float, float]:
    """The larger excess over the promises of two labels, and the share accepted, of one calibration."""
    places = draws.integers(0, POPULATION, rows)
    correct = draws.random(rows) >= population.wrong[places]
    risks = {0: risk, 1: min(0.5, 4 * risk)}
    worst, share = 0.0, 0.0
    for label, allowed in risks.items():
        mine = population.label[places] == label
        try:
            each = 1.0 - (1.0 - LEVEL) / len(risks)
            promise = certify(population.sure[places][mine], correct[mine], allowed, level=each)
        except TooFewSamplesError:
            continue
        accepted = (population.sure >= promise.threshold) & (population.label == label)
        worst = max(worst, population.risk(accepted) / allowed * risk)
        share += float(accepted.mean())
    return worst, share


def cells(draws: int) -> Iterator[list[Any]]:
    """A line of the table for every population, number of rows, risk, with familiarity, and by label."""
    todo = [(kind, rule) for kind in KINDS for rule in ("confidence", "familiarity")]
    todo.append(("calibrated, by label", "label"))
    count = len(todo) * len(SIZES) * len(RISKS)
    most = (1.0 - LEVEL) + norm.ppf(1.0 - 0.05 / count) * math.sqrt(LEVEL * (1.0 - LEVEL) / draws)
    bar = tqdm(total=count, unit="cell")
    for number, (kind, rule) in enumerate(todo):
        population = Population(kind, SEED)
        for rows in SIZES:
            for risk in RISKS:
                generator = np.random.default_rng([SEED, number, rows, round(1e4 * risk)])
                one: Callable[[], tuple[float, float]] = (
                    partial(drawn_by_label, population, rows, risk, generator)
                    if rule == "label"
                    else partial(drawn, population, rows, risk, rule == "familiarity", generator)
                )
                risks, shares = np.array([one() for _ in range(draws)]).T
                broken = float((risks > risk).mean())
                interval = 1.96 * shares.std() / math.sqrt(draws)
                none = float((shares == 0).mean())
                numbers = [f"{value:.4f}" for value in (broken, most, shares.mean(), interval, none)]
                yield [kind, rule, rows, risk, draws, *numbers, "kept" if broken <= most else "BROKEN"]
                bar.update()
    bar.close()


def simulate(folder: Path, draws: int = DRAWS) -> Path:
    """Write the table of simulated promises."""
    head = ["population", "rule", "rows", "risk", "draws", "broken", "allowed with Monte Carlo error"]
    head += ["accepted", "accepted 95 % half-width", "nothing promised", "verdict", "seed", "numpy", "scipy"]
    about = [SEED, np.__version__, scipy.__version__]
    return write_csv(folder / SIMULATION, [head, *([*line, *about] for line in cells(draws))])


# --- methods on stored rows ------------------------------------------------------------------------------------------

TASKS = {"vision-cifar100": "dinov2-s", "vision-tinyimagenet": "dinov2-s", "text-sst2": "minilm-l6"}
METHODS = {"Single": "single", "Soup": "soup", "Hydra": "hydra", "Deep Ensembles": "deep"}
CHAINS = {"cascade soup-hydra": ("Soup", "Hydra"), "cascade soup-deep": ("Soup", "Deep Ensembles")}
ASKED = 0.1
CALIBRATIONS = 50
PROMISED = (0.01, 0.02, 0.05, 0.1)


def answers(columns: Mapping[str, Array], task: str, place: str) -> dict[str, Array]:
    """What a method said of a set: doubt, wrong, distance and minus log-probability of the label.

    Of foreign rows only the uncalibrated doubt is stored; it is calibrated by the quantiles of the test rows.
    """
    wrong, nll = (columns.get(f"{task}|{place}|{name}") for name in ("correct", "calibrated_nll"))
    plain, calibrated = (columns[f"{task}|{task}|{name}"].astype(np.float64) for name in ("doubt", "calibrated_doubt"))
    doubt = calibrated
    if place != task:
        doubt = np.interp(columns[f"{task}|{place}|doubt"].astype(np.float64), np.sort(plain), np.sort(calibrated))
    return {
        "doubt": doubt,
        "far": columns[f"{task}|{place}|mahalanobis"].astype(np.float64),
        "wrong": np.zeros(0) if wrong is None else ~wrong.astype(bool),
        "nll": np.zeros(0) if nll is None else nll.astype(np.float64),
    }


def chained(first: Mapping[str, Array], second: Mapping[str, Array], threshold: float) -> dict[str, Array]:
    """A cascade's answers: those of the second where the first is in doubt; the distance is the first's."""
    goes = first["doubt"] > threshold
    parts = {name: np.where(goes, second[name], first[name]) for name in ("doubt", "wrong", "nll") if len(first[name])}
    return {"wrong": np.zeros(0), "nll": np.zeros(0), **parts, "far": first["far"], "goes": goes}


def draw_of(
    seed: int, number: int, known: Mapping[str, Mapping[str, Array]], task: str, foreign: Sequence[str], method: str
) -> Iterator[tuple[float, bool, list[float]]]:
    """One calibration of a method: half of the test rows certify, the other half is answered."""
    first, second = CHAINS.get(method, (method, None))
    mine = known[f"{first}|{task}"]
    order = np.random.default_rng([SEED, seed, number]).permutation(len(mine["doubt"]))
    half = len(order) // 2
    chosen, held, new = order[: half // 5], order[:half], order[half:]
    sets = {name: known[f"{first}|{name}"] for name in (task, *foreign)}
    if second is not None:
        threshold = conformal_threshold(torch.from_numpy(mine["doubt"][chosen]), 1.0 - ASKED)
        sets = {name: chained(one, known[f"{second}|{name}"], threshold) for name, one in sets.items()}
        held = order[half // 5 : half]
    certifying, here = held, sets[task]
    for risk in PROMISED:
        for familiar in (False, True):
            limit = math.inf
            if familiar:
                limit = conformal_threshold(torch.from_numpy(here["far"][held]), 1.0 - UNFAMILIAR)
            kept = certifying[here["far"][certifying] <= limit]
            right = ~here["wrong"][kept].astype(bool)
            try:
                threshold = certify(1.0 - here["doubt"][kept], right, risk, level=LEVEL).threshold
            except TooFewSamplesError:
                threshold = math.inf
            takes = {name: (1.0 - one["doubt"] >= threshold) & (one["far"] <= limit) for name, one in sets.items()}
            mistakes = here["wrong"][new][takes[task][new]]
            let = [float(takes[name].mean()) for name in foreign]
            asked = float(here["goes"][new].mean()) if second is not None else 0.0
            numbers = [takes[task][new].mean(), mistakes.sum() / max(1, len(mistakes)), np.mean(let), asked]
            numbers += [math.isinf(threshold), here["wrong"][new].mean(), here["nll"][new].mean()]
            yield risk, familiar, [*map(float, numbers)]


def lines(results: Path, name: str) -> Iterator[list[Any]]:
    """A line for every method, seed, risk and rule of a task."""
    rows = Rows.read(results / "rows" / f"{name}.parquet")
    ((task, groups),) = rows.about["tasks"].items()
    foreign = [one for sets in groups.values() for one in sets if f"{task}|{one}" in rows.places]
    with (results / "tables" / f"{name}_costs.csv").open(newline="") as file:
        prices = {row["method"]: float(row["time"]) for row in csv.DictReader(file) if row["time"]}
    for seed in rows.runs["Deep Ensembles"]:
        known: dict[str, Mapping[str, Array]] = {}
        for method in METHODS:
            columns = rows.columns(method, seed)
            known |= {f"{method}|{place}": answers(columns, task, place) for place in (task, *foreign)}
        for method in (*METHODS, *CHAINS):
            found: dict[tuple[float, bool], list[list[float]]] = {}
            for number in range(CALIBRATIONS):
                for risk, familiar, numbers in draw_of(seed, number, known, task, foreign, method):
                    found.setdefault((risk, familiar), []).append(numbers)
            for (risk, familiar), draws in found.items():
                accepted, errors, let, asked, none, wrong, nll = np.mean(draws, axis=0)
                first, second = CHAINS.get(method, (method, None))
                price = prices[first] + (asked * prices[second] if second else 0.0)
                rule = "confidence and familiarity" if familiar else "confidence"
                numbers = [f"{one:.4f}" for one in (accepted, errors, let, none, price, asked, 1 - wrong, nll)]
                about = [len(known[f"{first}|{task}"]["doubt"]) // 2, CALIBRATIONS]
                yield [task, TASKS[name], METHODS.get(method, method), seed, risk, LEVEL, rule, *numbers, *about]


def shares(results: Path) -> Path:
    """Write the table of the share that each method may answer, and of the errors it then makes."""
    head = [
        "task",
        "backbone",
        "method",
        "seed",
        "risk",
        "confidence",
        "rule",
        "accepted",
        "errors",
        "foreign_accepted",
    ]
    head += ["nothing_promised", "price", "asked", "accuracy", "nll", "calibration_rows", "draws"]
    return write_csv(results / "tables" / SHARES, [head, *(line for name in TASKS for line in lines(results, name))])
