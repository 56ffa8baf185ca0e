"""Every execution plan of an ensemble gives the same logits, for every architecture."""

from functools import cache

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase, close
from contract.models import ALL_CASES, UNEVEN, answers, members, pruned_variants, stacked
from hydra_ensembles.optimize.freeze import branching_layer, simplified
from hydra_ensembles.optimize.runner import PLANS, OptimizedEnsemble

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)

EVEN = [[(0, 0), (1, 1)], [(0, 1), (1, 2)], [(0, 3), (1, 3)]]


KINDS = ("even", "uneven", "tuned", "stack")


@cache
def ensemble_of(case: ArchitectureCase, kind: str) -> he.Ensemble:
    """Cached; tests must not modify it."""
    if kind == "stack":
        return stacked(case)
    if kind == "tuned":
        return he.fuse(pruned_variants(case), stem="separate")
    return he.fuse(members(case, EVEN if kind == "even" else UNEVEN))


@cache
def optimized(case: ArchitectureCase, kind: str) -> OptimizedEnsemble:
    return ensemble_of(case, kind).optimize(plans=PLANS)


@torch.no_grad()
def test_each_plan_equals_the_ensemble_at_changing_batch_sizes(case: ArchitectureCase) -> None:
    inputs = case.inputs()
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    for kind in KINDS:
        expected = ensemble_of(case, kind)(inputs)  # a sample's logits do not depend on its batch
        for plan in PLANS:
            fast = optimized(case, kind).module(plan)
            assert close(fast(inputs), expected)
            assert close(fast(first), expected[:, :1])


@torch.no_grad()
def test_what_members_have_in_common_is_kept_once(case: ArchitectureCase) -> None:
    ensemble = he.fuse(members(case, [[(1, head)] for head in range(3)]))
    simple = simplified(ensemble)
    assert branching_layer(simple) == 1
    assert close(simple(case.inputs()), ensemble(case.inputs()))
    if ensemble.config.encoder.kv_heads is not None:
        return  # each member keeps heads and groups of its own
    attention = simple.encoder.layers[1].attention
    assert attention.qkv.shape[0] == 4  # not nine, though three members keep three heads each
    assert sum(p.numel() for p in simple.parameters()) < sum(p.numel() for p in ensemble.parameters())


@torch.no_grad()
def test_an_empty_batch_gives_no_logits(case: ArchitectureCase) -> None:
    nothing = {name: tensor[:0] for name, tensor in case.inputs().items()}
    ensemble, fast = ensemble_of(case, "uneven"), optimized(case, "uneven")
    for run in (ensemble, *(fast.module(plan) for plan in PLANS)):
        assert run(nothing).shape == (3, 0, answers(case).shape[-1])
