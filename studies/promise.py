"""The promise on errors: is it kept in simulation, and what share may each method answer under it?

`simulate` draws calibration rows from populations whose risk is known exactly; `shares` compares methods on stored
rows. Both go through `promise.Curve`, by which `certify`, and so `calibrate`, finds its threshold. `mixed_traffic` says
what becomes of a cascade's quality and price when half of the rows are foreign.
"""

import copy
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import torch
from scipy.stats import norm

from hydra_ensembles.metrics.conformal import conformal_threshold
from hydra_ensembles.promise import Curve

from .rows import Array, Rows
from .tables import read_csv, write_csv

RISKS = (0.005, 0.01, 0.02, 0.05)
SIZES = (300, 500, 1000, 2000, 5000, 10000)
LEVEL, UNFAMILIAR = 0.95, 0.05
POPULATION, SEED = 200_000, 20261119
DRAWS = 2000
SIMULATION = "promise_simulation.csv"
SHARES = "promise_shares.csv"
TRAFFIC = "cascade_traffic.csv"

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

        order = np.argsort(self.sure)
        self._sure, self._wrong = self.sure[order], np.append(0.0, np.cumsum(self.wrong[order]))

    def of(self, threshold: float, limit: float = math.inf) -> tuple[float, float]:
        """The true risk of what is accepted, and its share of all rows."""
        if limit == math.inf:
            place = int(np.searchsorted(self._sure, threshold))
            accepted, wrong = POPULATION - place, self._wrong[-1] - self._wrong[place]
        else:
            rows = (self.sure >= threshold) & (self.far <= limit)
            accepted, wrong = int(rows.sum()), self.wrong[rows].sum()
        return (wrong / accepted if accepted else 0.0), accepted / POPULATION

    def only(self, label: int) -> "Population":
        """The rows that are answered with a label, with the same chances."""
        mine = copy.copy(self)
        mine.sure = np.where(self.label == label, self.sure, -1.0)
        order = np.argsort(mine.sure)
        mine._sure, mine._wrong = mine.sure[order], np.append(0.0, np.cumsum(self.wrong[order]))
        return mine


KINDS = ("calibrated", "overconfident", "not monotone", "tied")


def threshold_of(sure: Numbers, wrong: npt.NDArray[np.bool_], risk: float, level: float) -> float:
    """The threshold that `certify` returns; infinite where nothing can be promised."""
    curve = Curve.of(sure, wrong)
    count = curve.most(risk, level)
    return curve.threshold(count) if count else math.inf


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
    wrong = draws.random(len(places)) < population.wrong[places]
    threshold = threshold_of(population.sure[places], wrong, risk, LEVEL)
    return (0.0, 0.0) if threshold == math.inf else population.of(threshold, limit)


def drawn_by_label(
    parts: Sequence[Population], rows: int, risk: float, draws: np.random.Generator
) -> tuple[float, float]:
    """The larger risk over its promise, times `risk`, of two labels with two promises, and the share accepted."""
    places = draws.integers(0, POPULATION, rows)
    wrong = draws.random(rows) < parts[0].wrong[places]
    worst, share = 0.0, 0.0
    for label, (part, allowed) in enumerate(zip(parts, (risk, min(0.5, 4 * risk)), strict=True)):
        mine = part.label[places] == label
        threshold = threshold_of(part.sure[places][mine], wrong[mine], allowed, 1.0 - (1.0 - LEVEL) / len(parts))
        if threshold < math.inf:
            true, accepted = part.of(max(threshold, 0.0))
            worst, share = max(worst, true / allowed * risk), share + accepted
    return worst, share


def cell(kind: str, rule: str, rows: int, risk: float, draws: int) -> list[Any]:
    """A line of the table: how often a promise was broken, and what share could be accepted."""
    population = population_of(kind)
    parts = [population.only(label) for label in (0, 1)] if rule == "label" else []
    generator = np.random.default_rng([SEED, len(kind), len(rule), rows, round(1e4 * risk)])
    found = [
        drawn_by_label(parts, rows, risk, generator)
        if rule == "label"
        else drawn(population, rows, risk, rule == "familiarity", generator)
        for _ in range(draws)
    ]
    risks, shares = np.array(found).T
    broken, none = float((risks > risk).mean()), float((shares == 0).mean())
    return [kind, rule, rows, risk, draws, broken, shares.mean(), 1.96 * shares.std() / math.sqrt(draws), none]


@lru_cache(maxsize=1)
def population_of(kind: str) -> Population:
    """The population of a kind, the same in every process."""
    return Population(kind, SEED)


def simulate(folder: Path, draws: int = DRAWS, processes: int = 1) -> Path:
    """Write the table of simulated promises: every population, rule, number of rows and risk."""
    kinds = [(kind, rule) for kind in KINDS for rule in ("confidence", "familiarity")]
    kinds.append(("calibrated, by label", "label"))
    todo = [(*kind, rows, risk, draws) for kind in kinds for rows in SIZES for risk in RISKS]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        lines = pool.starmap(cell, todo, chunksize=4)
    spread = norm.ppf(1.0 - 0.05 / len(todo)) * math.sqrt(LEVEL * (1.0 - LEVEL) / draws)
    head = ["population", "rule", "rows", "risk", "draws", "broken", "accepted", "accepted 95 % half-width"]
    head += ["nothing promised", "allowed with Monte Carlo error", "verdict", "seed", "numpy", "scipy"]
    allowed = 1.0 - LEVEL + spread  # simultaneous over the cells
    about = [SEED, np.__version__, scipy.__version__]
    rated = [[*line, allowed, "kept" if line[5] <= allowed else "BROKEN", *about] for line in lines]
    return write_csv(folder / SIMULATION, [head, *rated])


# --- methods on stored rows ------------------------------------------------------------------------------------------

TASKS = {"vision-cifar100": "dinov2-s", "vision-tinyimagenet": "dinov2-s", "text-sst2": "minilm-l6"}
TASKS |= {"demo": "vit-6x144"}
METHODS = {"Single": "single", "Soup": "soup", "Hydra": "hydra", "Deep Ensembles": "deep"}
CHAINS = {"cascade soup-hydra": ("Soup", "Hydra"), "cascade soup-deep": ("Soup", "Deep Ensembles")}
ASKED = 0.1
CALIBRATIONS = 50
BATCH, LIMITS = 128, (None, 0.2)  # of mixed traffic: rows at once, the largest share of them that may go on
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
            threshold = threshold_of(1.0 - here["doubt"][kept], here["wrong"][kept].astype(bool), risk, LEVEL)
            takes = {name: (1.0 - one["doubt"] >= threshold) & (one["far"] <= limit) for name, one in sets.items()}
            mistakes = here["wrong"][new][takes[task][new]]
            let = [float(takes[name].mean()) for name in foreign]
            asked = float(here["goes"][new].mean()) if second is not None else 0.0
            numbers = [takes[task][new].mean(), mistakes.sum() / max(1, len(mistakes)), np.mean(let), asked]
            numbers += [math.isinf(threshold), here["wrong"][new].mean(), here["nll"][new].mean()]
            yield risk, familiar, [*map(float, numbers)]


Known = Mapping[str, Mapping[str, Array]]  # what a method said of a set, by `METHOD|SET`


def by_seed(results: Path, name: str) -> Iterator[tuple[str, list[str], int, Known, Mapping[str, float]]]:
    """Of each seed of a task: test set, foreign sets, seed, answers of the methods, and their prices."""
    rows = Rows.read(results / "rows" / f"{name}.parquet")
    ((task, groups),) = rows.about["tasks"].items()
    foreign = [one for sets in groups.values() for one in sets if f"{task}|{one}" in rows.places]
    costs = read_csv(results / "tables" / f"{name}_costs.csv")
    prices = {row["method"]: float(row["time"]) for row in costs if row["time"]}
    for seed in rows.runs["Deep Ensembles"]:
        known: dict[str, Mapping[str, Array]] = {}
        for method in METHODS:
            columns = rows.columns(method, seed)
            known |= {f"{method}|{place}": answers(columns, task, place) for place in (task, *foreign)}
        yield task, foreign, seed, known, prices


def lines(results: Path, name: str) -> Iterator[list[Any]]:
    """A line for every method, seed, risk and rule of a task."""
    for task, foreign, seed, known, prices in by_seed(results, name):
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
                shown = [f"{one:.4f}" for one in (accepted, errors, let, none, price, asked, 1 - wrong, nll)]
                about = [len(known[f"{first}|{task}"]["doubt"]) // 2, CALIBRATIONS]
                yield [task, TASKS[name], METHODS.get(method, method), seed, risk, LEVEL, rule, *shown, *about]


def shares(results: Path) -> Path:
    """Write the table of the share that each method may answer, and of the errors it then makes."""
    head = ["task", "backbone", "method", "seed", "risk", "confidence", "rule", "accepted", "errors"]
    head += ["foreign_accepted", "nothing_promised", "price", "asked", "accuracy", "nll", "calibration_rows", "draws"]
    return write_csv(results / "tables" / SHARES, [head, *(line for name in TASKS for line in lines(results, name))])


# --- mixed traffic ---------------------------------------------------------------------------------------------------


def mixed(seed: int, number: int, known: Known, task: str, foreign: Sequence[str], chain: str) -> Iterator[list[Any]]:
    """One calibration of a cascade, then traffic: who goes on, what is declined, and how good the other answers are.

    Unfamiliar rows are declined at once; of a batch, the least unsure go on, up to the limit, and the others are
    declined. Beside it the Deep Ensemble on the same known rows.
    """
    first, second = (known[f"{stage}|{task}"] for stage in CHAINS[chain])
    outside = [known[f"{CHAINS[chain][0]}|{place}"] for place in foreign]
    draws = np.random.default_rng([SEED, seed, number])
    order = draws.permutation(len(first["doubt"]))
    half = len(order) // 2
    threshold = conformal_threshold(torch.from_numpy(first["doubt"][order[: half // 5]]), 1.0 - ASKED)
    familiar = conformal_threshold(torch.from_numpy(first["far"][order[half // 5 : half]]), 1.0 - UNFAMILIAR)
    picked = draws.permutation(sum(len(one["doubt"]) for one in outside))[: len(order) - half]
    new = order[half : half + len(picked)]
    doubt, far = (
        np.append(first[name][new], np.concatenate([one[name] for one in outside])[picked]) for name in ("doubt", "far")
    )
    for traffic, rows in {"known": np.arange(len(new)), "half foreign": draws.permutation(len(doubt))}.items():
        for most_far in (math.inf, familiar):
            for limit in LIMITS:
                declined = far > most_far
                going = (doubt > threshold) & ~declined
                for batch in np.split(rows, range(BATCH, len(rows), BATCH)):
                    mine, most = batch[going[batch]], math.ceil((limit or 1.0) * len(batch))
                    over = mine[np.argsort(doubt[mine], kind="stable")][most:]
                    going[over], declined[over] = False, True
                kept = ~declined[: len(new)]
                said = [np.where(going[: len(new)], second[name][new], first[name][new]) for name in ("wrong", "nll")]
                deep = [known[f"Deep Ensembles|{task}"][name][new] for name in ("wrong", "nll")]
                wrong, nll, deep_wrong, deep_nll = (float(one[kept].mean()) for one in (*said, *deep))
                rule = "nothing" if most_far == math.inf else "unfamiliar"
                numbers = [going[rows].mean(), 1.0 - kept.mean(), 1.0 - wrong, nll, 1.0 - deep_wrong, deep_nll]
                yield [traffic, rule, limit or "", *map(float, numbers)]


def traffic_lines(results: Path, name: str) -> Iterator[list[Any]]:
    """A line for every cascade, seed, traffic, rule and limit of a task; means over calibrations."""
    for task, foreign, seed, known, prices in by_seed(results, name):
        for chain, stages in CHAINS.items():
            found = [list(mixed(seed, number, known, task, foreign, chain)) for number in range(CALIBRATIONS)]
            for cells in zip(*found, strict=True):
                asked, *numbers = np.mean([one[3:] for one in cells], axis=0)
                price = prices[stages[0]] + asked * prices[stages[1]]
                shown = [f"{one:.4f}" for one in (asked, price, *numbers)]
                yield [task, TASKS[name], chain, seed, *cells[0][:3], *shown, BATCH, CALIBRATIONS]


def mixed_traffic(results: Path) -> Path:
    """Write the table of cascades under mixed traffic."""
    head = ["task", "backbone", "method", "seed", "traffic", "declined_at_once", "limit", "asked", "price"]
    head += ["known_declined", "accuracy", "nll", "deep_accuracy", "deep_nll", "batch", "draws"]
    found = (line for name in TASKS for line in traffic_lines(results, name))
    return write_csv(results / "tables" / TRAFFIC, [head, *found])
