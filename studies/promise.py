"""The promise on errors: is it kept in simulation, and what share may each method answer under it?

`simulate` draws calibration rows from populations whose risk is known exactly; `shares` compares methods on stored
rows. Both go through `promise.Curve`, by which `certify`, and so `calibrate`, finds its threshold. `mixed_traffic` says
what becomes of a cascade's quality and price when half of the rows are foreign.
"""

import copy
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import torch
from scipy.stats import norm

from hydra_ensembles.metrics.conformal import conformal_threshold
from hydra_ensembles.promise import Curve

from .rows import HELD_OUT, Array, Rows
from .tables import read_csv, write_csv

RISKS = (0.005, 0.01, 0.02, 0.05)
SIZES = (300, 500, 1000, 2000, 5000, 10000)
LEVEL, UNFAMILIAR = 0.95, 0.05
POPULATION, SEED = 200_000, 20261119
DRAWS = 2000
SIMULATION = "promise_simulation.csv"
SHARES = "promise_shares.csv"
TRAFFIC = "cascade_traffic.csv"
TRAFFIC_OF = ("vision-cifar100", "vision-tinyimagenet", "text-sst2", "demo")

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

ADDS = {"vision-cifar100-distilled": ("Hydra, distilled",)}  # studies of which only some methods are shown
BACKBONES = {"demo": "vit-6x144", "text-sst2": "minilm-l6"}  # of rows that do not say it; otherwise:
BACKBONE = "dinov2-s"
METHODS = {"Single": "single", "Laplace (last layer)": "laplace", "MC Dropout": "dropout", "Soup": "soup"}
METHODS |= {"Hydra": "hydra", "Hydra, distilled": "hydra distilled", "Deep Ensembles": "deep"}
METHODS |= {"LoRA-single": "lora single", "LoRA-Ensemble": "lora", "Label words": "words"}
METHODS |= {"Hydra (Taylor)": "hydra taylor", "Hydra (Circ)": "hydra circ"}
CHAINS = {"cascade soup-hydra": ("Soup", "Hydra"), "cascade soup-deep": ("Soup", "Deep Ensembles")}
TODAY = "single softmax"  # what people do: the lowest threshold on softmax that the same rows allow, without a promise
RULES = ("confidence", "confidence and familiarity")
ASKED = 0.1
CALIBRATIONS = 50
CERTIFY = 1200  # rows at least that certify, if no more than two thirds of all; otherwise half of them
FOREIGN = 0.2  # share of the traffic in the columns `near_…` and `far_…`
BATCH, LIMITS = 128, (None, 0.2)  # of mixed traffic: rows at once, the largest share of them that may go on
PROMISED = (0.01, 0.02, 0.05, 0.1)

Answers = dict[str, Array]  # what a method said of a set: doubt, wrong, distance, minus log-probability of the label
INSIDE, OUTSIDE, GROUPS = "inside", "outside", ("near", "far")
Known = Mapping[str, Answers]  # by `METHOD|inside`, rows of the task, and `METHOD|outside`, of all OOD sets in order


@dataclass(frozen=True)
class Stored:
    """The rows of a study with one task: where they are, what they stand for, and what its methods cost."""

    name: str
    rows: Rows
    task: str
    groups: Mapping[str, Sequence[str]]  # names of stored OOD sets by `near` and `far`
    prices: Mapping[str, float]  # time over Single's, by method; multiply-adds where no time was measured

    @classmethod
    def read(cls, results: Path, name: str) -> "Stored":
        """Read the rows of a study and its prices."""
        rows = Rows.read(results / "rows" / f"{name}.parquet")
        ((task, groups),) = rows.about["tasks"].items()
        kept = {group: [one for one in sets if f"{task}|{one}" in rows.places] for group, sets in groups.items()}
        files = [results / "tables" / f"{name}_{kind}.csv" for kind in ("costs", "times")]
        costs = [row for path in files if path.is_file() for row in read_csv(path)]
        prices = {row["method"]: float(row["time"]) for row in costs if row["time"]}
        counted = results / "tables" / f"{name}_models.csv"
        if not prices and counted.is_file():
            work = {row["method"]: float(row["multiply_adds"]) for row in read_csv(counted) if row["multiply_adds"]}
            prices = {method: one / work["Single"] for method, one in work.items()}
        return cls(name, rows, task, kept, prices)

    @property
    def backbone(self) -> str:
        """The name of its backbone in tables."""
        return str(self.rows.about.get("backbone", BACKBONES.get(self.name, BACKBONE)))

    @property
    def foreign(self) -> list[str]:
        """Its OOD sets."""
        return [name for sets in self.groups.values() for name in sets]

    @property
    def chains(self) -> dict[str, tuple[str, str]]:
        """The cascades of stored methods."""
        return {name: both for name, both in CHAINS.items() if all(one in self.rows.runs for one in both)}

    @cached_property
    def weights(self) -> Array:
        """Of each foreign row in the means over all, the near and the far sets, which count alike: `[3, N]`."""
        sizes = np.array([len(self.rows.places[f"{self.task}|{name}"]) for name in self.foreign])
        kinds = [np.ones(len(sizes), bool)] + [np.isin(self.foreign, self.groups.get(one, ())) for one in GROUPS]
        return np.stack([np.repeat(kind / max(1, kind.sum()) / sizes, sizes) for kind in kinds])

    def known(self, seed: int) -> Known:
        """What the methods of a seed said of the test set, with the held-out rows that are stored, and of OOD sets."""
        known: dict[str, Answers] = {}
        for method in (method for method in METHODS if seed in self.rows.runs.get(method, ())):
            columns = self.rows.columns(method, seed)
            held = [HELD_OUT] if f"{self.task}|{HELD_OUT}|correct" in columns else []
            for name, places in {INSIDE: [self.task, *held], OUTSIDE: self.foreign}.items():
                parts = [answers(columns, self.task, place) for place in places]
                known[f"{method}|{name}"] = {key: np.concatenate([one[key] for one in parts]) for key in parts[0]}
        return known


def compared(results: Path) -> list[str]:
    """The stored studies with one task and with fine-tunings that were averaged."""
    names = []
    for path in sorted((results / "rows").glob("*.parquet")):
        rows = Rows.read(path)
        if len(rows.about["tasks"]) == 1 and {"Single", "Soup"} <= set(rows.runs):
            names.append(path.stem)
    return names


def answers(columns: Mapping[str, Array], task: str, place: str) -> Answers:
    """What a method said of a set; `plain` is its doubt before calibration.

    Of foreign rows only the uncalibrated doubt is stored; it is calibrated by the quantiles of the test rows.
    """
    wrong, nll, far = (columns.get(f"{task}|{place}|{name}") for name in ("correct", "calibrated_nll", "mahalanobis"))
    plain = columns[f"{task}|{place}|doubt"].astype(np.float64)
    doubt = columns.get(f"{task}|{place}|calibrated_doubt")
    if doubt is None:
        before, after = (columns[f"{task}|{task}|{name}"].astype(np.float64) for name in ("doubt", "calibrated_doubt"))
        doubt = np.interp(plain, np.sort(before), np.sort(after))
    return {
        "doubt": doubt.astype(np.float64),
        "plain": plain,
        "far": np.zeros(0) if far is None else far.astype(np.float64),
        "wrong": np.zeros(0, dtype=bool) if wrong is None else ~wrong.astype(bool),
        "nll": np.zeros(0) if nll is None else nll.astype(np.float64),
    }


def chained(first: Answers, second: Answers, threshold: float) -> Answers:
    """A cascade's answers: those of the second where the first is in doubt; the distance is the first's."""
    goes = first["doubt"] > threshold
    parts = {name: np.where(goes, second[name], first[name]) for name in ("doubt", "wrong", "nll") if len(first[name])}
    return {"wrong": np.zeros(0), "nll": np.zeros(0), **parts, "far": first["far"], "goes": goes}


def certifying(rows: int) -> int:
    """How many of a study's known rows certify; the others are answered."""
    return max(rows // 2, min(CERTIFY, 2 * rows // 3))


def allowed_today(curve: Curve, risk: float) -> int:
    """The most rows of which no more than `risk` are wrong: no promise about new ones."""
    counts = np.arange(1, len(curve.errors) + 1)
    return int(counts[(curve.errors <= risk * counts) & (curve.cut == counts)].max(initial=0))


def reached(curve: Curve, count: int) -> float:
    """The threshold above which so many rows lie; infinite for none."""
    return curve.threshold(count) if count else math.inf


def draw_of(
    seed: int, number: int, known: Known, stored: Stored, method: str
) -> Iterator[tuple[float, str, dict[str, float]]]:
    """One calibration of a method: some known rows certify, the others are answered; numbers by risk and rule."""
    first, second = stored.chains.get(method, ("Single" if method == TODAY else method, None))
    here, there = known[f"{first}|{INSIDE}"], known[f"{first}|{OUTSIDE}"]
    order = np.random.default_rng([SEED, seed, number]).permutation(len(here["doubt"]))
    count = certifying(len(order))
    chosen, held, new = order[: count // 5], order[:count], order[count:]
    asked = 0.0
    if second is not None:
        threshold = conformal_threshold(torch.from_numpy(here["doubt"][chosen]), 1.0 - ASKED)
        here, there = (
            chained(known[f"{first}|{one}"], known[f"{second}|{one}"], threshold) for one in (INSIDE, OUTSIDE)
        )
        held, asked = order[count // 5 : count], float(here["goes"][new].mean())
    column = "plain" if method == TODAY else "doubt"
    sure, wrong, sure_there = 1.0 - here[column], here["wrong"].astype(bool), 1.0 - there[column]
    about = {"asked": asked, "accuracy": 1.0 - float(wrong[new].mean()), "nll": float(here["nll"][new].mean())}
    for rule in RULES if len(here["far"]) and method != TODAY else RULES[:1]:
        familiar, familiar_there = np.ones(len(sure), bool), np.ones(len(sure_there), bool)
        if rule == RULES[1]:
            limit = conformal_threshold(torch.from_numpy(here["far"][held]), 1.0 - UNFAMILIAR)
            familiar, familiar_there = here["far"] <= limit, there["far"] <= limit
        kept = held[familiar[held]]
        curve = Curve.of(sure[kept], wrong[kept])
        for risk in PROMISED:
            most = allowed_today(curve, risk) if method == TODAY else curve.most(risk, LEVEL)
            threshold, usual = (reached(curve, one) for one in (most, curve.on_average(risk)))
            numbers = answered(((sure >= threshold) & familiar)[new], wrong[new])
            let = stored.weights @ ((sure_there >= threshold) & familiar_there)
            numbers |= {"exceeded": float(numbers["errors"] > risk), "nothing_promised": float(not most), **about}
            numbers["foreign_accepted"] = float(let[0])
            for group, one in zip(GROUPS, FOREIGN * let[1:], strict=True):
                if not stored.groups.get(group):
                    continue
                share = (1.0 - FOREIGN) * numbers["accepted"]
                numbers[f"{group}_accepted"] = share + float(one)
                numbers[f"{group}_errors"] = (share * numbers["errors"] + float(one)) / max(share + float(one), 1e-9)
            on_average = answered(((sure >= usual) & familiar)[new], wrong[new])
            numbers |= {f"average_{name}": one for name, one in on_average.items()}
            yield risk, "softmax threshold" if method == TODAY else rule, numbers


def answered(takes: npt.NDArray[np.bool_], wrong: Array) -> dict[str, float]:
    """The share of the rows that is answered, and the share of these answers that is wrong."""
    return {"accepted": float(takes.mean()), "errors": float(wrong[takes].sum() / max(1, takes.sum()))}


COLUMNS = ["accepted", "errors", "foreign_accepted", "near_accepted", "near_errors", "far_accepted", "far_errors"]
COLUMNS += ["exceeded", "nothing_promised", "average_accepted", "average_errors", "price", "asked", "accuracy", "nll"]


def lines(results: Path, name: str) -> list[list[Any]]:
    """A line for every method, seed, risk and rule of a task."""
    stored, found = Stored.read(results, name), list[list[Any]]()
    for seed in stored.rows.runs["Single"]:
        known = stored.known(seed)
        chains = [chain for chain, both in stored.chains.items() if all(f"{one}|{INSIDE}" in known for one in both)]
        methods = [TODAY, *(one for one in METHODS if f"{one}|{INSIDE}" in known), *chains]
        for method in (one for one in methods if one in ADDS.get(name, methods)):
            drawn: dict[tuple[float, str], list[dict[str, float]]] = {}
            for number in range(CALIBRATIONS):
                for risk, rule, numbers in draw_of(seed, number, known, stored, method):
                    drawn.setdefault((risk, rule), []).append(numbers)
            for (risk, rule), draws in drawn.items():
                means = {key: float(np.mean([one[key] for one in draws])) for key in draws[0]}
                first, second = stored.chains.get(method, ("Single" if method == TODAY else method, None))
                price = stored.prices.get(first, math.nan)
                means["price"] = price + (means["asked"] * stored.prices.get(second, math.nan) if second else 0.0)
                shown = ["" if math.isnan(one := means.get(key, math.nan)) else f"{one:.4f}" for key in COLUMNS]
                about = [certifying(len(known[f"Single|{INSIDE}"]["doubt"])), CALIBRATIONS]
                called = METHODS.get(method, method)
                found.append([stored.task, stored.backbone, called, seed, risk, LEVEL, rule, *shown, *about])
    return found


def shares(results: Path) -> Path:
    """Write the table of the share that each method may answer, and of the errors it then makes."""
    head = ["task", "backbone", "method", "seed", "risk", "confidence", "rule", *COLUMNS, "calibration_rows", "draws"]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = pool.starmap(lines, [(results, name) for name in compared(results)], chunksize=1)
    return write_csv(results / "tables" / SHARES, [head, *itertools.chain.from_iterable(found)])


# --- mixed traffic ---------------------------------------------------------------------------------------------------


def mixed(seed: int, number: int, known: Known, chain: str) -> Iterator[list[Any]]:
    """One calibration of a cascade, then traffic: who goes on, what is declined, and how good the other answers are.

    Unfamiliar rows are declined at once; of a batch, the least unsure go on, up to the limit, and the others are
    declined. Beside it the Deep Ensemble on the same known rows.
    """
    first, second = (known[f"{stage}|{INSIDE}"] for stage in CHAINS[chain])
    outside = known[f"{CHAINS[chain][0]}|{OUTSIDE}"]
    draws = np.random.default_rng([SEED, seed, number])
    order = draws.permutation(len(first["doubt"]))
    half = len(order) // 2
    threshold = conformal_threshold(torch.from_numpy(first["doubt"][order[: half // 5]]), 1.0 - ASKED)
    familiar = conformal_threshold(torch.from_numpy(first["far"][order[half // 5 : half]]), 1.0 - UNFAMILIAR)
    picked = draws.permutation(len(outside["doubt"]))[: len(order) - half]
    new = order[half : half + len(picked)]
    doubt, far = (np.append(first[name][new], outside[name][picked]) for name in ("doubt", "far"))
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
                deep = [known[f"Deep Ensembles|{INSIDE}"][name][new] for name in ("wrong", "nll")]
                wrong, nll, deep_wrong, deep_nll = (float(one[kept].mean()) for one in (*said, *deep))
                rule = "nothing" if most_far == math.inf else "unfamiliar"
                numbers = [going[rows].mean(), 1.0 - kept.mean(), 1.0 - wrong, nll, 1.0 - deep_wrong, deep_nll]
                yield [traffic, rule, limit or "", *map(float, numbers)]


def traffic_lines(results: Path, name: str) -> Iterator[list[Any]]:
    """A line for every cascade, seed, traffic, rule and limit of a task; means over calibrations."""
    stored = Stored.read(results, name)
    for seed in stored.rows.runs["Deep Ensembles"]:
        known = stored.known(seed)
        for chain, stages in stored.chains.items():
            found = [list(mixed(seed, number, known, chain)) for number in range(CALIBRATIONS)]
            for cells in zip(*found, strict=True):
                asked, *numbers = np.mean([one[3:] for one in cells], axis=0)
                price = stored.prices[stages[0]] + asked * stored.prices[stages[1]]
                shown = [f"{one:.4f}" for one in (asked, price, *numbers)]
                yield [stored.task, stored.backbone, chain, seed, *cells[0][:3], *shown, BATCH, CALIBRATIONS]


def mixed_traffic(results: Path) -> Path:
    """Write the table of cascades under mixed traffic."""
    head = ["task", "backbone", "method", "seed", "traffic", "declined_at_once", "limit", "asked", "price"]
    head += ["known_declined", "accuracy", "nll", "deep_accuracy", "deep_nll", "batch", "draws"]
    found = (line for name in TRAFFIC_OF for line in traffic_lines(results, name))
    return write_csv(results / "tables" / TRAFFIC, [head, *found])
