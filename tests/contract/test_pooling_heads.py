"""Heads of an attention pooling (SigLIP, PE) can be pruned, fused and ranked like the heads of blocks."""

from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from architectures import VISION_CASES, ArchitectureCase, close
from architectures_clip import DUAL_CASES, TOWER_VARIANTS
from checkpoint_models import same_bits
from circuit_models import Problem, evidence
from contract.models import base, dual, original
from contract.test_circuits import varied
from hydra_ensembles.errors import HeadError
from zero_shot_models import NAMES, tokenizer_for

NAMED = ("timm-siglip", "timm-pe-core", "transformers-clip-siglip-image")
CASES = [case for case in (*VISION_CASES, *TOWER_VARIANTS) if case.name in NAMED]
LAST = 2  # layer index of the pooling, after two blocks
PLANS = ("batched", "loop")
every_case = pytest.mark.parametrize("case", CASES, ids=str)
# even; uneven, with one-head pooling; and members that differ only in the pooling
CHOICES = [
    [[(0, 0), (LAST, 1)], [(1, 1), (LAST, 0)], [(0, 3), (LAST, 1)]],
    [[(LAST, 0)], [(1, 0), (1, 1)], [(0, 1), (0, 2)]],
    [[(0, 1), (LAST, 0)], [(0, 1), (LAST, 1)], [(0, 1)]],
]


@every_case
@torch.no_grad()
def test_pruned_equals_masked_and_heads_keep_their_numbers(case: ArchitectureCase) -> None:
    whole, inputs = base(case), case.inputs()
    before, count = whole(inputs), whole.config.readout.map_heads
    for heads in ([(LAST, 0)], [(0, 2), (LAST, 1)]):
        pruned = he.prune(whole, heads)
        with he.masked(whole, heads):
            expected = whole(inputs)
        assert close(pruned(inputs), expected)
        assert not close(expected, before)
    assert torch.equal(whole(inputs), before)
    assert pruned.config.heads[0][LAST] == tuple(head for head in range(count) if head != 1)
    assert pruned.heads == tuple(kept[:LAST] for kept in pruned.config.heads)
    assert f"(of {count}: the attention that pools)" in str(pruned.describe())
    assert pruned.describe().multiply_adds < he.prune(whole, [(0, 2)]).describe().multiply_adds
    with pytest.raises(HeadError, match="must stay"):
        he.prune(pruned, [(LAST, head) for head in range(count) if head != 1])


@every_case
@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES, ids=["even", "uneven", "pooling-alone"])
def test_fused_equals_members_by_every_plan_and_after_loading(
    case: ArchitectureCase, choice: list[list[tuple[int, int]]], tmp_path: Path
) -> None:
    inputs = case.inputs()
    members = [he.prune(base(case), heads) for heads in choice]
    expected = torch.cat([member(inputs) for member in members])
    for settings in ({}, {"norms": "mean", "readout": "mean"}, {"stem": "separate", "mlp": "separate"}):
        fused = he.fuse(members, **settings)  # type: ignore[arg-type]
        assert close(fused(inputs), expected)
        fast = fused.optimize(plans=PLANS)
        assert all(close(fast.module(plan)(inputs), expected) for plan in PLANS)
        for index, member in enumerate(members):
            assert fused.member(index).config.heads == member.config.heads
    assert he.fuse(members).config.trunk == (LAST if choice is CHOICES[2] else 0)
    fused.save_pretrained(tmp_path)
    loaded = he.Ensemble.from_pretrained(tmp_path)
    assert loaded.config == fused.config
    assert same_bits(loaded(inputs), fused(inputs))


@every_case
def test_exact_circuits_are_the_naive_ones_and_taylor_ranks_them(case: ArchitectureCase) -> None:
    model = base(case)
    if not model.num_classes:
        model = he.convert(original(case), num_labels=5)
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    inside, outside = (varied(case.inputs(), count, seed=count) for count in (8, 6))
    budget, most = model.config.readout.map_heads - 1, sum(model.config.head_counts) - 1
    gone = [(layer, head) for layer in range(LAST) for head in (0, 2)]  # leaves few candidates
    for layers, count in ((None, most - len(gone)), ([LAST], budget), ([1, LAST], 2)):
        pruned = model if layers else he.prune(model, gone)
        problem = Problem(pruned, [(inside, labels)], [outside])  # type: ignore[arg-type,list-item]
        naive, exact = (problem.extract(method=how, budget=count, layers=layers) for how in ("naive", "exact"))
        assert evidence(exact) == evidence(naive)
        assert layers != [LAST] or {head.layer for head in exact.heads} == {LAST}
        assert layers or sum(head.layer == LAST for head in exact.heads) == budget
    options = {"budget": 4, "scope": "global"}
    every = he.taylor(model, [(inside, labels)], **options)  # type: ignore[arg-type,list-item]
    assert len(every.heads) == most  # the best pooling head is kept
    assert sum(head.layer == LAST for head in every.heads) == budget
    assert he.taylor(model, [(inside, labels)], budget=4).provenance["layers"] == [0, 1]  # type: ignore[list-item]


@torch.no_grad()
def test_a_dual_encoder_and_its_zero_shot_classifier_lose_them() -> None:
    case = next(case for case in DUAL_CASES if case.name == "open_clip-timm-siglip")
    both, pixels, texts = dual(case), case.pixels(), case.texts()
    heads = [(LAST, 1, "image"), (LAST, 2, "image"), (0, 0, "text")]
    pruned = he.prune(both, heads)
    with he.masked(both, heads):
        expected = both(pixels, texts)
    assert close(pruned(pixels, texts), expected)
    members = [he.prune(both, [(LAST, head, "image"), (1, head, "text")]) for head in range(3)]
    fused = he.fuse(members)
    assert close(fused(pixels, texts), torch.cat([member(pixels, texts) for member in members]))
    reading = he.convert(case.build(), processor=tokenizer_for(case))
    texts_alone = he.fuse([he.prune(reading, [(1, head, "text")]) for head in range(2)])  # they share one image tower
    apart = he.fuse([he.prune(reading, [(LAST, head, "image")]) for head in range(2)])
    for model in (texts_alone, apart):
        expected = torch.cat([he.zero_shot(model.member(index), NAMES)(pixels) for index in range(2)])
        assert close(he.zero_shot(model, NAMES)(pixels), expected)
