"""The test sets of a study, opened by one function, which asks for the decision that was made without them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hydra_ensembles.data.suites import SetRef, suite
from hydra_ensembles.errors import DataError

from .decision import Decision
from .recipe import StudyRecipe
from .splits import Reader, Samples

Group = Literal["id", "near", "far", "apart"]


@dataclass(frozen=True)
class TestSet:
    """One test set and the group it is reported in."""

    __test__ = False  # not a test of pytest's

    group: Group
    samples: Samples


def open_test_sets(recipe: StudyRecipe, reader: Reader, decision: Decision) -> Mapping[str, TestSet]:
    """Read the ID test set and every OOD set.

    The stage `evaluate` is the only caller. Whoever calls shows the decision that fixed all settings; one made
    for another recipe does not count.

    Raises:
        DataError: The decision belongs to another recipe, or a set is missing.
    """
    if decision.recipe != recipe.digest:
        raise DataError(
            f"the decision was made for recipe {decision.recipe} and this one is {recipe.digest}; run the stage "
            "`choose` again before any test set is opened"
        )
    sets = suite(recipe.suite)
    groups: dict[Group, tuple[SetRef, ...]] = {"id": (sets.id,), "near": sets.near, "far": sets.far}
    groups["apart"] = sets.apart
    return {
        reference.name: TestSet(group, reader.samples(reader.store.load(reference), recipe.counts.test))
        for group, references in groups.items()
        for reference in references
    }
