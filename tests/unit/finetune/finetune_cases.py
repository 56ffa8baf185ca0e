"""A tiny ensemble and data it can learn, for the tests of fine-tuning."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.data.batching import Batches
from hydra_ensembles.data.batching import batches as data_batches
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    Sharing,
    TextStemConfig,
    all_heads,
)
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata

CLASSES = 3
LAYERS = 2


def tiny(
    seed: int = 0,
    members: int = 1,
    sharing: Sharing | None = None,
    trunk: int = 0,
    classes: int = CLASSES,
    dropout: float = 0.0,
) -> Ensemble:
    encoder = EncoderConfig(
        width=16,
        layers=LAYERS,
        heads=2,
        head_dim=8,
        mlp_width=24,
        projection_dropout=dropout,
        activation_dropout=dropout,
        output_dropout=dropout,
    )
    config = EnsembleConfig(
        stem=PatchStemConfig(patch_size=(4, 4), grid=(2, 2)),
        encoder=encoder,
        readout=ReadoutConfig(num_classes=classes),
        heads=all_heads(encoder, members),
        sharing=sharing or Sharing(),
        trunk=trunk,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ensemble = Ensemble(config, Metadata(history=("made",), calibration=Calibration(), metrics={"old": 1.0}))
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return ensemble.eval()


def tiny_text(seed: int = 0) -> Ensemble:
    encoder = EncoderConfig(width=16, layers=2, heads=2, head_dim=8, mlp_width=24, norm_first=False)
    config = EnsembleConfig(
        stem=TextStemConfig(vocabulary=20, positions=8, embedding_width=16),
        encoder=encoder,
        readout=ReadoutConfig(num_classes=2, hidden="tanh", norm="none"),
        heads=all_heads(encoder),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Ensemble(config).eval()


def samples(count: int = 48, seed: int = 1, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Images whose class is the brightest channel."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) * noise
    images[torch.arange(count), labels] += 1.0
    return images, labels


def batches(count: int = 48, size: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    images, labels = samples(count, seed)
    return list(zip(images.split(size), labels.split(size), strict=True))


def shuffled(count: int = 48, size: int = 8, seed: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*samples(count, seed)), batch_size=size, shuffle=True)


def own_batches(count: int = 48, size: int = 8, seed: int = 1) -> Batches:
    """The same samples as `shuffled`, in the library's own batches."""
    return data_batches(list(zip(*samples(count, seed), strict=True)), torch.stack, size, shuffle=True)


def same(one: Ensemble, other: Ensemble) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
