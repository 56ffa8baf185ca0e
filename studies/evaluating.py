"""The last stage that runs models: every method on every test set, read once, after everything was chosen."""

import platform
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._utils import __version__
from hydra_ensembles.calibrate import fit_calibration

from .compact_logits import CompactSet, compact
from .decision import Decision
from .logit_files import save_sets
from .methods import all_methods, all_units, groups_of
from .seed_models import SeedModels
from .test_sets import open_test_sets
from .units import joined, member_logits

LOGITS = "logits.npz"
FACTS = "evaluated"


def prepare_members(models: SeedModels, decision: Decision) -> dict[str, float]:
    """Make every model that the methods need; the temperature of each method, fitted on half B."""

    def make() -> dict[str, float]:
        labels = models.data.choose_id.labels
        temperatures = {}
        for method, units in all_methods(models.recipe, decision).items():
            fit = fit_calibration(joined(models, units)[0], labels)
            temperatures[method] = fit.calibration.temperature[0]
        return temperatures

    return dict(models.folder.facts("temperatures", make))


def evaluate(models: SeedModels, decision: Decision) -> None:
    """Run every unit on the test sets; logits go to `logits.npz`, all else to `evaluated.json`."""
    folder, recipe = models.folder, models.recipe
    if (folder.path / f"{FACTS}.json").exists():
        return
    temperatures = prepare_members(models, decision)
    methods = all_methods(recipe, decision)
    sets = open_test_sets(recipe, models.data.reader, decision)
    counts: dict[str, int] = {}
    found: dict[str, list[Tensor]] = {name: [] for name in sets}
    for unit in all_units(methods):

        def make(unit: str = unit) -> dict[str, Any]:
            model = models.model(unit)
            return {
                name: member_logits(model, one.samples, recipe.kind, models.device).numpy()
                for name, one in sets.items()
            }

        for name, logits in folder.arrays(f"test/{unit}", make).items():
            found[name].append(torch.from_numpy(logits))
            counts[unit] = len(logits)
    stored: dict[str, CompactSet] = {}
    for name, one in sets.items():
        labels = one.samples.labels if one.group == "id" else None
        stored[name] = compact(torch.cat(found[name]), labels, groups_of(methods, counts), recipe.storing(one.group))
    save_sets(folder.path / LOGITS, stored)
    folder.facts(
        FACTS,
        lambda: {
            "decision": decision.digest,
            "units": counts,
            "methods": {name: list(units) for name, units in methods.items()},
            "temperatures": temperatures,
            "sets": {name: {"group": one.group, "samples": len(one.samples)} for name, one in sets.items()},
            "samples": models.data.samples(),
            "device": device_name(models.device),
            "versions": {"torch": str(torch.__version__), "hydra_ensembles": __version__},
        },
    )


def device_name(device: torch.device) -> str:
    """What a reader calls the machine's accelerator."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
