"""A small ViT trained on a small task, so that some of its heads matter and others do not."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig
from hydra_ensembles.model.ensemble import Ensemble

CLASSES, LAYERS, HEADS = 6, 6, 8
_SIZE = 16


def pictures(count: int, seed: int, first_pattern: int = 0, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Noisy, randomly shifted pictures of fixed patterns, and the pattern of each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.Generator().manual_seed(99)
    patterns = F.interpolate(torch.randn(2 * CLASSES, 3, 4, 4, generator=shapes), size=_SIZE, mode="bilinear")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = patterns[first_pattern + labels]
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack([torch.roll(image, shift, (1, 2)) for image, shift in zip(images, shifts, strict=True)])
    return images + noise * torch.randn(images.shape, generator=generator), labels


def id_pictures(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return pictures(count, seed)


def ood_pictures(count: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Pictures of patterns the model was not trained on."""
    return pictures(count, seed, first_pattern=CLASSES)


@cache
def trained_vit(steps: int = 40) -> Ensemble:
    """The trained model, in float32. Callers must not modify it."""
    encoder = EncoderConfig(width=32, layers=LAYERS, heads=HEADS, head_dim=4, mlp_width=64)
    stem = PatchStemConfig(patch_size=(4, 4), grid=(4, 4))
    config = EnsembleConfig(stem, encoder, ReadoutConfig(num_classes=CLASSES), encoder.all_heads())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Ensemble(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 2 and "norm" not in name:
                    parameter.normal_(std=0.1)
    images, labels = pictures(1024, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20) * (1 - step / steps)
        chosen = torch.randint(len(images), (32,), generator=generator)
        loss = F.cross_entropy(model(images[chosen])[0], labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()
