"""Synthetic OOD data made from ID data, for when no other is available: distorted images and scrambled texts.

Every sample is distorted in one of a few ways, which alternate so that all are equally frequent. The results have the
same shapes, dtypes and, roughly, value range as the ID data: a model can read them, and should be unsure about them.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .._utils import derive_seed
from ..batches import Batches, Inputs, first_epoch, iterate
from ..errors import DataError
from ..model.config import TextStemConfig
from ..model.ensemble import Ensemble
from ..preprocessing import TextPreprocessing

_CELLS = 4  # rows and columns of patches that an image is cut into
_BLUR = 1 / 8  # standard deviation of the blur, relative to the shorter side
_NOISE = 2.0  # standard deviation of the noise, relative to that of each channel
_REPLACED = 0.5  # share of the words of a text

Distortion = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # image [C, H, W], another image, generator
Draws = Iterator[tuple[int, torch.Generator]]  # for each sample its index and its own generator


def synthetic_ood(id_batches: Batches, *, seed: int = 0, model: Ensemble | None = None) -> list[tuple[Inputs]]:
    """Make OOD batches from ID batches: as many samples, with the same shapes and dtypes.

    Images `[B, C, H, W]`, in turn: patches shuffled, phases scrambled (the spectrum is kept), a strong blur, strong
    noise, and half of the patches taken from the previous image. Texts, token ids `[B, T]`, in turn: words shuffled,
    half of them replaced by others of the vocabulary, all replaced by words that occur in no text. Special tokens and
    padding are kept.

    The result depends only on the samples, their order and the seed, and is held in memory. For texts, `model` gives
    vocabulary and special tokens; without one, replacement words have ids up to the largest that occurs, and tokens
    that start or end every text are special.
    """
    with first_epoch(id_batches, derive_seed(seed, "synthetic")):
        numbered = [(index, inputs) for index, inputs, _ in iterate(id_batches, "id_batches", labelled=False)]
    tensors = [_main_input(inputs, index) for index, inputs in numbered]
    if len({ids.dim() for _, ids in tensors}) > 1:
        raise DataError("id_batches has images [B, C, H, W] in some batches and token ids [B, T] in others; give one")
    draws = ((number, torch.Generator().manual_seed(derive_seed(seed, number))) for number in itertools.count())
    batches = [inputs for _, inputs in numbered]
    originals = [ids for _, ids in tensors]
    if originals[0].dim() == 4:
        distorted = list(_distort_images(originals, draws))
    else:
        given = [{} if isinstance(inputs, Tensor) else inputs for inputs in batches]
        masks = [one.get("attention_mask", torch.ones_like(ids)) for one, ids in zip(given, originals, strict=True)]
        distorted = _distort_texts(originals, [mask.bool().cpu() for mask in masks], draws, model)
    parts = zip(batches, tensors, distorted, strict=True)
    return [(new if isinstance(inputs, Tensor) else {**inputs, name: new},) for inputs, (name, _), new in parts]


def _main_input(inputs: Inputs, index: int) -> tuple[str, Tensor]:
    """The images or token ids of a batch, with their key in it."""
    tensors: Mapping[str, Tensor] = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
    for name in ("inputs", "pixel_values", "input_ids"):
        tensor = tensors.get(name)
        if tensor is not None and (tensor.dim() == 4 or (tensor.dim() == 2 and not tensor.is_floating_point())):
            return name, tensor
    raise DataError(f"batch {index} of id_batches holds {[*tensors]}; give images [B, C, H, W] or token ids [B, T]")


# --- images ----------------------------------------------------------------------------------------------------------


def _distort_images(batches: Iterable[Tensor], draws: Draws) -> Iterator[Tensor]:
    """Yield batches `[B, C, H, W]` with every image distorted."""
    previous = torch.empty(0)
    for batch in batches:
        distorted = batch.cpu().clone()
        for image in distorted:  # [C, H, W]
            number, draw = next(draws)
            precise = image.to(torch.float64 if image.dtype == torch.float64 else torch.float32, copy=True)
            before = previous if previous.shape == precise.shape else precise.flip(-1)
            changed = IMAGE_DISTORTIONS[number % len(IMAGE_DISTORTIONS)](precise, before, draw)
            if not image.is_floating_point():
                limits = torch.iinfo(image.dtype)
                changed = changed.round().clamp(limits.min, limits.max)
            image.copy_(changed)
            previous = precise
        yield distorted.to(batch.device)


def shuffle_patches(image: Tensor, _: Tensor, draw: torch.Generator) -> Tensor:
    """Shuffle the patches of a four by four grid."""
    patches = _to_patches(image)
    return _joined(image, patches[torch.randperm(len(patches), generator=draw)])


def scramble_phases(image: Tensor, _: Tensor, draw: torch.Generator) -> Tensor:
    """Randomise the phases of an image; its mean and amplitude spectrum are kept."""
    noise = torch.randn(image.shape[-2:], generator=draw, dtype=image.dtype)
    turned = torch.fft.rfft2(noise).angle()  # phases of a real field, so that the result is real
    turned[0, 0] = 0.0
    spectrum = torch.fft.rfft2(image)
    return torch.fft.irfft2(spectrum * torch.polar(torch.ones_like(turned), turned), s=image.shape[-2:])


def blur(image: Tensor, _: Tensor, __: torch.Generator) -> Tensor:
    """Blur an image so strongly that only the coarsest shapes remain."""
    height, width = image.shape[-2:]
    squares = torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width) ** 2
    passed = torch.exp(-2 * (torch.pi * _BLUR * min(height, width)) ** 2 * squares).to(image.dtype)
    return torch.fft.irfft2(torch.fft.rfft2(image) * passed, s=image.shape[-2:])


def add_noise(image: Tensor, _: Tensor, draw: torch.Generator) -> Tensor:
    """Add noise of twice the standard deviation of each channel."""
    spread = image.std(dim=(1, 2), keepdim=True, correction=0)
    return image + _NOISE * spread * torch.randn(image.shape, generator=draw, dtype=image.dtype)


def paste(image: Tensor, other: Tensor, draw: torch.Generator) -> Tensor:
    """Replace half of the patches by those of another image."""
    patches, foreign = _to_patches(image), _to_patches(other)
    chosen = torch.randperm(len(patches), generator=draw)[: (len(patches) + 1) // 2]
    patches[chosen] = foreign[chosen]
    return _joined(image, patches)


IMAGE_DISTORTIONS: tuple[Distortion, ...] = (shuffle_patches, scramble_phases, blur, add_noise, paste)  # in turn


def _patches(image: Tensor) -> Tensor:
    """A view of a four by four grid of patches of equal size `[C, rows, h, columns, w]`, without leftover pixels."""
    height, width = image.shape[-2:]
    rows, columns = min(_CELLS, height), min(_CELLS, width)
    inner = image[:, : height // rows * rows, : width // columns * columns]
    return inner.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))


def _to_patches(image: Tensor) -> Tensor:
    """Cut into patches `[rows · columns, C, h, w]`."""
    return _patches(image).permute(1, 3, 0, 2, 4).flatten(0, 1)


def _joined(image: Tensor, patches: Tensor) -> Tensor:
    """Return the image with these patches in place of its own."""
    joined = image.clone()
    cells = _patches(joined)
    cells.copy_(patches.unflatten(0, (cells.shape[1], cells.shape[3])).permute(2, 0, 3, 1, 4))
    return joined


# --- texts -----------------------------------------------------------------------------------------------------------

TEXT_DISTORTIONS = ("shuffled", "replaced", "foreign")  # in turn


def _distort_texts(batches: list[Tensor], masks: list[Tensor], draws: Draws, model: Ensemble | None) -> list[Tensor]:
    """Return batches `[B, T]` with every text distorted."""
    distorted = [batch.cpu().clone() for batch in batches]
    samples = list(zip(itertools.chain(*distorted), itertools.chain(*masks), strict=True))  # [T] each, as views
    texts = [ids[is_token] for ids, is_token in samples]
    padding = [ids[~is_token] for ids, is_token in samples]
    special = _special(texts, model) | {int(token) for token in torch.cat(padding).unique()}
    size = 1 + max((int(text.max()) for text in texts if len(text)), default=0)
    if model is not None and isinstance(model.config.stem, TextStemConfig):
        size = model.config.stem.vocabulary
    usable = torch.ones(size, dtype=torch.bool)
    usable[[token for token in special if token < size]] = False
    unseen = usable.clone()
    for text in texts:
        unseen[text[text < size]] = False
    anything = usable.nonzero()[:, 0]
    if not len(anything):
        raise DataError(f"all {size} tokens of the vocabulary are special; none is left to replace words with")
    foreign = unseen.nonzero()[:, 0] if unseen.any() else anything
    fixed = torch.tensor(sorted(special), dtype=torch.long)
    for (ids, is_token), (number, draw) in zip(samples, draws, strict=False):
        way = TEXT_DISTORTIONS[number % len(TEXT_DISTORTIONS)]
        positions = (is_token & ~torch.isin(ids, fixed)).nonzero()[:, 0]  # of the words
        order = positions[torch.randperm(len(positions), generator=draw)]
        if way == "shuffled" and not torch.equal(ids[positions], ids[order]):
            ids[positions] = ids[order]
        else:  # also if shuffling left the text unchanged
            words = foreign if way == "foreign" else anything
            count = len(order) if way == "foreign" else math.ceil(_REPLACED * len(order))
            ids[order[:count]] = words[torch.randint(len(words), (count,), generator=draw)].to(ids.dtype)
    return [new.to(batch.device) for new, batch in zip(distorted, batches, strict=True)]


def _special(texts: list[Tensor], model: Ensemble | None) -> set[int]:
    """Special token ids: those the tokenizer declares, and a token that starts, or ends, every text."""
    special = set[int]()
    for end in (0, -1):
        tokens = {int(text[end]) for text in texts if len(text)}
        special |= tokens if len(tokens) == 1 and len(texts) > 1 else set()
    preprocessing = None if model is None else model.metadata.preprocessing
    if isinstance(preprocessing, TextPreprocessing) and preprocessing.tokenizer:
        added = json.loads(preprocessing.tokenizer).get("added_tokens") or ()
        special |= {preprocessing.pad_id, *(int(token["id"]) for token in added if token.get("special"))}
    return special
