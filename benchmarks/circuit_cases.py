"""Models with data for the benchmark of circuit extraction."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, all_heads
from hydra_ensembles.model.ensemble import Ensemble

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model with data."""

    name: str
    model: Ensemble
    id_batches: Batches
    ood_batches: Batches
    layers: tuple[int, ...] | None = None

    @property
    def candidates(self) -> list[tuple[int, int]]:
        """Layer and index of the heads that may be removed."""
        layers = range(self.model.num_layers) if self.layers is None else self.layers
        return [(layer, head) for layer in layers for head in self.model.heads[0][layer]]


def load_batches(path: Path, device: str, limit: int | None) -> Batches:
    """A data file as one batch on the device."""
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    inputs, labels = tensors["inputs"][:limit].float(), tensors["labels"][:limit].long()
    return [(inputs.to(device), labels.to(device))]


def random_case(
    name: str, encoder: EncoderConfig, stem: PatchStemConfig, samples: int, options: argparse.Namespace
) -> Case:
    """A model with random weights and, as labels, its own predictions; OOD pictures have more contrast."""
    generator = torch.Generator().manual_seed(options.seed)
    config = EnsembleConfig(stem, encoder, ReadoutConfig(num_classes=10), all_heads(encoder))
    model = Ensemble(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 2:
                fan_in = parameter.shape[-1]
                scale = 1.0 if "classifier" in key or "position" in key else 1.5 / fan_in**0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model = model.to(options.device, torch.float32).eval()
    height, width = stem.image_size
    shape = (samples, stem.channels, height, width)
    inside = torch.randn(shape, generator=generator)
    outside = 2 * torch.randn(shape, generator=generator)
    inside, outside = inside.to(options.device), outside.to(options.device)
    with torch.no_grad():
        labels = torch.cat([model(part)[0].argmax(-1) for part in inside.split(64)])
    return Case(name, model, [(inside, labels)], [(outside, torch.zeros_like(labels))])


def tiny_case(options: argparse.Namespace) -> Case:
    encoder = EncoderConfig(width=64, layers=4, heads=4, head_dim=16, mlp_width=128)
    stem = PatchStemConfig(patch_size=(4, 4), grid=(4, 4))
    return random_case("tiny", encoder, stem, options.samples or 64, options)


def scaling_cases(options: argparse.Namespace) -> list[Case]:
    """ViT-B/16 shape: more samples with all heads, and more heads with the same samples."""
    encoder = EncoderConfig(width=768, layers=12, heads=12, head_dim=64, mlp_width=3072)
    stem = PatchStemConfig(patch_size=(16, 16), grid=(options.image_size // 16,) * 2)
    most = options.samples or 256
    shape = f"ViT-B/16 at {options.image_size} px"
    cases = []
    for samples in (most // 8, most // 4, most // 2, most):
        made = random_case(f"{shape}, 12 layers, {samples} + {samples} samples", encoder, stem, samples, options)
        cases.append(made)
        if samples == most // 4:
            for count in (3, 6):
                layers = tuple(range(12 - count, 12))
                name = f"{shape}, last {count} layers, {samples} + {samples} samples"
                cases.append(Case(name, made.model, made.id_batches, made.ood_batches, layers))
    return cases


def cases_of(options: argparse.Namespace) -> list[Case]:
    if options.tiny:
        return [tiny_case(options)]
    if options.scaling:
        return scaling_cases(options)
    model = Ensemble.from_pretrained(options.model).to(options.device, torch.float32)
    id_batches = load_batches(options.id, options.device, options.samples)
    ood_batches = load_batches(options.ood, options.device, options.samples)
    return [Case(options.name or options.model.name, model, id_batches, ood_batches)]
