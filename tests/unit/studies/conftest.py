from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_studies import ManyClasses, SmallFolder, classifier_recipe, classifier_runs, dual_recipe, dual_run

from studies.engine import SeedRun, collect, run_stages
from studies.numbers import tables_of
from studies.recipe import StudyRecipe
from studies.results import Results


@dataclass(frozen=True)
class Finished:
    """A study of which every stage has run: folder, results with tables, sets opened before `evaluate` and in all."""

    output: Path
    results: Results
    before: frozenset[str]
    after: frozenset[str]


def with_tables(results: Results) -> Results:
    """Few resamples: the width of intervals is tested where it matters, with numbers of its own."""
    tables: dict[str, Any] = tables_of(results, resamples=20)
    return Results({**results.facts, **tables}, results.arrays)


def finished(runs: Sequence[SeedRun], recipe: StudyRecipe, source: SmallFolder, output: Path) -> Finished:
    run_stages(runs, recipe.STAGES[: recipe.STAGES.index("evaluate")], recipe.STAGES)
    before = frozenset(source.opened)
    run_stages(runs, ["evaluate", "cost"], recipe.STAGES)
    return Finished(output, with_tables(collect(recipe, output)), before, frozenset(source.opened))


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two seeds of a study of classifiers."""
    output, source = tmp_path_factory.mktemp("classifiers"), SmallFolder()
    return finished(classifier_runs(output, source=source), classifier_recipe(), source, output)


@pytest.fixture(scope="session")
def duals(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One seed of a zero-shot study."""
    output, source = tmp_path_factory.mktemp("duals"), ManyClasses()
    return finished([dual_run(output, source=source)], dual_recipe(), source, output)
