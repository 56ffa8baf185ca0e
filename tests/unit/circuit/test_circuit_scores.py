"""Scores as integers, where they are large or nearly tied; exact == naive proves the rest."""

import torch

from hydra_ensembles.circuit import scores

STEP = scores.grid_step(torch.float64)


def test_confidence_orders_like_the_maximum_softmax_probability() -> None:
    def confidences(logits: torch.Tensor) -> torch.Tensor:
        return scores.judge(logits.double(), torch.zeros(len(logits)), STEP)[1]

    logits = 4 * torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, probability = confidences(logits), logits.softmax(-1).amax(-1)
    assert torch.equal(found.argsort(), probability.argsort())
    sure = torch.tensor([[50.0, 0.0], [60.0, 0.0], [70.0, 0.0]])
    assert sure.double().softmax(-1).amax(-1).unique().numel() == 1  # all round to 1, but their confidences differ
    assert confidences(sure).diff().gt(0).all()


def test_the_first_of_tied_classes_is_the_answer() -> None:
    logits = torch.tensor([[0.0, 2.0 - 1e-14, 2.0], [0.0, 2.0, 2.0], [2.0, 0.0, 2.1]], dtype=torch.float64)
    assert scores.judge(logits, torch.tensor([1, 2, 2]), STEP)[0].tolist() == [False, True, False]


def test_many_sources_of_odd_sizes_do_not_overflow() -> None:
    sizes = (997, 991, 983, 977, 971, 967, 953, 947)
    objective = scores.Objective("ood", 1000, sizes)
    assert objective.balanced > 2**64
    worst = objective.result(scores.NO_HEAD, [0, *(2 * 1000 * size for size in sizes)])
    assert objective.achieved(0, worst.discordance) == 0
    better = objective.result(scores.NO_HEAD, [0, *(2 * 1000 * size for size in sizes[:-1]), 2 * 1000 * sizes[-1] - 1])
    assert better < worst
