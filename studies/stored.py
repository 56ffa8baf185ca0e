"""Stored studies, of classifiers and zero-shot: rows, seeds, columns, and differences between rows."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar, get_args

from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics.distance import LearnedName

from .column_files import read_columns
from .dual_recipe import ZERO_SHOT
from .measures import (
    SEVERITIES,
    SHIFT,
    Array,
    Columns,
    Difference,
    Groups,
    Number,
    further_numbers,
    numbers,
    shift_numbers,
)
from .paper import Numbers, classifier_numbers, zero_shot_numbers
from .seed_folder import Once
from .sets import read_yaml
from .storing import SINGLE, STUDY, facts_of, in_rows, single_of, whole
from .task import recipe

ALL_BUT = "all but "  # prefix: all OOD sets except the named one
UNSEEN = "unseen"
MEANS = ("accuracy", "nll", "brier", "ece", "aece", "calibrated.ece", "aurc", "own.ece", "own.aece", "own.aurc")
OWN = get_args(LearnedName)  # learned scores that rows may have
Value = TypeVar("Value")
RESULTS = Path(__file__).resolve().parents[1] / "results" / "studies"


class Study(Once):
    """The stored results of a study of classifiers."""

    def __init__(self, name: str, results: Path) -> None:
        super().__init__()
        self.name = name
        self.folder = results / name
        facts = facts_of(self.folder)
        if facts is None:
            raise DataError(f"{self.folder} has no stored study; the stage `store` of `python -m studies` makes one")
        self.facts = facts

    def seeds(self, row: str) -> list[int]:
        """The seeds of a row."""
        return [int(seed) for seed, run in self.facts["runs"].items() if row in run["report"]]

    @cached_property
    def rows(self) -> list[str]:
        """Rows that any seed has, in the order of the tables."""
        return [row for row in self.facts["trainings"] if self.seeds(row)]

    def columns(self, row: str, seed: int) -> dict[str, Array]:
        """Columns of a row, as `set|column`."""
        return self.once(("columns", row, seed), lambda: self._rows(f"seed-{seed}.parquet").get(row, {}))

    def _rows(self, name: str) -> Mapping[str, dict[str, Array]]:
        if not (self.folder / name).exists():
            raise DataError(
                f"{self.folder} lacks {name}, whose rows `study.json` names; copy it from where it was made"
            )
        return self.once(name, lambda: in_rows(whole(read_columns(self.folder / name))))

    def numbers(self, row: str, seed: int) -> dict[str, Number]:
        """Metrics with influences, including those on corrupted images if they were run."""

        def make() -> dict[str, Number]:
            shifted = f"{SHIFT}-{seed}.parquet"
            corrupted = self._rows(shifted).get(row, {}) if (self.folder / shifted).exists() else {}
            return self.numbers_of(self.columns(row, seed)) | shift_numbers(corrupted)

        return self.once(("numbers", row, seed), make)

    def numbers_of(self, columns: Columns) -> dict[str, Number]:
        """Metrics with influences of one model on all sets."""
        return numbers(columns, self.facts["inside"], self.facts["groups"])

    def plain(self, row: str) -> dict[int, dict[str, float]]:
        """All metrics by seed."""

        def make() -> dict[int, dict[str, float]]:
            return {seed: self._all(self.columns(row, seed), self.numbers(row, seed)) for seed in self.seeds(row)}

        return self.once(("plain", row), make)

    def further_of(self, columns: Columns) -> dict[str, float]:
        """Metrics without influences of one model on all sets."""
        return further_numbers(columns, self.facts["inside"], self.facts["groups"])

    def _all(self, columns: Columns, known: Mapping[str, Number]) -> dict[str, float]:
        return {key: number.value for key, number in known.items()} | self.further_of(columns)

    def mean(self, row: str, key: str) -> float | None:
        """The mean of a row's metric, shifted to the level of Single's mean over all its seeds; None if it has none.

        Rows have other seeds than Single, and later runs another Single: the mean is Single's plus the row's mean gain
        over the Single of its own seeds and run, so that means of two rows differ by the difference of their gains.
        """

        def of(by_seed: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
            return {seed: numbers[key] for seed, numbers in by_seed.items() if key in numbers}

        ours, level = of(self.plain(row)), of(self.plain(SINGLE))
        single = of({seed: self._plain_beside(row, seed) for seed in ours})
        gaps = [value - single[seed] for seed, value in ours.items() if seed in single]
        if gaps and level:
            return mean(level.values()) + mean(gaps)
        return mean(ours.values()) if ours else None

    def paper(self) -> Mapping[str, Numbers]:
        """The paper's numbers by row, under the same keys as ours; empty if the paper does not have this task."""
        return classifier_numbers(self.facts["inside"])

    @property
    def stands_for(self) -> str:
        """The paper's task that this one stands for."""
        return str(self.facts["recipe"]["tasks"][self.name]["paper"])

    def looks(self, *rows: str) -> int:
        """The number of looks at the test set until these rows were whole, as `data/looks.yaml` counts them."""
        counted = read_yaml("looks")[self.name]
        return int(counted["looks"]) + (not set(rows).isdisjoint(counted.get("one_more", ())))

    def difference(self, first: str, second: str, key: str, looks: int = 1) -> Difference | None:
        """First minus second over the seeds that both have; None if there is nothing to compare.

        Every row is compared with the Single that was trained in the same run. Two rows of one run share it, so it
        cancels; for rows of two runs (`across`) the gains over their own Singles are compared, and `as_they_are`
        compares the rows directly. For corrupted images, which come from one run, nothing is subtracted. `all but
        NAME.auroc` is over all OOD sets except one. The interval is corrected for several looks at the test set.
        """
        name = ("difference", first, second, key, looks)
        return self.once(name, lambda: self._difference(first, second, key, looks))

    def _difference(self, first: str, second: str, key: str, looks: int) -> Difference | None:
        plain = []
        gained = []
        across = self.across(first, second)
        corrupted = key.startswith((f"{SHIFT}.", *SEVERITIES))
        for seed in self._shared(first, second):
            beside_first, beside_second = ({} if corrupted else self._beside(row, seed) for row in (first, second))
            ours = beside_second if first == SINGLE and beside_second else self.numbers(first, seed)
            theirs = beside_first if second == SINGLE and beside_first else self.numbers(second, seed)
            sides = [self._number(numbers, key) for numbers in (ours, theirs, beside_first, beside_second)]
            if sides[0] is not None and sides[1] is not None:
                plain.append((sides[0], sides[1]))
                if across and sides[2] is not None and sides[3] is not None:
                    gained.append((sides[0].minus(sides[2]), sides[1].minus(sides[3])))
        if not plain:
            return None
        of = partial(Difference.of, looks=looks)
        gap = of(*zip(*plain, strict=True))
        return gap if len(gained) < len(plain) else replace(of(*zip(*gained, strict=True)), as_they_are=gap)

    def across(self, first: str, second: str) -> bool:
        """Whether two rows come from two runs on any common seed, so that their gains over Single are compared."""
        return SINGLE not in (first, second) and any(
            self._beside(first, seed) is not self._beside(second, seed) for seed in self._shared(first, second)
        )

    def _shared(self, first: str, second: str) -> list[int]:
        return [seed for seed in self.seeds(first) if seed in self.seeds(second)]

    def _beside(self, row: str, seed: int) -> dict[str, Number]:
        """Metrics of the Single that was trained in the same run as a row."""
        single = self._again(seed).get(row)
        if single is None:
            return self.numbers(SINGLE, seed)
        return self.once(("again", seed, id(single)), lambda: self.numbers_of(single))

    def _plain_beside(self, row: str, seed: int) -> dict[str, float]:
        """All metrics of that Single; those it lacks are taken from the first Single."""
        first, single = self.plain(SINGLE).get(seed, {}), self._again(seed).get(row)
        if single is None:
            return first
        return self.once(("plain again", seed, id(single)), lambda: first | self._all(single, self._beside(row, seed)))

    def _again(self, seed: int) -> dict[str, dict[str, Array]]:
        """By row, the columns of the row's own Single, which several rows may share; only rows of later runs."""
        return self.once(("singles", seed), lambda: single_of(self.folder, seed))

    def _number(self, numbers: Mapping[str, Number], key: str) -> Number | None:
        """A metric of one model, or the mean that `all but NAME.auroc` stands for; None if it is missing."""
        keys = [key]
        if key.startswith(ALL_BUT):
            name, _, metric = key.removeprefix(ALL_BUT).partition(".")
            keys = [f"ood.{other}.{metric}" for other in self.outside if other != name]
        return Number.mean([numbers[part] for part in keys]) if all(part in numbers for part in keys) else None

    @property
    def outside(self) -> list[str]:
        """Names of the OOD sets."""
        return [name for names in self.facts["groups"].values() for name in names]

    @property
    def in_parts(self) -> bool:
        """Whether Single was trained again for some of the rows."""
        return any(self.folder.glob("again-*.parquet"))

    def parameters(self, row: str) -> str:
        """Parameters of a row in millions; a dash if unknown."""
        counts = [run["report"][row].get("parameters") for run in self.facts["runs"].values() if row in run["report"]]
        return f"{counts[0] / 1e6:.1f} M" if counts[0] else "–"

    def work(self, row: str) -> str:
        """Multiply-adds of a row relative to Single's; a dash if unknown."""
        ours, theirs = (self.facts["runs"][str(self.seeds(name)[0])]["report"][name] for name in (row, SINGLE))
        return f"{ours['multiply_adds'] / theirs['multiply_adds']:.2f}x" if ours.get("multiply_adds") else "–"

    def cost(self, row: str) -> Mapping[str, Any]:
        """The measured costs of a row; empty if there are none."""
        return (self.facts["costs"] or {"rows": {}})["rows"].get(row, {})


# --- zero-shot studies ----------------------------------------------------------------------------------------------


def by_own_score(by_key: Mapping[str, Value]) -> dict[str, Value]:
    """The same metrics as `own.KEY`: by the row's own score if it has one, otherwise unchanged."""
    prefix = next((f"{score}:" for score in OWN if any(key.startswith(f"{score}:") for key in by_key)), "")
    return {f"own.{key}": by_key.get(f"{prefix}{key}", value) for key, value in by_key.items() if ":" not in key}


class DualStudy(Study):
    """The stored results of a zero-shot study: metrics of a task are `TASK.accuracy`, means `unseen.accuracy`.

    `TASK.own.KEY` uses a row's own score, if it has one.
    """

    def numbers_of(self, columns: Columns) -> dict[str, Number]:
        return self._by_task(numbers, columns, Number.mean)

    def further_of(self, columns: Columns) -> dict[str, float]:
        return self._by_task(further_numbers, columns, mean)

    def _by_task(
        self,
        numbers: Callable[[Columns, str, Groups], Mapping[str, Value]],
        columns: Columns,
        average: Callable[[list[Value]], Value],
    ) -> dict[str, Value]:
        """Metrics of every task, and their means over the counted tasks if all of these have the metric."""
        by_key: dict[str, Value] = {}
        asked = in_rows(columns)
        for task in self.facts["tasks"]:
            of_task = numbers(asked.get(task, {}), task, self.groups(task))
            by_key |= {f"{task}.{key}": value for key, value in {**of_task, **by_own_score(of_task)}.items()}
        keys = {key: [f"{task}.{key}" for task in self.counted] for key in MEANS}
        complete = {key: names for key, names in keys.items() if names and all(name in by_key for name in names)}
        means = {f"{UNSEEN}.{key}": average([by_key[name] for name in names]) for key, names in complete.items()}
        return by_key | means

    def groups(self, task: str) -> dict[str, list[str]]:
        """Names of a task's OOD sets, by group."""
        return {group: list(sets) for group, sets in self.facts["tasks"][task].get("outside", {}).items()}

    @property
    def detections(self) -> list[str]:
        """Tasks with OOD sets, the main one first."""
        return sorted((task for task in self.facts["tasks"] if self.groups(task)), key=lambda task: task == "cifar100")

    @cached_property
    def counted(self) -> list[str]:
        """Unseen tasks in the means: those where Single's accuracy is at least the recipe's multiple of chance."""
        least = float(self.facts["recipe"]["least_over_chance"])
        tasks = self.facts["tasks"]
        counted = []
        for task, facts in tasks.items():
            accuracies = [self.columns(SINGLE, seed)[f"{task}|{task}|correct"].mean() for seed in self.seeds(SINGLE)]
            if facts["domain"] == UNSEEN and mean(map(float, accuracies)) >= least / facts["classes"]:
                counted.append(task)
        return counted

    @property
    def left_out(self) -> list[str]:
        """Unseen tasks that are left out of the means."""
        tasks = self.facts["tasks"]
        return [task for task, facts in tasks.items() if facts["domain"] == UNSEEN and task not in self.counted]

    def paper(self) -> Mapping[str, Numbers]:
        """The paper's numbers by row, under the same keys as ours; also as `own`, as they use a row's own score."""
        theirs = zero_shot_numbers(list(self.facts["tasks"]), self.detections)
        return {
            row: {**one, **{key.replace(".", ".own.", 1): n for key, n in one.items()}} for row, one in theirs.items()
        }


def stored_study(name: str, results: Path = RESULTS) -> Study:
    """A stored study of either kind."""
    return (DualStudy if "tasks" in (facts_of(results / name) or {}) else Study)(name, results)


def stored_studies(results: Path = RESULTS) -> list[Study]:
    """Every study in a folder of results: those of classifiers in the order of the recipe, then the zero-shot study."""
    names = (*recipe()["tasks"], ZERO_SHOT)
    return [stored_study(name, results) for name in names if (results / name / STUDY).exists()]
