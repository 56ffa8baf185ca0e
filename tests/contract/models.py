"""Converted models of the architectures, built once and not to be changed by a test."""

from functools import cache

import hydra_ensembles as he
from architectures import ArchitectureCase, perturbed
from architectures_clip import DUAL_CASES, DualCase
from contract.all_architectures import ALL_CASES

_CASES = {case.name: case for case in ALL_CASES}
_DUALS = {case.name: case for case in DUAL_CASES}


def base(case: ArchitectureCase) -> he.Ensemble:
    """The case's model, converted."""
    return _converted(case.name, None)


def variants(case: ArchitectureCase) -> list[he.Ensemble]:
    """Three models that differ everywhere, stem and readout included."""
    return [_converted(case.name, seed) for seed in (11, 12, 13)]


def dual(case: DualCase) -> he.DualEncoder:
    """The case's dual encoder, converted."""
    return _converted_dual(case.name)


@cache
def _converted(name: str, seed: int | None) -> he.Ensemble:
    case = _CASES[name]
    model = case.build()
    return he.convert(model if seed is None else perturbed(model, seed), **case.convert_kwargs)


@cache
def _converted_dual(name: str) -> he.DualEncoder:
    made = he.convert(_DUALS[name].build())
    assert isinstance(made, he.DualEncoder)
    return made
