"""Tables of a study, made from its rows alone: metrics, gains over Single, paired differences and the paper's claims.

Every table is a header and lines, written as CSV: `NAME.csv` (every metric of every method), `NAME_seeds.csv`,
`NAME_pairs.csv`, `NAME_sets.csv`, `NAME_claims.csv`.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from hydra_ensembles.files import write_atomically

from . import paper
from .measures import CONFIDENT, FEWEST, SEVERITIES, Difference, Number, further_numbers, numbers, shift_numbers
from .rows import SINGLE, Array, Rows

UNSEEN = "unseen"
ALL_BUT = "all but "  # prefix of a metric: over all OOD sets except the named one
MEANS = ("accuracy", "nll", "brier", "ece", "aece", "calibrated.ece", "aurc", "own.ece", "own.aece", "own.aurc")
Value = TypeVar("Value")
Cells = Sequence[Any]


class Study:
    """What the rows of a study say: metrics by method and seed, means, and paired differences.

    Metrics of a study with one task are `accuracy`, `calibrated.nll`, `near.auroc`, `mahalanobis:all.auroc`, and so
    on; with several tasks they are `TASK.accuracy`, and `unseen.accuracy` is their mean over unseen tasks on which
    Single is at least as good as the recipe asks; `TASK.own.KEY` uses the score that a method brings, if it has one.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, self.name = rows, str(rows.about["study"])
        self.tasks: Mapping[str, Mapping[str, Sequence[str]]] = rows.about["tasks"]
        self.methods = list(rows.runs)
        self._numbers: dict[tuple[str, int], dict[str, Number]] = {}
        self._plain: dict[tuple[str, int], dict[str, float]] = {}

    def seeds(self, method: str) -> list[int]:
        """The seeds of a method."""
        return self.rows.runs.get(method, [])

    @property
    def alone(self) -> str:
        """The task of a study with a single one, otherwise nothing."""
        return next(iter(self.tasks)) if len(self.tasks) == 1 else ""

    @cached_property
    def counted(self) -> list[str]:
        """Unseen tasks in the means: those where Single's accuracy is at least a multiple of chance."""
        least, chances = float(self.rows.about.get("least_over_chance", 0)), self.rows.about.get(UNSEEN, {})
        counted = []
        for task, chance in chances.items():
            right = [self.rows.columns(SINGLE, seed)[f"{task}|{task}|correct"].mean() for seed in self.seeds(SINGLE)]
            counted += [task] if mean(map(float, right)) >= least * chance else []
        return counted

    def numbers(self, method: str, seed: int) -> dict[str, Number]:
        """Metrics with influences of a method's seed."""
        if (method, seed) not in self._numbers:
            self._numbers[method, seed] = self._by_task(numbers, method, seed, Number.mean, shift_numbers)
        return self._numbers[method, seed]

    def plain(self, method: str, seed: int) -> dict[str, float]:
        """All metrics of a method's seed."""
        if (method, seed) not in self._plain:
            known = {key: number.value for key, number in self.numbers(method, seed).items()}
            further = partial(further_numbers, fewest=int(self.rows.about.get("fewest", FEWEST)))
            self._plain[method, seed] = known | self._by_task(further, method, seed, mean)
        return self._plain[method, seed]

    def _by_task(
        self,
        measured: Callable[..., Mapping[str, Value]],
        method: str,
        seed: int,
        average: Callable[[list[Value]], Value],
        shifted: Callable[[Mapping[str, Array]], Mapping[str, Value]] = lambda _: {},
    ) -> dict[str, Value]:
        columns = self.rows.columns(method, seed)
        by_key: dict[str, Value] = {}
        for task, groups in self.tasks.items():
            start = f"{task}|"
            own = {key.removeprefix(start): values for key, values in columns.items() if key.startswith(start)}
            of_task = {**measured(own, task, groups), **shifted(over_corruptions(own))}
            if self.alone:
                return of_task
            by_key |= {f"{task}.{key}": value for key, value in {**of_task, **by_own_score(of_task)}.items()}
        names = {key: [f"{task}.{key}" for task in self.counted] for key in MEANS}
        whole = {key: tasks for key, tasks in names.items() if tasks and all(task in by_key for task in tasks)}
        return by_key | {f"{UNSEEN}.{key}": average([by_key[task] for task in tasks]) for key, tasks in whole.items()}

    def mean(self, method: str, key: str) -> float | None:
        """The mean of a metric, at the level of Single's mean over all its seeds; None if the method lacks it.

        Methods have other seeds than Single: the mean is Single's plus the method's mean gain on its own seeds, so
        that means of two methods differ by the difference of their gains.
        """
        ours = {seed: self.plain(method, seed) for seed in self.seeds(method)}
        single = {seed: self.plain(SINGLE, seed) for seed in self.seeds(SINGLE)}
        level = [found[key] for found in single.values() if key in found]
        values = {seed: found[key] for seed, found in ours.items() if key in found}
        gaps = [value - single[seed][key] for seed, value in values.items() if key in single.get(seed, {})]
        if gaps and level:
            return mean(level) + mean(gaps)
        return mean(values.values()) if values else None

    def difference(self, first: str, second: str, key: str, looks: int = 1) -> Difference | None:
        """First minus second over the seeds that both have; None if there is nothing to compare.

        `all but NAME.auroc` is over all OOD sets except one; `looks` at the test set widen the interval.
        """
        sides: tuple[list[Number], list[Number]] = ([], [])
        for seed in (seed for seed in self.seeds(first) if seed in self.seeds(second)):
            both = [self._number(self.numbers(method, seed), key) for method in (first, second)]
            if both[0] is not None and both[1] is not None:
                sides[0].append(both[0])
                sides[1].append(both[1])
        return Difference.of(*sides, looks=looks) if sides[0] else None

    def _number(self, found: Mapping[str, Number], key: str) -> Number | None:
        keys = [key]
        if key.startswith(ALL_BUT):
            name, _, metric = key.removeprefix(ALL_BUT).partition(".")
            keys = [f"ood.{other}.{metric}" for other in self.outside if other != name]
        return Number.mean([found[part] for part in keys]) if all(part in found for part in keys) else None

    @property
    def outside(self) -> list[str]:
        """Names of the OOD sets of a study with one task."""
        return [name for sets in self.tasks[self.alone].values() for name in sets] if self.alone else []

    @property
    def detections(self) -> list[str]:
        """Tasks with OOD sets."""
        return [task for task, groups in self.tasks.items() if groups]


def by_own_score(by_key: Mapping[str, Value]) -> dict[str, Value]:
    """The same metrics as `own.KEY`: by the method's own score if it has one, otherwise unchanged."""
    prefix = f"{CONFIDENT}:" if any(key.startswith(f"{CONFIDENT}:") for key in by_key) else ""
    return {f"own.{key}": by_key.get(f"{prefix}{key}", value) for key, value in by_key.items() if ":" not in key}


def over_corruptions(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Means over the corruptions for each image, as `severity N|column`."""
    found: dict[str, list[Array]] = {}
    for key, values in columns.items():
        place, _, column = key.partition("|")
        if place[-2:-1] == " " and place[-1].isdigit() and column in ("correct", "brier", "nll"):
            found.setdefault(f"severity {place[-1]}|{column}", []).append(values.astype(float))
    return {key: sum(parts[1:], parts[0]) / len(parts) for key, parts in found.items()}


# --- tables ----------------------------------------------------------------------------------------------------------


def metrics_table(study: Study) -> Iterable[Cells]:
    """Every metric of every method, and its gain over Single with half its interval."""
    yield "method", "metric", "value", "seeds", "gain", "half_width", "significant"
    for method in study.methods:
        found = [study.plain(method, seed) for seed in study.seeds(method)]
        for key in dict.fromkeys(key for one in found for key in one):
            plain = key.replace(".own.", ".", 1)
            if plain != key and all(one[key] == one.get(plain) for one in found if key in one):
                continue  # the method brings no score of its own
            gap = None if method == SINGLE else study.difference(method, SINGLE, key)
            gained = ("", "", "") if gap is None else (gap.value, gap.half_width, gap.verdict(key))
            yield method, key, study.mean(method, key), sum(key in one for one in found), *gained


def seeds_table(study: Study) -> Iterable[Cells]:
    """The metrics of every seed, without those of single OOD sets and severities."""
    single = study.plain(SINGLE, study.seeds(SINGLE)[0])
    keys = [key for key in single if "ood." not in key and ".own." not in key and not key.startswith(SEVERITIES)]
    yield "method", "seed", *keys
    for method in study.methods:
        for seed in study.seeds(method):
            yield method, seed, *(study.plain(method, seed).get(key, "") for key in keys)


def pairs_table(study: Study, pairs: Iterable[tuple[str, str]], looks: int = 1) -> Iterable[Cells]:
    """Paired differences, with intervals for one look at the test set and for all."""
    yield (
        *("first", "second", "metric", "difference", "half_width", "half_width_all_looks", "looks", "seeds"),
        *("significant", "significant_all_looks"),
    )
    for first, second in pairs:
        for key in study.numbers(SINGLE, study.seeds(SINGLE)[0]):
            one, all_looks = (study.difference(first, second, key, count) for count in (1, looks))
            if one is not None and all_looks is not None and not key.startswith(SEVERITIES):
                widths = one.half_width, all_looks.half_width, looks, one.seeds
                yield first, second, key, one.value, *widths, one.verdict(key), all_looks.verdict(key)


def sets_table(study: Study) -> Iterable[Cells]:
    """The sets, with their samples."""
    yield "task", "set", "group", "samples"
    for task, groups in study.tasks.items():
        for group, names in {"id": [task], **groups}.items():
            for name in names:
                yield task, name, group, len(study.rows.places[f"{task}|{name}"])


def claims_table(study: Study) -> Iterable[Cells]:
    """The paper's claims about the task that a study stands for: its difference, ours, and a verdict."""
    yield "first", "second", "claim", "metric", "margin", "paper", "ours", "half_width", "seeds", "verdict"
    theirs, listed = paper.numbers_of(study.rows.about), list[tuple[Mapping[str, str], str]]()
    if study.alone:
        for claim in paper.read_csv("classifier_claims"):
            if study.rows.about.get("paper") in claim["tasks"].split(";"):
                listed.append((claim, claim["metric"]))
    else:
        for claim in paper.read_csv("zero_shot_claims"):
            scopes = study.detections if claim["scope"] == "each ID task" else [UNSEEN]
            listed += [(claim, f"{scope}.{claim['metric']}") for scope in scopes]
    for claim, key in listed:
        first, second, margin = claim["first"], claim["second"], float(claim["margin"])
        ours = study.difference(first, second, key)
        printed = [theirs[method][key] for method in (first, second) if key in theirs.get(method, {})]
        gap = printed[0] - printed[1] if len(printed) == 2 else ""
        found = ("", "", "", "not run") if ours is None else (ours.value, ours.half_width, ours.seeds, "")
        verdict = found[3] if ours is None else judged(ours, claim["is"], margin)
        yield first, second, claim["claim"], key, margin, gap, *found[:3], verdict


def judged(gap: Difference, claimed: str, margin: float) -> str:
    """Whether an interval lies on the claimed side of the margin, the other, or both; needs three seeds."""
    if gap.seeds < 3:
        return "too few seeds"
    sign = -1.0 if claimed in ("lower", "not higher") else 1.0
    low, high = sorted((sign * (gap.value - gap.half_width), sign * (gap.value + gap.half_width)))
    edge = 0.0 if claimed in ("lower", "higher") else -margin
    return "reproduced" if low > edge else "not reproduced" if high < edge else "tie"


def beside_paper(study: Study) -> str:
    """The paper's table of a task as Markdown: our numbers, with the paper's in brackets."""
    theirs = paper.numbers_of(study.rows.about)
    keys = ("accuracy", "brier", "nll", "ece", "aece", "all.auroc", "all.fpr95", "all.aupr", "near.auroc", "far.auroc")

    def printed(value: float | None, key: str) -> str:
        if value is None:
            return "–"
        return f"{value:.3f}" if key in ("nll", "brier") else f"{100 * value:.2f}"

    lines = [f"| method | {' | '.join(keys)} |", f"|---{'|---:' * len(keys)}|"]
    for method in (method for method in study.methods if method in theirs):
        cells = (f"{printed(study.mean(method, key), key)} ({printed(theirs[method].get(key), key)})" for key in keys)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- files -----------------------------------------------------------------------------------------------------------


def write_tables(study: Study, folder: Path, looks: int = 1) -> list[Path]:
    """Write every table of a study; returns the files."""
    pairs = [(first, second) for place, first in enumerate(study.methods) for second in study.methods[:place]]
    made = {
        "": metrics_table(study),
        "_seeds": seeds_table(study),
        "_pairs": pairs_table(study, pairs, looks),
        "_sets": sets_table(study),
        "_claims": claims_table(study),
    }
    return [write_csv(folder / f"{study.name}{name}.csv", lines) for name, lines in made.items()]


def write_csv(path: Path, lines: Iterable[Cells]) -> Path:
    """Write a header and lines; numbers with six digits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in line] for line in lines)
    write_atomically(path, text.getvalue().encode())
    return path


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    return f"{float(value):.6g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
