"""Converted models of the architectures, built once and not to be changed by a test."""

from functools import cache

import hydra_ensembles as he
from architectures import ArchitectureCase, perturbed
from architectures_clip import DualCase


@cache
def base(case: ArchitectureCase) -> he.Ensemble:
    """The case's model, converted."""
    return he.convert(case.build(), **case.convert_kwargs)


@cache
def variants(case: ArchitectureCase) -> tuple[he.Ensemble, ...]:
    """Three models that differ everywhere, stem and readout included."""
    return tuple(perturbed(base(case).member(0), seed) for seed in (11, 12, 13))  # type: ignore[misc]


@cache
def dual(case: DualCase) -> he.DualEncoder:
    """The case's dual encoder, converted."""
    made = he.convert(case.build())
    assert isinstance(made, he.DualEncoder)
    return made
