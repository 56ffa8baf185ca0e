"""Original, converted and pruned models of the architectures, cached; tests must not modify them."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

import hydra_ensembles as he
from architectures import VISION_CASES, ArchitectureCase, perturbed
from architectures_clip import TOWER_CASES, DualCase
from architectures_decoders import CONTRACT as DECODER_CASES
from architectures_own import CASES as OWN_CASES
from architectures_transformers import CASES as TRANSFORMERS_CASES

ALL_CASES: list[ArchitectureCase] = [*VISION_CASES, *TRANSFORMERS_CASES, *OWN_CASES, *TOWER_CASES, *DECODER_CASES]


@cache
def original(case: ArchitectureCase) -> nn.Module:
    """The case's model, as its library builds it."""
    return case.build()


@cache
def base(case: ArchitectureCase) -> he.Ensemble:
    """The case's model, converted."""
    return he.convert(original(case), **case.convert_kwargs)


@cache
def _pruned(case: ArchitectureCase, heads: tuple[tuple[int, int], ...]) -> he.Ensemble:
    return he.prune(base(case), heads)


def members(case: ArchitectureCase, choice: Sequence[Sequence[tuple[int, int]]]) -> list[he.Ensemble]:
    """The case's converted model, pruned by each choice of heads."""
    return [_pruned(case, tuple(heads)) for heads in choice]


@cache
@torch.no_grad()
def answers(case: ArchitectureCase, *heads: tuple[int, int]) -> Tensor:
    """Logits of the case's converted model for the case's inputs, without these heads."""
    return (_pruned(case, heads) if heads else base(case))(case.inputs())


@cache
def variants(case: ArchitectureCase) -> tuple[he.Ensemble, ...]:
    """Three models with different values in every parameter, stem and readout included."""
    return tuple(perturbed(base(case).member(0), seed) for seed in (11, 12, 13))  # type: ignore[misc]


# Heads pruned from three members, a different number from each; one member has none left in the second layer.
UNEVEN = [[(0, 1), (0, 2), (1, 0)], [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)], [(1, 2)]]


@cache
def pruned_variants(case: ArchitectureCase) -> tuple[he.Ensemble, ...]:
    """The three models, each pruned by different heads."""
    return tuple(he.prune(one, heads) for one, heads in zip(variants(case), UNEVEN, strict=True))


@cache
def stacked(case: ArchitectureCase) -> he.Ensemble:
    """The three models, stacked."""
    return he.Ensemble.stack(variants(case))


@cache
def dual(case: DualCase) -> he.DualEncoder:
    """The case's dual encoder, converted."""
    made = he.convert(case.build())
    assert isinstance(made, he.DualEncoder)
    return made


@cache
@torch.no_grad()
def dual_answers(case: DualCase) -> Tensor:
    """Logits of the case's converted dual encoder for the case's inputs."""
    return dual(case)(case.pixels(), case.texts())
