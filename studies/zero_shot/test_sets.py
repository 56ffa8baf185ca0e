"""The test sets of a zero-shot study, opened by one function, which asks for what was fixed without them."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ensembles.data.dataset import ImageDataset, only_classes, subset
from hydra_ensembles.errors import DataError

from ..recipe import SPLIT_SEED
from .fixed import Fixed
from .recipe import Counts, ZeroShotRecipe
from .sources import Detection, EvaluationSets, NamedImages, Task


@dataclass(frozen=True, eq=False)
class TestSets:
    """What is reported: tasks, and OOD sets held against some of them."""

    __test__ = False  # not a test of pytest's

    tasks: Sequence[Task]
    detections: Sequence[Detection]


def open_test_sets(recipe: ZeroShotRecipe, sets: EvaluationSets, fixed: Fixed) -> TestSets:
    """Read every task and every OOD set, no more images of each than the recipe says.

    The stage `evaluate` is the only caller. Whoever calls shows what was fixed; what was fixed for another recipe
    does not count.

    Raises:
        DataError: It belongs to another recipe, or a set is missing.
    """
    if fixed.recipe != recipe.digest:
        raise DataError(
            f"heads and temperatures were fixed for recipe {fixed.recipe} and this one is {recipe.digest}; run the "
            "stage `tune` again before any test set is opened"
        )
    tasks = [Task(one.name, one.domain, _fewer(one.test, recipe.counts)) for one in sets.tasks()]
    detections = [
        Detection(
            one.task,
            {name: _limited(images, recipe.counts.detection) for name, images in one.near.items()},
            {name: _limited(images, recipe.counts.detection) for name, images in one.far.items()},
        )
        for one in sets.detections()
    ]
    return TestSets(tasks, detections)


def _fewer(test: NamedImages, counts: Counts) -> NamedImages:
    """Not more images, and not more classes, than the recipe says."""
    images, names = test.images, test.names
    if counts.classes is not None and counts.classes < len(names):
        images, names = only_classes(images, list(range(counts.classes)), relabel=True), names[: counts.classes]
    return NamedImages(_limited(images, counts.test), names)


def _limited(images: ImageDataset, limit: int | None) -> ImageDataset:
    if limit is None or limit >= len(images):
        return images
    return subset(images, limit, SPLIT_SEED, stratified=images.labelled)
