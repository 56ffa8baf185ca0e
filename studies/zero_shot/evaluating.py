"""The stages that run models over images: what is fixed before, and every method on every test set after."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._utils import __version__
from hydra_ensembles.calibrate import fit_calibration
from hydra_ensembles.data.dataset import ImageDataset

from ..compact_logits import CompactSet, compact
from ..evaluating import FACTS, LOGITS, device_name
from ..logit_files import save_sets
from .answers import image_embeddings, logits_of, mean_logits, text_embeddings
from .fixed import Fixed
from .methods import Family, families_of, methods_of
from .seed_models import ZeroShotModels
from .test_sets import TestSets, open_test_sets

FIXED = "fixed.json"
TASK, OOD = "task", "ood"
Logits = dict[str, Tensor]  # "task.NAME" or "ood.TASK.NAME" -> member logits [M, N, C]


def fix(models: ZeroShotModels) -> Fixed:
    """Make every member of every family, fit temperatures, and write down what methods are; no test set is open."""
    path = models.folder.path / FIXED
    if path.exists():
        return Fixed.load(path)
    families = families_of(models.trains_text)
    for family in families:
        models.members(family)
    images = models.sets.calibration()
    samples = models.samples(images.images, models.recipe.counts.calibration)
    temperatures = {}
    for name, method in methods_of(models.trains_text).items():
        if method.calibrated:
            parts = [
                logits_of(
                    member,
                    image_embeddings(member, samples),
                    text_embeddings(member, images.names, models.templates),
                )
                for member in models.members(method.family)
            ]
            fit = fit_calibration(torch.cat(parts), samples.labels)
            temperatures[name] = fit.calibration.temperature[0]
    heads = {
        family.name: tuple(tuple(str(head) for head in one) for one in models.heads(family))
        for family in families
        if not family.tuned
    }
    fixed = Fixed(models.recipe.digest, models.seed, heads, temperatures, len(samples))
    fixed.save(path)
    return fixed


def evaluate(models: ZeroShotModels) -> None:
    """Run every family on the test sets; logits go to `logits.npz`, all else to `evaluated.json`."""
    folder, recipe = models.folder, models.recipe
    if (folder.path / f"{FACTS}.json").exists():
        return
    fixed = Fixed.load(folder.path / FIXED)
    tests = open_test_sets(recipe, models.sets, fixed)
    samples = _Samples(models)
    found: dict[str, list[Tensor]] = {}
    units: dict[str, int] = {}
    for family in families_of(models.trains_text):

        def make(family: Family = family) -> dict[str, Any]:
            return {name: logits.numpy() for name, logits in _answers(models, family, tests, samples).items()}

        for name, logits in folder.arrays(f"test/{family.name}", make).items():
            found.setdefault(name, []).append(torch.from_numpy(logits))
        units |= dict.fromkeys(family.units, 1)
    groups = [len(family.units) for family in families_of(models.trains_text)]
    stored: dict[str, CompactSet] = {}
    labels = {f"{TASK}.{one.name}": torch.from_numpy(one.test.images.labels.copy()) for one in tests.tasks}
    for name, parts in found.items():
        stored[name] = compact(torch.cat(parts), labels.get(name), groups, recipe.storing(name in labels))
    save_sets(folder.path / LOGITS, stored)
    folder.facts(FACTS, lambda: {**_facts(models, fixed, tests), "units": units})


class _Samples:
    """Test images as inputs, each set read once."""

    def __init__(self, models: ZeroShotModels) -> None:
        self.models = models
        self._known: dict[int, Any] = {}

    def of(self, images: ImageDataset) -> Any:
        """The samples of a set."""
        if id(images) not in self._known:
            self._known[id(images)] = self.models.samples(images)
        return self._known[id(images)]


def _answers(models: ZeroShotModels, family: Family, tests: TestSets, samples: _Samples) -> Logits:
    """What is stored of a family, `[S, N, C]`, for every task and every OOD set."""
    parts: dict[str, list[Tensor]] = {}
    for member in models.members(family):
        texts = {one.name: text_embeddings(member, one.test.names, models.templates) for one in tests.tasks}
        for name, task, images in _all_sets(tests):
            logits = logits_of(member, image_embeddings(member, samples.of(images)), texts[task])
            parts.setdefault(name, []).append(logits)
    joined = {name: torch.cat(logits) for name, logits in parts.items()}
    return joined if family.apart else {name: mean_logits(logits) for name, logits in joined.items()}


def _all_sets(tests: TestSets) -> Iterator[tuple[str, str, ImageDataset]]:
    """Every set with its name in files and the task whose classes it is asked for."""
    for task in tests.tasks:
        yield f"{TASK}.{task.name}", task.name, task.test.images
    for one in tests.detections:
        for name, images in (*one.near.items(), *one.far.items()):
            yield f"{OOD}.{one.task}.{name}", one.task, images


def _facts(models: ZeroShotModels, fixed: Fixed, tests: TestSets) -> dict[str, Any]:
    """All that results say beside logits."""
    methods = methods_of(models.trains_text)
    return {
        "fixed": fixed.digest,
        "heads": fixed.heads,
        "methods": {name: list(one.units) for name, one in methods.items()},
        "temperatures": fixed.temperatures,
        "calibrated_on": fixed.calibrated_on,
        "model": {"name": models.model.name, "description": models.model.description},
        "sets": models.sets.name,
        "tasks": {
            one.name: {"domain": one.domain, "classes": len(one.test.names), "samples": len(one.test.images)}
            for one in tests.tasks
        },
        "detections": {
            one.task: {
                "near": {name: len(images) for name, images in one.near.items()},
                "far": {name: len(images) for name, images in one.far.items()},
            }
            for one in tests.detections
        },
        "circuits": models.circuit_facts(),
        "device": device_name(models.device),
        "versions": {"torch": str(torch.__version__), "hydra_ensembles": __version__},
    }
