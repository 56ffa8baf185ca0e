"""What `summary.json` says about a finished build."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._utils import __version__
from ..batches import length_of
from ..model.ensemble import Ensemble
from ..schema import to_plain
from .config import HydraConfig
from .data import BuildData
from .member_choice import MemberChoice


def build_summary(
    config: HydraConfig,
    base: Ensemble,
    data: BuildData,
    choices: Sequence[MemberChoice],
    final: Ensemble,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Settings, data, members, cost and calibration of a build, as plain data."""
    before, after = base.describe(), final.describe()
    calibration = final.metadata.calibration
    return {
        "config": to_plain(config),
        "versions": {"hydra_ensembles": __version__, "torch": torch.__version__},
        "model": {"source": base.metadata.source, "kind": base.kind, "parameters": before.parameters},
        "samples": data.samples(),
        "train_batches": None if data.train is None else length_of(data.train),
        "members": [
            {
                "origin": choice.origin,
                "pruned": [str(head) for head in choice.heads],
                "heads_kept": [len(layer) for layer in kept],
            }
            for choice, kept in zip(choices, final.heads, strict=True)
        ],
        "trunk": final.config.trunk,
        "parameters": after.parameters,
        "multiply_adds": after.multiply_adds,
        "multiply_adds_of_the_model": before.multiply_adds,
        "calibration": None if calibration is None else to_plain(calibration),
        "metrics": dict(final.metadata.metrics),
        "history": list(final.metadata.history),
        "seconds": dict(seconds),
    }
