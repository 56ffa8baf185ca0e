"""Logits that are stored small: what is kept, what is lost, and that files give it back."""

from pathlib import Path

import pytest
import torch

from hydra_ensembles.errors import DataError
from hydra_ensembles.studies.compact_logits import compact, load_sets, save_sets

STEP = 1 / 16


def some_logits(classes: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(5, 40, classes, generator=torch.Generator().manual_seed(seed))


def test_few_classes_are_kept_to_half_a_step_and_no_answer_changes() -> None:
    logits = some_logits(10)
    logits[0, 0, 3] = logits[0, 0].max() + STEP / 4  # an answer that rounding alone would make a tie
    restored = compact(logits, None, STEP, None).logits()
    relative = logits - logits.amax(-1, keepdim=True)
    close = relative > -STEP / 2  # to an answer; a whole step is kept between
    assert ((restored - relative).abs()[~close]).max() <= STEP / 2 + 1e-6
    assert (restored - relative).abs().max() <= STEP
    assert torch.equal(restored.amax(-1), torch.zeros(5, 40))
    assert torch.equal(restored.argmax(-1), logits.argmax(-1))
    assert torch.equal((restored == 0).sum(-1), torch.ones(5, 40, dtype=torch.long))


def test_many_classes_keep_those_that_matter_the_label_and_the_rest_of_the_mass() -> None:
    logits, labels = some_logits(100), torch.arange(40)
    stored = compact(logits, labels, 1e-4, 12)
    probs, wanted = stored.logits().softmax(-1), logits.softmax(-1)
    assert stored.values.shape == (5, 40, 13)
    assert torch.equal(probs.argmax(-1), wanted.argmax(-1))
    kept = torch.from_numpy(stored.kept.astype("int64"))
    assert (kept == labels[:, None]).any(1).all()
    index = kept.expand(5, -1, -1)
    torch.testing.assert_close(probs.gather(2, index), wanted.gather(2, index), atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, 40))


def test_every_members_favourite_is_kept() -> None:
    logits = torch.zeros(3, 1, 50)
    for member, favourite in enumerate((7, 30, 49)):
        logits[member, 0, favourite] = 9.0
    stored = compact(logits, None, STEP, 3)
    assert stored.kept.tolist() == [[7, 30, 49]]
    torch.testing.assert_close(stored.logits().softmax(-1), logits.softmax(-1), atol=1e-4, rtol=0.05)


def test_more_classes_are_kept_where_members_disagree() -> None:
    logits = torch.zeros(3, 2, 50)
    for member, favourite in enumerate((7, 30, 49)):
        logits[member, 0, favourite] = 9.0
        logits[member, 1, 7] = 9.0
    stored = compact(logits, torch.tensor([2, 7]), STEP, 2)
    assert stored.kept[0].tolist() == [2, 7, 30, 49]
    assert 7 in stored.kept[1].tolist()
    torch.testing.assert_close(stored.logits().softmax(-1).amax(-1), logits.softmax(-1).amax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("small", [False, True])
def test_files_give_sets_back(tmp_path: Path, small: bool) -> None:
    sets = {
        "0.id": compact(some_logits(30), torch.arange(40) % 30, STEP, 8),
        "0.far": compact(some_logits(3), None, STEP, None),
    }
    save_sets(tmp_path / "logits.npz", sets, small=small)
    again = load_sets(tmp_path / "logits.npz")
    assert list(again) == list(sets)
    for name, one in sets.items():
        assert torch.equal(again[name].logits(), one.logits())
    assert again["0.id"].labels.tolist() == sets["0.id"].labels.tolist()
    assert again["0.far"].labels is None


def test_same_sets_same_file(tmp_path: Path) -> None:
    sets = {"0.far": compact(some_logits(3), None, STEP, None)}
    for name in ("a.npz", "b.npz"):
        save_sets(tmp_path / name, sets)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "logits.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"logits\.npz cannot be read"):
        load_sets(tmp_path / "logits.npz")
