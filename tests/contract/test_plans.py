"""Every way to run an ensemble gives the same numbers, for every architecture."""

from functools import cache

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import ArchitectureCase
from contract.all_architectures import ALL_CASES
from contract.models import base, members, variants
from hydra_ensembles.optimize.freeze import branching_layer, simplified
from hydra_ensembles.optimize.runner import OptimizedEnsemble

pytestmark = pytest.mark.parametrize("case", ALL_CASES, ids=str)

EVEN = [[(0, 0), (1, 1)], [(0, 1), (1, 2)], [(0, 3), (1, 3)]]
UNEVEN = [[(0, 1), (0, 2), (1, 0)], [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)], [(1, 2)]]


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max())


KINDS = ("even", "uneven", "tuned", "stack")
PLANS = ("batched", "loop", "grouped")


@cache
def ensemble_of(case: ArchitectureCase, kind: str) -> he.Ensemble:
    """Built once; not to be changed by a test."""
    tuned = variants(case)
    if kind == "stack":
        return he.Ensemble.stack(tuned)
    if kind == "tuned":
        return he.fuse([he.prune(one, heads) for one, heads in zip(tuned, UNEVEN, strict=True)], stem="separate")
    return he.fuse(members(case, EVEN if kind == "even" else UNEVEN))


@cache
def by_plan(case: ArchitectureCase, kind: str, plan: str) -> OptimizedEnsemble:
    return ensemble_of(case, kind).optimize(plans=[plan])


@torch.no_grad()
def test_each_plan_equals_the_ensemble_at_changing_batch_sizes(case: ArchitectureCase) -> None:
    inputs = case.inputs()
    batches = [{name: tensor[:size] for name, tensor in inputs.items()} for size in (3, 1, 2)]
    for kind in KINDS:
        expected = [ensemble_of(case, kind)(batch) for batch in batches]
        for plan in PLANS:
            fast = by_plan(case, kind, plan)
            assert all(close(fast(batch), logits) for batch, logits in zip(batches, expected, strict=True))


@torch.no_grad()
def test_the_chosen_plan_equals_the_ensemble(case: ArchitectureCase) -> None:
    inputs, ensemble = case.inputs(), ensemble_of(case, "uneven")
    fast = ensemble.optimize()
    assert close(fast(inputs), ensemble(inputs))
    assert [set(seconds) for seconds in fast.timings.values()] == [{"batched", "loop"}]
    if ensemble.num_classes:
        assert torch.equal(fast.predict(inputs).label, ensemble.predict(inputs).label)


@torch.no_grad()
def test_what_members_have_in_common_is_kept_once(case: ArchitectureCase) -> None:
    ensemble = he.fuse(members(case, [[(1, head)] for head in range(3)]))
    simple = simplified(ensemble)
    assert branching_layer(simple) == 1
    assert close(simple(case.inputs()), ensemble(case.inputs()))
    attention = simple.encoder.layers[1].attention
    assert attention.qkv.shape[0] == 4  # three times three heads of four
    assert sum(p.numel() for p in simple.parameters()) < sum(p.numel() for p in ensemble.parameters())


@torch.no_grad()
def test_an_empty_batch_gives_no_logits(case: ArchitectureCase) -> None:
    nothing = {name: tensor[:0] for name, tensor in case.inputs().items()}
    whole = base(case)
    outputs = whole(case.inputs()).shape[-1]
    runs = [whole, *(whole.optimize(plans=[plan]) for plan in PLANS)]
    for kind in ("uneven", "stack"):
        runs += [ensemble_of(case, kind), *(by_plan(case, kind, plan) for plan in PLANS)]
    numbers = [1] * 4 + [3] * 8
    assert [run(nothing).shape for run in runs] == [(number, 0, outputs) for number in numbers]
