"""Inputs of a model: read, checked and moved to it once, before anything is computed.

Nothing that could change an answer is ignored silently. Values are only checked on the CPU, where data come from:
tensors on a GPU are not read back, and compiled code does not check values either.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .._utils import unwrapped
from ..batches import READ
from ..errors import DataError
from ..settings import nearest
from .config import EnsembleConfig, PatchStemConfig, TextStemConfig

Given = Tensor | Mapping[str, Tensor]
Arguments = tuple[Tensor, Tensor | None, Tensor | None]  # images or token ids, attention mask, segments

IGNORED = (
    *("labels", "label", "label_ids", "idx", "length"),
    *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "num_truncated_tokens"),
)
"""Entries that processors and data sets add to inputs and that do not affect answers."""


class Prepared(dict[str, Tensor]):
    """Inputs by name that `Ensemble.prepare` has read, checked and moved: the model takes them as they are."""

    @classmethod
    def of(cls, kind: Literal["image", "text"], arguments: Arguments) -> "Prepared":
        """Name the arguments of a model of this kind."""
        return cls({name: one for name, one in zip(READ[kind], arguments, strict=False) if one is not None})

    @property
    def arguments(self) -> Arguments:
        """Images or token ids, attention mask, segments."""
        main, *_ = self.values()
        return main, self.get("attention_mask"), self.get("token_type_ids")


def read_inputs(config: EnsembleConfig, inputs: Given | None, named: Mapping[str, Any]) -> Arguments:
    """Find the tensors that a model reads among its arguments, and check them against its configuration."""
    names = READ[config.kind]
    given: dict[str, Any] = {names[0]: inputs} if isinstance(inputs, Tensor) else dict(inputs or {})
    named = {name: value for name, value in named.items() if value is not None}
    given |= named
    for name, value in given.items():
        harmless = name not in named and (not isinstance(value, Tensor) or value.dim() <= 1)  # names, texts, numbers
        if name not in names and name not in IGNORED and not harmless:
            near = nearest(name, names)
            advice = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise DataError(f"{name!r} is not read; {config.kind} models read {', '.join(names)}: {advice}")
    if given.get(names[0]) is None:
        raise DataError(f"expected a tensor or a mapping with {names[0]!r}, got {sorted(map(str, given)) or 'nothing'}")
    main, *extra = (None if given.get(name) is None else _tensor(name, given[name]) for name in names)
    assert main is not None
    if isinstance(config.stem, PatchStemConfig):
        require_images(config.stem, main)
        return main, None, None
    return _checked_tokens(config.stem, main, *extra)


def _tensor(name: str, value: Any) -> Tensor:
    """An argument as a tensor, also of arrays and nested lists."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be made a tensor ({error}); tokenizers: padding=True") from error


def require_images(stem: PatchStemConfig, images: Tensor) -> None:
    """Refuse images that this stem cannot cut into patches."""
    patch = stem.patch_size
    if not images.is_floating_point():
        raise DataError(f"images are {images.dtype}; give normalised floats, or PIL images")
    if images.dim() != 4 or images.shape[1] != stem.channels:
        raise DataError(f"expected images of shape [batch, {stem.channels}, height, width], got {list(images.shape)}")
    height, width = images.shape[2:]
    if height % patch[0] or width % patch[1] or not height or not width:
        raise DataError(f"images are {height}x{width}; give sides that the patch size {patch} divides")


def _checked_tokens(stem: TextStemConfig, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Arguments:
    """Token ids and segments as int32 or int64, and a mask of 0 and 1, checked against each other and the stem."""
    if ids.dim() != 2 or not _is_whole(ids) or ids.dtype == torch.bool:
        raise DataError(f"expected token ids [batch, tokens] as integers, got {ids.dtype} {list(ids.shape)}")
    if not 0 < ids.shape[1] <= stem.max_tokens:
        raise DataError(f"got {ids.shape[1]} tokens, the model takes 1 to {stem.max_tokens}; truncate them")
    for name, tensor in (("attention_mask", mask), ("token_type_ids, the segments,", segments)):
        if tensor is not None and tensor.shape != ids.shape:
            raise DataError(f"{name} must be like the token ids, {list(ids.shape)}; got {list(tensor.shape)}")
    ids = _in_range(ids, stem.vocabulary, "token ids", "the vocabulary; use the tokenizer of this model")
    if segments is not None:
        segments = _in_range(segments, max(stem.segments, 1), "token_type_ids", "the segments this model knows")
    return ids, None if mask is None else _checked_mask(mask), segments


def packed(arguments: Arguments) -> Arguments:
    """Texts with the real tokens of each row first, in their order: left padding becomes right padding."""
    if arguments[1] is None:
        return arguments
    real = arguments[1].bool()
    hidden = real.sum(1, keepdim=True) + (~real).cumsum(1)
    places = torch.where(real, real.cumsum(1), hidden) - 1  # [B, T], where each token goes
    ids, mask, segments = (None if one is None else torch.empty_like(one).scatter(1, places, one) for one in arguments)
    assert ids is not None
    return ids, mask, segments


def _checked_mask(mask: Tensor) -> Tensor:
    """Check a mask of 1 (token) and 0 (padding); an additive mask (0 and -inf) would mean the opposite."""
    advice = "give 1 for tokens and 0 for padding, and at least one token a row; of an additive mask, `mask == 0`"
    if not _visible(mask):
        if not _is_whole(mask):
            raise DataError(f"attention_mask is {mask.dtype}, whose values are not checked on a GPU; {advice}, as bool")
        return mask
    ones = mask == 1
    if not bool((ones | (mask == 0)).all()) or not bool(ones.any(1).all()):
        raise DataError(f"attention_mask has values other than 0 and 1, or a row without a token; {advice}")
    return mask if _is_whole(mask) else ones


def _in_range(numbers: Tensor, end: int, name: str, of: str) -> Tensor:
    """Numbers as int32 or int64; refused, if visible, when one is negative or at least `end`."""
    numbers = numbers if numbers.dtype in (torch.int32, torch.int64) else numbers.long()
    if _visible(numbers) and numbers.numel():
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= end:
            raise DataError(f"{name} run from {low} to {high}; valid are 0 to {end - 1}, {of}")
    return numbers


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _visible(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without synchronisation."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def model_call(model: Callable[..., Any], inputs: Given) -> Callable[[], Any]:
    """A call of any library's model: a mapping goes in as keywords if a module takes them, without what is ignored."""
    if not isinstance(inputs, Mapping) or not isinstance(model, nn.Module):
        return partial(model, inputs)
    names = inspect.signature(unwrapped(model).forward).parameters
    taken = {name: tensor for name, tensor in inputs.items() if name in names}
    extra = inputs.keys() - taken.keys() - {*IGNORED, "token_type_ids"}
    return partial(model, **taken) if taken and not extra else partial(model, inputs)
