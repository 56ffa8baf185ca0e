"""Tiny ensembles for images and texts, and batches for them."""

from dataclasses import replace

import torch
from torch import Tensor

from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.preprocessing import ImagePreprocessing
from random_ensembles import small

CLASSES = 4
HEADS = (((0, 1), (1, 2)), ((0, 2), (0, 1, 2)), ((1,), (2,)))  # [member][layer]
NAMES = ("ant", "bee", "cat <b>", "dog & fox")


def tiny_ensemble(kind: str = "image") -> Ensemble:
    blocks = {"width": 12, "heads": 3, "head_dim": 4, "mlp_width": 16}
    config = small(kind, CLASSES, sharing=Sharing(stem=True, mlp=True), text={"vocabulary": 30}, **blocks)
    preprocessing = None if kind == "text" else ImagePreprocessing((8, 8))
    metadata = Metadata("made here", NAMES, preprocessing, history=("made", "tested"))
    ensemble = Ensemble(replace(config, heads=HEADS), metadata)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + (parameter == 1.0))
    return ensemble.eval()


def image_batches(sizes: tuple[int, ...] = (8, 8, 8, 3), seed: int = 0, scale: float = 1.0) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (scale * torch.randn(size, 3, 8, 8, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for size in sizes
    ]


def text_batches(sizes: tuple[int, ...] = (6, 5), seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(30, (size, 7), generator=generator),
            "attention_mask": (torch.arange(7)[None] < torch.randint(3, 8, (size, 1), generator=generator)).long(),
            "labels": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in sizes
    ]
