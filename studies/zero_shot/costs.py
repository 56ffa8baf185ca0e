"""What every method costs for an image, measured side by side: class embeddings are there, one pass over the images."""

from collections.abc import Callable
from typing import Any

import torch

from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.fuse import fuse
from hydra_ensembles.model.clip import zero_shot
from hydra_ensembles.model.ensemble import Ensemble

from ..costs import COSTS, write_costs
from .methods import SINGLE, Method, methods_of
from .seed_models import ZeroShotModels


def measure(models: ZeroShotModels) -> None:
    """Latency of one batch for every method, each run as fast as the library can; ratios to the single model.

    The members of an ensemble differ in their heads and class embeddings alone, so their MLPs are stored once and
    fusing them changes no number. A temperature costs nothing and has no row.
    """
    path = models.folder.study / COSTS
    if path.exists():
        return
    images = models.sets.calibration()
    samples = models.samples(images.images, models.recipe.cost_batch)
    inputs, _ = read_batch(next(iter(samples.evaluation(models.recipe.cost_batch))))
    fast = models.device.type == "cuda"
    inputs = move(inputs, models.device, torch.bfloat16 if fast else torch.float32)
    runners: dict[str, Callable[[Any], Any]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name, method in methods_of(models.trains_text).items():
        if method.calibrated:
            continue
        ensemble = classifier(models, method, images.names)
        described = ensemble.describe()
        sizes[name] = {"parameters": described.parameters, "multiply_adds": described.multiply_adds}
        runners[name] = ensemble.optimize(inputs, dtype=torch.bfloat16) if fast else ensemble
    assert next(iter(runners)) == SINGLE
    conditions = {"batch": len(inputs), "classes": len(images.names)}
    write_costs(path, runners, inputs, sizes, models.device, conditions)


def classifier(models: ZeroShotModels, method: Method, names: tuple[str, ...]) -> Ensemble:
    """A method as one ensemble for the given classes."""
    members = models.members(method.family)[: len(method.units) if method.family.apart else None]
    ensembles = [zero_shot(member, names, models.templates, keep_text=False) for member in members]
    return ensembles[0] if len(ensembles) == 1 else fuse(ensembles)
