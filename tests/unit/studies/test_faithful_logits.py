"""Numbers of tables from stored logits against those from all logits, on 200 classes as a network has them.

The bounds are those that the studies state in docs/results.md.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hydra_ensembles.metrics.calibration import accuracy, brier, ece, nll
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.prediction import Prediction
from studies.compact_logits import CompactSet, compact
from studies.logit_files import save_sets
from studies.recipe import load_recipe

CLASSES, SAMPLES, WIDTH = 200, 2000, 48
GROUPS = (1, 3, 5)
BOUNDS = {"accuracy": 1e-3, "ece": 2e-3, "brier": 1e-3, "nll": 5e-3, "msp": 1e-3, "entropy": 1e-3}
Pair = tuple[Tensor, Tensor]


def member_logits(strength: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Logits `[9, B, 200]` of linear classifiers that resemble each other, most those of one group; and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, WIDTH, generator=generator)
    rows = []
    weights = torch.Generator().manual_seed(99)
    whole = torch.randn(CLASSES, WIDTH, generator=weights) / WIDTH**0.5
    for members in GROUPS:
        group = whole + 0.25 * torch.randn(CLASSES, WIDTH, generator=weights) / WIDTH**0.5
        for _ in range(members):
            own = group + 0.2 * torch.randn(CLASSES, WIDTH, generator=weights) / WIDTH**0.5
            rows.append(3.0 * (4.0 * strength[:, None] * whole[labels] + noise) @ own.T)
    return torch.stack(rows), labels


@pytest.fixture(scope="module")
def sets() -> tuple[Pair, tuple[CompactSet, CompactSet], Tensor]:
    """All logits and stored ones, ID and OOD, and labels."""
    evidence = torch.linspace(0.0, 1.0, SAMPLES)
    inside, labels = member_logits(0.3 + 1.2 * evidence, 0)
    outside, _ = member_logits(0.7 * evidence, 1)
    recipe = load_recipe("vision-tinyimagenet")
    stored = (
        compact(inside, labels, GROUPS, recipe.storing("id")),
        compact(outside, None, GROUPS, recipe.storing("far")),
    )
    return (inside, outside), stored, labels


def numbers(inside: Tensor, outside: Tensor, labels: Tensor, temperature: float) -> dict[str, float]:
    ours, others = (Prediction.from_logits(one, temperature=temperature) for one in (inside, outside))
    found = {
        name: metric(ours.probs, labels)
        for name, metric in {"accuracy": accuracy, "ece": ece, "brier": brier, "nll": nll}.items()
    }
    return found | {name: auroc(ours.score(name), others.score(name)) for name in ("msp", "entropy")}


@pytest.mark.parametrize("rows", [range(1), range(1, 4), range(4, 9)], ids=["one", "three", "five"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_numbers_are_those_of_all_logits(sets: tuple, rows: range, temperature: float) -> None:
    full, stored, labels = sets
    wanted = numbers(*(one[list(rows)] for one in full), labels, temperature)
    found = numbers(*(one.logits(rows) for one in stored), labels, temperature)
    assert 0.4 < wanted["accuracy"] < 0.9
    assert 0.6 < wanted["msp"] < 0.95
    for name, bound in BOUNDS.items():
        assert found[name] == pytest.approx(wanted[name], abs=bound + 1e-9), name
    if len(rows) == 1:
        assert found["accuracy"] == wanted["accuracy"]


@pytest.mark.parametrize("rows", [range(1, 4), range(4, 9)], ids=["three", "five"])
def test_members_differ_as_much_as_they_did(sets: tuple, rows: range) -> None:
    """Tables have the mutual information of members without a temperature only."""
    full, stored, _ = sets
    wanted = [Prediction.from_logits(one[list(rows)]).epistemic for one in full]
    found = [Prediction.from_logits(one.logits(rows)).epistemic for one in stored]
    assert auroc(*found) == pytest.approx(auroc(*wanted), abs=1e-3)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.mean().item() == pytest.approx(theirs.mean().item(), rel=0.01)


def test_every_member_answers_as_it_did(sets: tuple) -> None:
    full, stored, _ = sets
    for logits, one in zip(full, stored, strict=True):
        assert torch.equal(one.logits().argmax(-1), logits.argmax(-1))


def test_a_sample_takes_few_bytes(sets: tuple, tmp_path: Path) -> None:
    """Nine members: 1,800 numbers in less than 100 bytes; ID samples and OOD samples together."""
    save_sets(tmp_path / "logits.npz", dict(zip(("id", "ood"), sets[1], strict=True)), small=True)
    assert (tmp_path / "logits.npz").stat().st_size / (2 * SAMPLES) < 100
