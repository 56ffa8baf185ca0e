"""Scores as integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuit_models import SCORES
from hydra_ensembles.circuit.scores import (
    NO_HEAD,
    Answers,
    Objective,
    Samples,
    Score,
    judge,
    quantum,
)
from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.metrics.ood import auroc, discordance

STEP = quantum(torch.float64)


def test_confidence_orders_like_the_maximum_softmax_probability() -> None:
    logits = 4 * torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, confidence, finite = judge(logits, torch.zeros(200), STEP)
    probability = logits.softmax(-1).amax(-1)
    assert torch.equal(confidence.argsort(), probability.argsort())
    assert torch.allclose(torch.sigmoid(confidence.double() * STEP), probability, atol=1e-8)
    assert finite.all()


def test_confident_answers_do_not_pile_up() -> None:
    logits = torch.tensor([[50.0, 0.0], [60.0, 0.0], [70.0, 0.0]], dtype=torch.float64)
    assert logits.softmax(-1).amax(-1).unique().numel() == 1  # all of them round to 1
    assert judge(logits, torch.zeros(3), STEP)[1].diff().gt(0).all()


def test_rounding_noise_breaks_no_tie() -> None:
    logits = torch.tensor([[1.0, 0.25, 0.5]], dtype=torch.float64)
    noisy = logits + 1e-15 * torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(judge(logits, torch.zeros(1), STEP)[1], judge(noisy, torch.zeros(1), STEP)[1])


def test_the_first_of_tied_classes_is_the_answer() -> None:
    logits = torch.tensor([[0.0, 2.0 - 1e-14, 2.0], [0.0, 2.0, 2.0], [2.0, 0.0, 2.1]], dtype=torch.float64)
    wrong, _, _ = judge(logits, torch.tensor([1, 2, 2]), STEP)
    assert wrong.tolist() == [False, True, False]
    bad = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, 1.0]])
    assert judge(bad, torch.zeros(4), STEP)[2].tolist() == [True, False, False, False]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-4, 4)] * 7), min_size=1, max_size=3), st.integers(1, 6))
def test_discordance_is_that_of_the_metrics(rows: list[tuple[int, ...]], inside: int) -> None:
    table = torch.tensor(rows)
    _, found = Objective("ood", inside, 7 - inside).count(table > 0, table)
    assert found.tolist() == [discordance(-row[:inside], -row[inside:]) for row in table]


def test_scores_from_integers() -> None:
    wrong = torch.tensor([True, False, False, False])
    confidence = torch.tensor([3, 5, 7, 9, 5, 1])
    errors, found = (int(count) for count in Objective("avg", 4, 2).count(wrong[None], confidence[None]))
    assert (errors, found) == (1, 3)  # OOD 5 is above ID 3 and level with ID 5
    expected = auroc(-confidence[:4], -confidence[4:])
    assert Objective("acc", 4, 0).achieved(errors, 0) == 0.75
    assert Objective("ood", 4, 2).achieved(errors, found) == pytest.approx(expected)
    assert Objective("avg", 4, 2).achieved(errors, found) == pytest.approx((0.75 + expected) / 2)
    values = [Objective(score, 4, 2).result(NO_HEAD, 1, 3).value for score in SCORES]
    assert values == [1, 3, 7]


@pytest.mark.parametrize("score", SCORES)
@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_integers_only_grow_as_samples_come_in(score: Score, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = answers(7, 0 if score == "acc" else 5, score)
    logits = torch.randint(4, (table.objective.samples, 3), generator=generator).double()
    wrong, confidence, _ = judge(logits, table.samples.labels, STEP)
    order = table.objective.hardest_first(wrong, confidence)
    assert sorted(order) == list(range(table.objective.samples))
    values = [table.results(np.array([0]))[0].value]
    for number in order:
        table.record(np.array([0]), np.array([number]), logits[[number]])
        values.append(table.results(np.array([0]))[0].value)
    assert values[0] == 0
    assert values == sorted(values)
    counts = map(int, table.objective.count(wrong[None], confidence[None]))
    assert values[-1] == table.objective.result(NO_HEAD, *counts).value


def test_hardest_samples_come_first() -> None:
    wrong = torch.tensor([False, True, False])
    assert Objective("acc", 3, 0).hardest_first(wrong, torch.tensor([1, 9, 5])).tolist() == [1, 0, 2]
    order = Objective("ood", 3, 2).hardest_first(wrong, torch.tensor([1, 9, 5, 0, 6]))
    assert order.tolist() == [4, 0, 2, 3, 1]


def answers(inside: int, outside: int, score: Score = "avg") -> Answers:
    labels = torch.cat([torch.zeros(inside, dtype=torch.long), torch.full((outside,), -1)])
    samples = Samples((), labels, inside, np.zeros((len(labels), 2), np.int64), "")
    return Answers(samples, Objective(score, inside, outside), [Head(0, 0), Head(0, 1)], torch.float64)


def test_integers_beyond_forty_bits_are_right() -> None:
    """The pairs of 750,000 ID and as many OOD samples: each number has its own place, however large."""
    count = 750_000
    table = answers(count, count)
    table.confidence[0] = 5  # everything ties: one unit for each pair
    table.wrong[0] = True
    assert 2 * count**2 > 1 << 40
    assert table.results(np.array([0]))[0][2:] == (count, count**2)
    table.confidence[0, :count] = 4  # every OOD sample is above every ID sample
    assert table.results(np.array([0]))[0].discordance == 2 * count**2


def test_cleared_answers_are_forgotten_with_what_was_not_finite() -> None:
    table, both = answers(2, 1), np.array([0, 1])
    table.record(np.array([0, 1]), np.array([1, 1]), torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]))
    assert table.results(both[:1])[0].errors == 1
    with pytest.raises(DataError, match=r"head 0\.1"):
        table.results(both)
    table.clear()
    assert [(one.errors, one.discordance) for one in table.results(both)] == [(0, 0), (0, 0)]
