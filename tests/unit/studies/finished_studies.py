"""Small studies of which every stage has run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from small_studies import SmallFolder

from studies.engine import SeedRun, collect, run_stages
from studies.numbers import tables_of
from studies.recipe import ClassifierRecipe
from studies.results import Results


@dataclass(frozen=True)
class Finished:
    """Folder, results with tables, sets opened before `evaluate` and in all."""

    output: Path
    results: Results
    before: frozenset[str]
    after: frozenset[str]


def with_tables(results: Results) -> Results:
    """Few resamples: the width of intervals is tested where it matters, with numbers of its own."""
    return Results({**results.facts, **tables_of(results, resamples=20)}, results.arrays)


def finished(runs: Sequence[SeedRun], recipe: ClassifierRecipe, source: SmallFolder, output: Path) -> Finished:
    run_stages(runs, recipe.STAGES[: recipe.STAGES.index("evaluate")])
    before = frozenset(source.opened)
    run_stages(runs, ["evaluate", "cost"])
    return Finished(output, with_tables(collect(recipe, output)), before, frozenset(source.opened))
