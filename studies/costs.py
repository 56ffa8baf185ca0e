"""What every method costs, measured side by side in one run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.fuse import fuse
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.schema import to_plain

from .decision import Decision
from .evaluating import device_name
from .methods import CALIBRATED, DEEP, SINGLE, all_methods
from .seed_models import SeedModels

COSTS = "costs.json"


def measure(models: SeedModels, decision: Decision) -> None:
    """Latency of one batch for every method, each run as fast as the library can; ratios to the single model.

    On a GPU the ensembles are frozen, in bfloat16, with the fastest plan and a recorded graph; MC Dropout draws
    anew with every call and runs as it is.
    """
    path = models.folder.study / COSTS
    if path.exists():
        return
    recipe, device = models.recipe, models.device
    inputs, _ = read_batch(next(iter(models.data.choose_id.evaluation(recipe.cost_batch))))
    fast = device.type == "cuda"
    inputs = move(inputs, device, torch.bfloat16 if fast else torch.float32)
    methods = all_methods(recipe, decision)
    order = [SINGLE, *(name for name in methods if name != SINGLE and name not in CALIBRATED)]
    runners: dict[str, Callable[[Any], Any]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name in order:
        model = _model(models, name, methods[name])
        if isinstance(model, Ensemble):
            described = model.describe()
            sizes[name] = {"parameters": described.parameters, "multiply_adds": described.multiply_adds}
            runners[name] = model.optimize(inputs, dtype=torch.bfloat16) if fast else model
        else:
            runners[name] = model.bfloat16() if fast else model
    write_costs(path, runners, inputs, sizes, device, {"batch": recipe.cost_batch})


def write_costs(
    path: Path,
    runners: Mapping[str, Callable[[Any], Any]],
    inputs: Any,
    sizes: Mapping[str, Mapping[str, int]],
    device: torch.device,
    conditions: Mapping[str, int],
) -> None:
    """Measure all runners side by side, the first of which is the reference, and write what they cost.

    Args:
        path: JSON file.
        runners: What to time, by method.
        inputs: The batch, on the device.
        sizes: Parameters and multiply-adds, where they are known.
        device: Where the runners are.
        conditions: What else the numbers depend on.
    """
    fast = device.type == "cuda"
    costs = measure_costs(runners, inputs, repeats=30 if fast else 1, warmup=3 if fast else 0)
    plain = {
        "device": device_name(device),
        "dtype": "bfloat16" if fast else "float32",
        **conditions,
        "costs": {one.name: {**to_plain(one), **sizes.get(one.name, {})} for one in costs},
    }
    write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())


def _model(models: SeedModels, name: str, units: tuple[str, ...]) -> Any:
    """A method as one model."""
    if len(units) == 1:
        return models.model(units[0])
    members = [models.model(unit) for unit in units]
    ensembles = [one for one in members if isinstance(one, Ensemble)]
    return Ensemble.stack(ensembles) if name == DEEP else fuse(ensembles, mlp="separate")
