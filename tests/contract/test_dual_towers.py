"""masked == pruned, and fused == each member run alone, for both towers of every dual encoder."""

import pytest
import torch

import hydra_ensembles as he
from architectures import close, perturbed
from architectures_clip import DUAL_CASES, DualCase
from contract.models import dual as converted
from contract.models import dual_answers
from hydra_ensembles.errors import HeadError

every_case = pytest.mark.parametrize("case", DUAL_CASES, ids=str)
CASE = next(case for case in DUAL_CASES if case.name == "open_clip-nonscalar")

IMAGE = [(0, 1, "image"), (1, 0, "image"), (1, 1, "image"), (1, 2, "image"), (1, 3, "image")]
TEXT = [(0, 0, "text"), (0, 2, "text"), (1, 3, "text")]
CHOICES = [[*IMAGE[:1], *TEXT], [*IMAGE, *TEXT[:1]], [(0, 3, "image"), (1, 1, "text")]]


@every_case
@torch.no_grad()
def test_pruned_equals_masked(case: DualCase) -> None:
    dual, pixels, texts, before = converted(case), case.pixels(), case.texts(), dual_answers(case)
    heads = [*IMAGE, *TEXT]
    pruned = he.prune(dual, heads)
    with he.masked(dual, heads) as inside:
        assert inside is dual
        expected = dual(pixels, texts)
    assert close(pruned(pixels, texts), expected)
    assert not close(expected, before)
    assert torch.equal(dual(pixels, texts), before)
    lost = {tower: sum(head[2] == tower for head in heads) for tower in ("image", "text")}
    for tower, count in lost.items():
        whole, left = getattr(dual, tower), getattr(pruned, tower)
        assert sum(map(len, left.heads[0])) == sum(map(len, whole.heads[0])) - count


@every_case
@torch.no_grad()
def test_fused_equals_members_in_turn(case: DualCase) -> None:
    dual, pixels, texts = converted(case), case.pixels(), case.texts()
    members = [he.prune(dual, heads) for heads in CHOICES]
    expected = torch.cat([member(pixels, texts) for member in members])
    for settings in ({}, {"norms": "mean", "readout": "mean"}, {"stem": "separate", "mlp": "separate"}):
        fused = he.fuse(members, **settings)  # type: ignore[arg-type]
        assert fused.num_members == 3
        assert close(fused(pixels, texts), expected)
        assert fused.config.scale_copies == 1
    for index, member in enumerate(members):
        taken = fused.member(index)
        assert (taken.image.heads, taken.text.heads) == (member.image.heads, member.text.heads)


@torch.no_grad()
def test_a_tower_that_all_members_have_in_common_is_kept_once() -> None:
    dual, pixels, texts = converted(CASE), CASE.pixels(), CASE.texts()
    for tower, other in (("image", "text"), ("text", "image")):
        members = [he.prune(dual, [(1, head, tower)]) for head in range(3)]
        fused = he.fuse(members)
        assert (getattr(fused, tower).num_members, getattr(fused, other).num_members) == (3, 1)
        assert close(fused(pixels, texts), torch.cat([member(pixels, texts) for member in members]))
        refused = he.fuse([fused, members[0]])
        assert refused.num_members == 4
        with (
            pytest.raises(HeadError, match=f"one {other} tower serves all 3 members"),
            he.masked(fused, [(0, 0, other)], 1),
        ):
            pass
        before = fused(pixels, texts)
        with he.masked(fused, [(1, 3, tower)], member=1):
            changed = fused(pixels, texts)
        assert [torch.equal(changed[index], before[index]) for index in range(3)] == [True, False, True]
    same = he.fuse([dual, dual])
    assert (same.num_members, same.image.config.trunk) == (2, 2)


@torch.no_grad()
def test_members_that_were_trained_apart_keep_their_own_projections_and_scales() -> None:
    pixels, texts = CASE.pixels(), CASE.texts()
    members = [he.convert(perturbed(CASE.build(), seed)) for seed in (1, 2)]
    fused = he.fuse(members, stem="separate", mlp="separate")
    assert (fused.config.scale_copies, fused.config.text_projection.copies) == (2, 2)  # type: ignore[union-attr]
    assert close(fused(pixels, texts), torch.cat([member(pixels, texts) for member in members]))
    mean = he.fuse(members, stem="mean", readout="mean")
    assert (mean.config.scale_copies, mean.config.text_projection.copies) == (1, 1)  # type: ignore[union-attr]
