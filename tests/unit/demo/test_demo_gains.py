"""What methods decline, on hand-made answers: ranking, and thresholds that keep their promise."""

import pytest
import torch

from hydra_ensembles.demo.gains import BRANCHES, COLUMNS, DEEP, FAMILIAR, SINGLE, Answers, Gains, gains
from hydra_ensembles.schema import from_plain, to_plain

GROUPS = {"near": ("fields",), "far": ("shoes", "coats")}
PRICES = {SINGLE: 1.0, BRANCHES: 1.5, DEEP: 3.0}
LABELS = torch.arange(400) % 4


def answers(seed: int, skill: float, doubt: float = 0.0, distance: float = 0.0) -> dict[str, Answers]:
    """One model: its accuracy, its uncertainty on OOD images, and their distance from its own data."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    own = noise(1, 400, 4) + skill * torch.nn.functional.one_hot(LABELS, 4)
    found = {FAMILIAR: Answers(own, noise(400))}
    for names in GROUPS.values():
        for name in names:
            sure = torch.nn.functional.one_hot(torch.zeros(100, dtype=torch.long), 4) * (6.0 - doubt)
            found[name] = Answers(noise(1, 100, 4) + sure, noise(100) + distance)
    return found


@pytest.fixture(scope="module")
def found() -> Gains:
    methods = {
        SINGLE: [answers(seed, 3.0, distance=5.0) for seed in (0, 1)],
        BRANCHES: [answers(seed, 3.0, doubt=6.0, distance=5.0) for seed in (0, 1)],
        DEEP: [answers(2, 6.0, distance=5.0)],
    }
    return gains(methods, LABELS, GROUPS, PRICES, draws=12)


def test_the_winner_of_each_number_is_found(found: Gains) -> None:
    assert found.best["accuracy"] == found.best["nll"] == (DEEP,)
    assert found.best["near.unsure"] == found.best["far.unsure"] == (BRANCHES,)
    assert found.best["near.unfamiliar"] == (SINGLE, BRANCHES, DEEP)
    ranks = {row.name: dict(zip([one.key for one in COLUMNS], row.cells, strict=True)) for row in found.table.rows}
    assert ranks[BRANCHES]["far.unsure"].rank == ranks[DEEP]["nll"].rank == "best"
    assert not any(ranks[name]["near.unfamiliar"].rank for name in ranks)  # all tie
    assert ranks[BRANCHES]["price"].text == "1.50×"


def test_thresholds_accept_what_they_promise(found: Gains) -> None:
    """On average: each reason alone accepts 90 %; used together, each accepts 95 % and both at least 90 %."""
    for method in found.methods.values():
        accepted = {reason: method.numbers[f"accepted.{reason}"].mean for reason in ("unsure", "unfamiliar", "both")}
        assert accepted == pytest.approx({"unsure": 0.9, "unfamiliar": 0.9, "both": 0.91}, abs=0.03)
        assert method.numbers["far.unfamiliar"].mean > 0.97
        assert method.numbers["near.both"].low <= method.numbers["near.both"].mean <= method.numbers["near.both"].high
    assert from_plain(Gains, to_plain(found), "gains") == found  # saved and loaded


def test_a_method_is_level_with_itself_and_one_without_mistakes_has_no_share_of_them() -> None:
    """All methods use the same draws, so equal answers give equal numbers, to the bit."""
    perfect = answers(0, 60.0)
    found = gains({name: [perfect] for name in (SINGLE, BRANCHES, DEEP)}, LABELS, GROUPS, PRICES, draws=3)
    assert all(names == (SINGLE, BRANCHES, DEEP) for names in found.best.values())
    assert not any(cell.rank for row in found.table.rows for cell in row.cells)
    assert "mistakes.both" not in found.methods[BRANCHES].numbers
    cells = dict(zip([column.key for column in COLUMNS], found.table.rows[0].cells, strict=True))
    assert (cells["mistakes.both"].text, cells["accuracy"].text) == ("–", "100.0 ± 0.0")


def test_an_ensemble_of_several_models_uses_the_features_of_all() -> None:
    one, other = answers(0, 3.0)["shoes"], answers(1, 3.0)["shoes"]
    both = Answers.stacked([one, other])
    assert both.logits.shape == (2, 100, 4)
    torch.testing.assert_close(both.scores[1], (one.unfamiliar + other.unfamiliar) / 2)
    assert Answers.joined([one, other]).size == 200
