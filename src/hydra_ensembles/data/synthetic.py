"""Synthetic OOD data made from ID data, for when no other is available: distorted images and scrambled texts.

Every sample is distorted in one of a few ways, which alternate so that all are equally frequent. The results have the
same shapes, dtypes and, roughly, value range as the ID data: a model can read them, and should be unsure about them.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._utils import derive_seed
from ..batches import Batches, Inputs, first_epoch, iterate
from ..errors import DataError

_CELLS = 4  # rows and columns of patches that an image is cut into
_BLUR = 1 / 8  # standard deviation of the blur, relative to the shorter side
_NOISE = 2.0  # standard deviation of the noise, relative to that of each channel
_REPLACED = 0.5  # share of the words of a text

Distortion = Callable[[Tensor, torch.Generator], Tensor]  # image [C, H, W], generator


def synthetic_ood(id_batches: Batches, *, seed: int = 0) -> list[tuple[Inputs]]:
    """Make OOD batches from ID batches: as many samples, with the same shapes and dtypes.

    Images `[B, C, H, W]`, in turn: patches shuffled, phases scrambled (the spectrum is kept), a strong blur, strong
    noise. Texts, token ids `[B, T]`, in turn: words shuffled, half of them replaced by words of any of the texts. The
    first and the last token of a text, and padding, are kept.

    The result depends only on the samples, their order and the seed, and is held in memory.
    """
    with first_epoch(id_batches, derive_seed(seed, "synthetic")):
        batches = [inputs for _, inputs, _ in iterate(id_batches, "id_batches", labelled=False)]
    named = list(map(_main_input, batches))
    inner = [_words(inputs, ids) for inputs, (_, ids) in zip(batches, named, strict=True)]
    words = torch.cat([ids[places].flatten() for (_, ids), places in zip(named, inner, strict=True)]).cpu()
    draws = ((number, torch.Generator().manual_seed(derive_seed(seed, number))) for number in itertools.count())
    made: list[tuple[Inputs]] = []
    for inputs, (name, given), places in zip(batches, named, inner, strict=True):
        rows = given.cpu().clone()
        for row, where, (number, draw) in zip(rows, places.cpu(), draws, strict=False):
            if rows.dim() == 4:
                _distort(row, number, draw)
            else:
                _scramble(row, where.nonzero()[:, 0], words, number, draw)
        new = rows.to(given.device)
        made.append((new if isinstance(inputs, Tensor) else {**inputs, name: new},))
    return made


def _main_input(inputs: Inputs) -> tuple[str, Tensor]:
    """The images or token ids of a batch, with their key in it."""
    tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
    for name in ("inputs", "pixel_values", "input_ids"):
        tensor = tensors.get(name)
        if tensor is not None and (tensor.dim() == 4 or (tensor.dim() == 2 and not tensor.is_floating_point())):
            return name, tensor
    raise DataError(f"id_batches hold {[*tensors]}; give images [B, C, H, W] or token ids [B, T]")


# --- texts -----------------------------------------------------------------------------------------------------------


def _words(inputs: Inputs, ids: Tensor) -> Tensor:
    """Which tokens `[B, T]` are words: neither padding, nor the first or the last of their text; none of images."""
    if ids.dim() == 4:
        return torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    tokens = torch.ones_like(ids) if mask is None else (mask != 0).long()
    places = tokens.cumsum(dim=1)
    return (tokens > 0) & (places > 1) & (places < places[:, -1:])


def _scramble(ids: Tensor, places: Tensor, words: Tensor, number: int, draw: torch.Generator) -> None:
    """Shuffle the words of a text `[T]`, or replace half of them: every second text, and one that shuffling leaves."""
    order = places[torch.randperm(len(places), generator=draw)]
    if number % 2 == 0 and not torch.equal(ids[places], ids[order]):
        ids[places] = ids[order]
        return
    chosen = order[: math.ceil(_REPLACED * len(order))]
    ids[chosen] = words[torch.randint(max(len(words), 1), (len(chosen),), generator=draw)]


# --- images ----------------------------------------------------------------------------------------------------------


def _distort(image: Tensor, number: int, draw: torch.Generator) -> None:
    """Distort an image `[C, H, W]` in one of the ways."""
    precise = image.to(torch.float64 if image.dtype == torch.float64 else torch.float32, copy=True)
    changed = IMAGE_DISTORTIONS[number % len(IMAGE_DISTORTIONS)](precise, draw)
    if not image.is_floating_point():
        limits = torch.iinfo(image.dtype)
        changed = changed.round().clamp(limits.min, limits.max)
    image.copy_(changed)


def shuffle_patches(image: Tensor, draw: torch.Generator) -> Tensor:
    """Shuffle the patches of a four by four grid; pixels that are left over stay."""
    height, width = image.shape[-2:]
    rows, columns = min(_CELLS, height), min(_CELLS, width)
    shuffled = image.clone()
    inner = shuffled[:, : height // rows * rows, : width // columns * columns]
    cells = inner.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))  # a view [C, rows, h, columns, w]
    patches = cells.permute(1, 3, 0, 2, 4).flatten(0, 1)  # [rows · columns, C, h, w]
    patches = patches[torch.randperm(len(patches), generator=draw)].unflatten(0, (rows, columns))
    cells.copy_(patches.permute(2, 0, 3, 1, 4))
    return shuffled


def scramble_phases(image: Tensor, draw: torch.Generator) -> Tensor:
    """Randomise the phases of an image; its mean and amplitude spectrum are kept."""
    noise = torch.randn(image.shape[-2:], generator=draw, dtype=image.dtype)
    turned = torch.fft.rfft2(noise).angle()  # phases of a real field, so that the result is real
    turned[0, 0] = 0.0
    spectrum = torch.fft.rfft2(image)
    return torch.fft.irfft2(spectrum * torch.polar(torch.ones_like(turned), turned), s=image.shape[-2:])


def blur(image: Tensor, _: torch.Generator) -> Tensor:
    """Blur an image so strongly that only the coarsest shapes remain."""
    height, width = image.shape[-2:]
    squares = torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width) ** 2
    passed = torch.exp(-2 * (torch.pi * _BLUR * min(height, width)) ** 2 * squares).to(image.dtype)
    return torch.fft.irfft2(torch.fft.rfft2(image) * passed, s=image.shape[-2:])


def add_noise(image: Tensor, draw: torch.Generator) -> Tensor:
    """Add noise of twice the standard deviation of each channel."""
    spread = image.std(dim=(1, 2), keepdim=True, correction=0)
    return image + _NOISE * spread * torch.randn(image.shape, generator=draw, dtype=image.dtype)


IMAGE_DISTORTIONS: tuple[Distortion, ...] = (shuffle_patches, scramble_phases, blur, add_noise)  # in turn
