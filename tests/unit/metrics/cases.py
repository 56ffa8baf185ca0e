"""Random inputs for the metrics, including difficult ones."""

import torch
from torch import Tensor


def updated(metric, *inputs) -> float:
    metric.update(*inputs)
    return float(metric.compute())


def random_scores(seed: int, low: int = 1, high: int = 60) -> tuple[Tensor, Tensor]:
    """ID and OOD scores in [0, 1]: smooth, heavily tied, constant, or half precision, by seed."""
    g = torch.Generator().manual_seed(seed)
    n, m = (int(torch.randint(low, high, (), generator=g)) for _ in range(2))
    id_scores = torch.rand(n, generator=g)
    ood_scores = (torch.rand(m, generator=g) + 0.4 * torch.rand((), generator=g)).clamp(max=1)
    match seed % 5:
        case 1:  # ties within and between the sets
            id_scores, ood_scores = (id_scores * 6).round() / 8, (ood_scores * 6).round() / 8
        case 2:
            id_scores, ood_scores = id_scores.half(), ood_scores.half()
        case 3:
            id_scores, ood_scores = torch.full((n,), 0.25), torch.full((m,), 0.25 if seed % 2 else 0.75)
        case 4:  # near-perfect detection, so that 95 % recall falls among few ID samples
            ood_scores = 0.6 + 0.4 * torch.rand(m, generator=g)
            id_scores = 0.7 * id_scores
    return id_scores, ood_scores


def random_probs(seed: int, max_samples: int = 80, max_classes: int = 12) -> tuple[Tensor, Tensor]:
    """Probabilities of varying sharpness, and labels that are mostly right."""
    g = torch.Generator().manual_seed(seed)
    samples = int(torch.randint(1, max_samples, (), generator=g))
    classes = int(torch.randint(2, max_classes, (), generator=g))
    sharpness = 10 * torch.rand((), generator=g)
    probs = (torch.randn(samples, classes, generator=g) * sharpness).softmax(-1)
    labels = torch.where(
        torch.rand(samples, generator=g) < 0.7, probs.argmax(-1), torch.randint(0, classes, (samples,), generator=g)
    )
    return probs, labels


def random_member_probs(seed: int, min_members: int = 2) -> Tensor:
    """Member probabilities `[M, B, C]`; members are similar but not equal."""
    g = torch.Generator().manual_seed(seed)
    members, samples, classes = (
        int(torch.randint(low, high, (), generator=g)) for low, high in ((min_members, 9), (1, 40), (2, 12))
    )
    common = torch.randn(1, samples, classes, generator=g)
    return (3 * common + 2 * torch.randn(members, samples, classes, generator=g)).softmax(-1)
