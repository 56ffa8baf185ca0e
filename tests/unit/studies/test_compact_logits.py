"""Logits that are stored small: what is kept, what is lost, and that files give it back."""

from pathlib import Path

import pytest
import torch

from hydra_ensembles.errors import ConfigError, DataError
from studies.compact_logits import Storing, compact
from studies.logit_files import load_sets, save_sets
from studies.logit_tails import FINENESS, MIXTURES, describe_tail, even_tail, tail_logits

STEP = 1 / 16
SOME = Storing(STEP, 8)


def some_logits(classes: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(5, 40, classes, generator=torch.Generator().manual_seed(seed))


def test_few_classes_are_kept_to_half_a_step_and_no_answer_changes() -> None:
    logits = some_logits(10)
    logits[0, 0, 3] = logits[0, 0].max() + STEP / 4  # an answer that rounding alone would make a tie
    restored = compact(logits, None, (5,), Storing(STEP)).logits()
    relative = logits - logits.amax(-1, keepdim=True)
    close = relative > -STEP / 2  # to an answer; a whole step is kept between
    assert ((restored - relative).abs()[~close]).max() <= STEP / 2 + 1e-6
    assert (restored - relative).abs().max() <= STEP
    assert torch.equal(restored.amax(-1), torch.zeros(5, 40))
    assert torch.equal(restored.argmax(-1), logits.argmax(-1))
    assert torch.equal((restored == 0).sum(-1), torch.ones(5, 40, dtype=torch.long))


def test_many_classes_keep_those_that_matter_the_label_and_the_rest_of_the_mass() -> None:
    logits, labels = some_logits(100), torch.arange(40)
    stored = compact(logits, labels, (5,), Storing(1e-4, 12))
    probs, wanted = stored.logits().softmax(-1), logits.softmax(-1)
    (group,) = stored.groups
    assert group.values.shape == (5, 40, 13)
    assert torch.equal(probs.argmax(-1), wanted.argmax(-1))
    kept = torch.from_numpy(group.kept.astype("int64"))
    assert (kept == labels[:, None]).any(1).all()
    index = kept.expand(5, -1, -1)
    torch.testing.assert_close(probs.gather(2, index), wanted.gather(2, index), atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, 40))


def test_what_matters_most_is_stored_finest() -> None:
    relative = -torch.linspace(0, 30, 3000)
    logits = torch.stack([torch.zeros(3000), relative, *torch.full((8, 3000), -50.0)], dim=-1)[None]
    stored = compact(logits, torch.ones(3000, dtype=torch.long), (1,), Storing(STEP, 2)).logits()[0, :, 1]
    error = (stored - relative).abs()
    assert error[: 3000 // 60].max() <= 1.5 * STEP  # within half a unit of the answer
    assert error[:600].max() <= 0.25
    assert error.max() <= 0.55
    assert (stored.diff() <= 0).all()


def test_more_classes_are_kept_where_members_disagree() -> None:
    logits = torch.zeros(3, 2, 50)
    for member, favourite in enumerate((7, 30, 49)):
        logits[member, 0, favourite] = 9.0
        logits[member, 1, 7] = 9.0
    stored = compact(logits, torch.tensor([2, 7]), (3,), Storing(STEP, 2))
    assert sorted(stored.groups[0].kept[0].tolist()) == [2, 7, 30, 49]
    assert 7 in stored.groups[0].kept[1].tolist()
    torch.testing.assert_close(stored.logits().softmax(-1).amax(-1), logits.softmax(-1).amax(-1), atol=2e-3, rtol=0)


def test_groups_do_not_crowd_each_other_out() -> None:
    """Every row gives its weight to three classes of its own; a group keeps those of its rows only."""
    logits = torch.full((4, 6, 80), -6.0)
    for row in range(4):
        logits[row, :, 10 * row : 10 * row + 3] = torch.tensor([3.0, 2.5, 2.0])
    stored = compact(logits, None, (2, 1, 1), Storing(STEP, 3))
    assert [group.kept.shape[-1] for group in stored.groups] == [3, 3, 3]
    assert sorted(stored.groups[2].kept[0].tolist()) == [30, 31, 32]
    torch.testing.assert_close(
        stored.logits([3, 2]).softmax(-1)[:, :, 20:33], logits[[3, 2]].softmax(-1)[:, :, 20:33], atol=0.01, rtol=0.05
    )
    assert torch.equal(stored.logits([3, 0]), stored.logits()[[3, 0]])


def test_groups_are_those_of_the_rows() -> None:
    with pytest.raises(ConfigError, match="must add up to the 5 rows"):
        compact(some_logits(30), None, (3, 1), SOME)


@pytest.mark.parametrize("storing", [{"step": 0.0}, {"step": 0.1, "keep": 0}])
def test_settings_check_themselves(storing: dict) -> None:
    with pytest.raises(ConfigError, match="at least one class is kept"):
        Storing(**storing)


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 4.0])
def test_tails_have_the_probability_and_the_entropy_they_had(scale: float) -> None:
    rest = scale * torch.randn(1, 50, 100, generator=torch.Generator().manual_seed(0), dtype=torch.double) - 20.0
    rest[..., :7] = -torch.inf
    level, entropy = describe_tail(rest)
    made = tail_logits(level, entropy, torch.zeros(50, dtype=torch.long), 100, 7)
    torch.testing.assert_close(made.logsumexp(-1), rest.logsumexp(-1), atol=1e-6, rtol=0)
    gap = torch.special.entr(made.softmax(-1)).sum(-1) - torch.special.entr(rest.softmax(-1)).sum(-1)
    assert gap.abs().max() <= 0.5 / FINENESS + 1e-3


def test_a_tail_of_the_highest_entropy_is_even() -> None:
    level = torch.tensor([[-1.0, -2.5]])
    tails = tail_logits(level, torch.full((1, 2), even_tail(93)), torch.tensor([0, 9]), 100, 7)
    assert torch.equal(tails, level[..., None].expand(1, 2, 93))


def test_no_tail_comes_up_to_its_members_answer() -> None:
    tails = tail_logits(torch.zeros(1, 1), torch.full((1, 1), 8), torch.tensor([0]), 100, 7)
    assert tails.max() < 0


def test_tails_of_rows_can_lie_on_each_other_and_apart() -> None:
    level, entropy = torch.full((3, MIXTURES), -9.0), torch.full((3, MIXTURES), 3 * FINENESS)
    tails = tail_logits(level, entropy, torch.arange(MIXTURES), 100, 5).softmax(-1)
    assert torch.equal(tails[0, 0], tails[2, 0])
    shared = torch.minimum(tails[0], tails[1]).sum(-1)
    assert shared[0] == pytest.approx(1.0)
    assert (shared.diff() < 0.05).all()
    assert shared[-1] < 0.5


@pytest.mark.parametrize("small", [False, True])
def test_files_give_sets_back(tmp_path: Path, small: bool) -> None:
    sets = {
        "0.id": compact(some_logits(30), torch.arange(40) % 30, (1, 3, 1), SOME),
        "0.near.many": compact(some_logits(300), None, (2, 3), Storing(1e-3, 2)),
        "0.far": compact(some_logits(3), None, (5,), Storing(STEP)),
    }
    save_sets(tmp_path / "logits.npz", sets, small=small)
    again = load_sets(tmp_path / "logits.npz")
    assert list(again) == list(sets)
    for name, one in sets.items():
        assert torch.equal(again[name].logits(), one.logits())
    assert again["0.id"].labels.tolist() == sets["0.id"].labels.tolist()
    assert again["0.far"].labels is None


def test_same_sets_same_file(tmp_path: Path) -> None:
    sets = {"0.far": compact(some_logits(30), None, (5,), SOME)}
    for name in ("a.npz", "b.npz"):
        save_sets(tmp_path / name, sets)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "logits.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"logits\.npz cannot be read"):
        load_sets(tmp_path / "logits.npz")
