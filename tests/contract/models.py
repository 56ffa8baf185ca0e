"""Converted models of the architectures, built once and not to be changed by a test."""

from functools import cache

import hydra_ensembles as he
from architectures import ArchitectureCase, perturbed
from contract.all_architectures import ALL_CASES

_CASES = {case.name: case for case in ALL_CASES}


def base(case: ArchitectureCase) -> he.Ensemble:
    """The case's model, converted."""
    return _converted(case.name, None)


def variants(case: ArchitectureCase) -> list[he.Ensemble]:
    """Three models that differ everywhere, stem and readout included."""
    return [_converted(case.name, seed) for seed in (11, 12, 13)]


@cache
def _converted(name: str, seed: int | None) -> he.Ensemble:
    case = _CASES[name]
    model = case.build()
    return he.convert(model if seed is None else perturbed(model, seed), **case.convert_kwargs)
