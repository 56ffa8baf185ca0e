"""Scores as integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuit_models import SCORES
from hydra_ensembles.circuit import scores
from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.ranking import Head

STEP = scores.grid_step(torch.float64)


def test_confidence_orders_like_the_maximum_softmax_probability() -> None:
    def confidences(logits: torch.Tensor) -> torch.Tensor:
        return scores.judge(logits.double(), torch.zeros(len(logits)), STEP)[1]

    logits = 4 * torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, probability = confidences(logits), logits.softmax(-1).amax(-1)
    assert torch.equal(found.argsort(), probability.argsort())
    assert torch.allclose(torch.sigmoid(found.double() * STEP), probability, atol=1e-8)
    sure = torch.tensor([[50.0, 0.0], [60.0, 0.0], [70.0, 0.0]])
    assert sure.double().softmax(-1).amax(-1).unique().numel() == 1  # all round to 1, but their confidences differ
    assert confidences(sure).diff().gt(0).all()
    noise = 1e-15 * torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(confidences(logits.round(decimals=2) + noise), confidences(logits.round(decimals=2)))


def test_the_first_of_tied_classes_is_the_answer_and_what_is_not_finite_is_told() -> None:
    logits = torch.tensor([[0.0, 2.0 - 1e-14, 2.0], [0.0, 2.0, 2.0], [2.0, 0.0, 2.1]], dtype=torch.float64)
    assert scores.judge(logits, torch.tensor([1, 2, 2]), STEP)[0].tolist() == [False, True, False]
    bad = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, 1.0]])
    assert scores.judge(bad, torch.zeros(4), STEP)[2].tolist() == [True, False, False, False]


def test_many_sources_of_odd_sizes_do_not_overflow() -> None:
    sizes = (997, 991, 983, 977, 971, 967, 953, 947)
    objective = scores.Objective("ood", 1000, sizes)
    assert objective.balanced > 2**64
    worst = objective.result(scores.NO_HEAD, [0, *(2 * 1000 * size for size in sizes)])
    assert objective.achieved(0, worst.discordance) == 0
    better = objective.result(scores.NO_HEAD, [0, *(2 * 1000 * size for size in sizes[:-1]), 2 * 1000 * sizes[-1] - 1])
    assert better < worst


def test_the_loss_of_labels_is_that_of_torch_and_never_negative() -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 20
    labels = torch.arange(50) % 4
    assert torch.allclose(
        scores.losses(logits, labels), torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    )
    sure = torch.tensor([[400.0, 0.0], [0.0, 400.0], [torch.nan, 1.0]])
    assert scores.losses(sure, torch.tensor([0, 0, -1])).tolist() == pytest.approx([0, 400, 0])


@pytest.mark.parametrize("score", SCORES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_integers_only_grow_as_samples_come_in(score: scores.Score, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = answers(7, 0 if score == "acc" else 5, score)
    logits = torch.randint(4, (table.objective.samples, 3), generator=generator).double()
    wrong, confidence, _ = scores.judge(logits, table.samples.labels, STEP)
    order = table.objective.hardest_first(wrong, confidence)
    assert sorted(order) == list(range(table.objective.samples))
    bounds: list[tuple[object, ...]] = [table.results(np.array([0]))[0]]
    for number in order:
        table.record(np.array([0]), np.array([number]), scores.SampleAnswers(logits[[number]]))
        bounds.append(table.results(np.array([0]))[0])
    bounds = [one[:3] for one in bounds]
    assert bounds[0] == (False, 0, 0)
    assert bounds == sorted(bounds)  # including the loss, where values tie
    assert [one[2] for one in bounds] == sorted(one[2] for one in bounds)
    counts = table.objective.count(wrong[None], confidence[None])[0].tolist()
    assert bounds[-1][1] == table.objective.result(scores.NO_HEAD, counts).value
    expected = torch.nn.functional.cross_entropy(logits[:7], table.samples.labels[:7], reduction="sum")
    assert bounds[-1][2] == round(float(expected) * 1e6)


def test_hardest_samples_come_first() -> None:
    wrong = torch.tensor([False, True, False])
    assert scores.Objective("acc", 3).hardest_first(wrong, torch.tensor([1, 9, 5])).tolist() == [1, 0, 2]
    order = scores.Objective("ood", 3, (2,)).hardest_first(wrong, torch.tensor([1, 9, 5, 0, 6]))
    assert order.tolist() == [4, 0, 2, 3, 1]


def answers(inside: int, outside: int, score: scores.Score = "avg") -> scores.Tally:
    labels = torch.cat([torch.zeros(inside, dtype=torch.long), torch.full((outside,), -1)])
    samples = scores.CircuitData(
        (), labels, {"id_batches": inside, "ood": outside}, np.zeros((len(labels), 2), np.int64), ""
    )
    objective = scores.Objective(score, inside, (outside,) if outside else (), "likelihood")
    return scores.Tally(samples, objective, [Head(0, 0), Head(0, 1)], torch.float64)


def test_integers_beyond_forty_bits_are_right() -> None:
    """The pairs of 750,000 ID and as many OOD samples: large counts do not overflow into each other."""
    count = 750_000
    table = answers(count, count)
    table.confidence[0] = 5  # all tie: one unit per pair
    table.wrong[0] = True
    assert 2 * count**2 > 1 << 40
    assert table.results(np.array([0]))[0][-2:] == (count, count**2)
    table.confidence[0, :count] = 4  # every OOD sample is above every ID sample
    assert table.results(np.array([0]))[0].discordance == 2 * count**2


def test_cleared_answers_are_forgotten_with_what_was_not_finite() -> None:
    table, both = answers(2, 1), np.array([0, 1])
    table.record(np.array([0, 1]), np.array([1, 1]), scores.SampleAnswers(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])))
    assert table.results(both[:1])[0].errors == 1
    with pytest.raises(DataError, match=r"head 0\.1"):
        table.results(both)
    table.clear()
    assert [(one.errors, one.discordance) for one in table.results(both)] == [(0, 0), (0, 0)]
