"""Random member logits of an in-distribution set and OOD sets that are harder to be sure about."""

import torch
from torch import Tensor

MEMBERS, CLASSES = 3, 5


def labels(samples: int = 200, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CLASSES, (samples,), generator=generator)


def id_logits(targets: Tensor, strength: float = 3.0, seed: int = 1, members: int = MEMBERS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(members, len(targets), CLASSES, generator=generator)
    return noise + strength * torch.nn.functional.one_hot(targets, CLASSES)


def ood_logits(samples: int = 150, scale: float = 1.0, seed: int = 2, members: int = MEMBERS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(members, samples, CLASSES, generator=generator)


def suite() -> dict[str, dict[str, Tensor]]:
    return {
        "near": {"close": ood_logits(scale=1.6, seed=3)},
        "far": {"textures": ood_logits(100, seed=4), "digits": ood_logits(120, scale=0.6, seed=5)},
    }
