"""Controls of the studies of texts: are OOD sets told apart by length alone, and does training repeat the test?"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hydra_ensembles.data.dataset import TextDataset
from hydra_ensembles.metrics import auroc

from .classifiers import ClassifierTask
from .rows import Array, Rows, drawn
from .samples import TextSamples
from .suites import SetRef
from .tables import Cells, write_csv

DRAWS, GRAM = 20, 8
SCORES = {"doubt": "confidence", "mahalanobis": "familiarity"}


def write_controls(task: ClassifierTask, results: Path) -> list[Path]:
    """Write both tables of a text task with stored rows."""
    made = {"length": length_lines(task, results), "duplicates": duplicates_lines(task)}
    return [write_csv(results / "tables" / f"{task.name}_{name}.csv", lines) for name, lines in made.items()]


def length_lines(task: ClassifierTask, results: Path) -> Iterator[Cells]:
    """AUROC on stored rows, and on as many rows of both sets at every number of tokens; means over seeds and draws."""
    rows, inside = Rows.read(results / "rows" / f"{task.name}.parquet"), task.suite.id.name
    yield (
        "method",
        "score",
        "set",
        "seeds",
        "auroc",
        "matched_auroc",
        "length_auroc",
        "matched_length_auroc",
        "matched_rows",
    )
    references = (task.suite.id, *task.suite.near, *task.suite.far)
    widths = {one.name: lengths(task, one) for one in references}
    for reference in references[1:]:
        if not np.intersect1d(widths[inside], widths[reference.name]).size:
            continue  # none of its texts is as long as one of the test set
        pairs = [alike(widths[inside], widths[reference.name], seed) for seed in range(DRAWS)]
        told = separated(widths[inside], widths[reference.name], pairs)
        for method, seeds in rows.runs.items():
            for column, score in SCORES.items():
                by_seed = []
                for seed in seeds:
                    columns = rows.columns(method, seed)
                    if f"{inside}|{inside}|{column}" not in columns:
                        continue  # passes with dropout have no distances
                    ours, theirs = (columns[f"{inside}|{name}|{column}"] for name in (inside, reference.name))
                    by_seed.append(separated(ours, theirs, pairs))
                if not by_seed:
                    continue
                found = np.mean(by_seed, axis=0)
                yield method, score, reference.name, len(seeds), *map(float, found), *told, len(pairs[0][0])


def lengths(task: ClassifierTask, reference: SetRef) -> Array:
    """The number of tokens of the stored samples of a set."""
    widths = cast(TextSamples, task.reported(reference)).widths.numpy()
    return widths[drawn(f"{task.suite.id.name}|{reference.name}", len(widths))]


def alike(ours: Array, theirs: Array, seed: int) -> tuple[Array, Array]:
    """Rows of two sets, of every length as many of one as of the other."""
    draws = np.random.default_rng(seed)
    sides: tuple[list[Array], list[Array]] = ([], [])
    for length in np.intersect1d(ours, theirs):
        places = [draws.permutation(np.flatnonzero(side == length)) for side in (ours, theirs)]
        for side, place in zip(sides, places, strict=True):
            side.append(place[: min(map(len, places))])
    return np.concatenate(sides[0]), np.concatenate(sides[1])


def separated(ours: Array, theirs: Array, pairs: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """AUROC of a score on all rows, and its mean over matched draws."""

    def of(known: Array, foreign: Array) -> float:
        first, second = (torch.from_numpy(side.astype(np.float64)) for side in (known, foreign))
        return float(auroc(first, second))

    return of(ours, theirs), float(np.mean([of(ours[first], theirs[second]) for first, second in pairs]))


def duplicates_lines(task: ClassifierTask) -> Iterator[Cells]:
    """How many texts of the test set and of the held-out sentences training repeats, whole or eight words in a row."""
    held_out, (train,) = task.validation, task.trains_on()
    test = cast(TextDataset, task.source.load(task.suite.id))
    known = [words(train, row) for row in range(len(train))]
    whole, grams = set(known), {one for text in known for one in grams_of(text)}
    yield (
        "texts",
        "count",
        "in_training",
        f"with_{GRAM}_words_of_training",
        f"shorter_than_{GRAM}_words",
        "training_texts",
    )
    for name, data in {"test": test, "held-out": held_out}.items():
        texts = [words(data, row) for row in range(len(data))]
        shared = sum(any(one in grams for one in grams_of(text)) for text in texts)
        counts: list[Any] = [sum(text in whole for text in texts), shared, sum(len(text) < GRAM for text in texts)]
        yield name, len(texts), *counts, len(known)


def words(data: TextDataset, row: int) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(str(data[row][0]).lower().split())


def grams_of(text: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All runs of eight words."""
    return (text[start : start + GRAM] for start in range(len(text) - GRAM + 1))
