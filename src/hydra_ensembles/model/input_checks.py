"""Inputs of a model: names, shapes and ranges, checked before anything is computed.

Nothing that could change an answer is ignored silently. Values are only checked on the CPU, where data come from:
tensors on a GPU are not read back, and compiled code does not check values either.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._utils import unwrapped, warn
from ..batches import READ, looks_like_input, tensors_of
from ..errors import ConfigError, DataError
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..schema import nearest
from .config import EnsembleConfig, PatchStemConfig, TextStemConfig

Given = Tensor | Mapping[str, Tensor]
Arguments = tuple[Tensor, Tensor | None, Tensor | None]  # images or token ids, mask, segments

IGNORED_INPUTS = (
    *("labels", "label", "label_ids", "idx", "length"),
    *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "num_truncated_tokens"),
)
"""Entries that processors and data sets add to inputs and that do not affect answers. A mapping may also hold what no
model could take for an input: texts, file names, objects, and one number for each sample."""


def collect_inputs(
    kind: Literal["image", "text"], inputs: Any, attention_mask: Any, token_type_ids: Any, named: Mapping[str, Any]
) -> Arguments:
    """Collect the tensors that a model of this kind reads; refused if one is missing, given twice, or not read."""
    main, *extra = READ[kind]
    if isinstance(inputs, Tensor) and not named and attention_mask is None and token_type_ids is None:
        return inputs, None, None
    arguments = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, **named}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    unknown = [name for name in named if name not in (main, *extra, *IGNORED_INPUTS)]
    if unknown:
        raise DataError(_not_read(unknown[0], kind))
    mapping = inputs if isinstance(inputs, Mapping) else {} if inputs is None else {main: inputs}
    twice = sorted(name for name in arguments if mapping.get(name) is not None)
    if twice:
        raise DataError(f"{twice} are given twice, in the inputs and as arguments; give each once")
    tensors = tensors_of({**mapping, **arguments}, "the inputs")
    if main not in tensors:
        received = sorted(map(str, {**mapping, **arguments}))
        raise DataError(f"expected a tensor or a mapping with {main!r}, got {received or 'nothing'}")
    for name, tensor in tensors.items():
        if name not in (main, *extra) and not _is_ignored(name, tensor):
            raise DataError(_not_read(name, kind))
    mask, segments = (tensors.get(name) if name in extra else None for name in ("attention_mask", "token_type_ids"))
    return tensors[main], mask, segments


def model_call(model: Callable[..., Any], inputs: Given) -> Callable[[], Any]:
    """A call of any library's model, with keywords if a module takes them; others that are no inputs are dropped."""
    if not isinstance(inputs, Mapping) or not isinstance(model, nn.Module):
        return partial(model, inputs)
    names = inspect.signature(unwrapped(model).forward).parameters
    taken = {name: tensor for name, tensor in inputs.items() if name in names}
    extra = ((name, tensor) for name, tensor in inputs.items() if name not in (*names, "token_type_ids"))
    plain = all(_is_ignored(name, tensor) for name, tensor in extra)
    return partial(model, **taken) if taken and plain else partial(model, inputs)


def _is_ignored(name: str, tensor: Tensor) -> bool:
    """Whether a mapping may contain this tensor although no model reads it, because it is not an input."""
    return name in IGNORED_INPUTS or (tensor.dim() <= 1 and not looks_like_input(name))


def _not_read(name: str, kind: Literal["image", "text"]) -> str:
    near = nearest(name, READ[kind])
    advice = f"did you mean {near[0]!r}?" if near else "leave it out"
    return f"the inputs hold {name!r}, which is not read; {kind} models read {', '.join(READ[kind])}: {advice}"


def check_inputs(config: EnsembleConfig, arguments: Arguments, preprocessing: object) -> Arguments:
    """Check the arguments against the configuration of a model; `preprocessing` is the model's own, if any."""
    for tensor in arguments:
        if tensor is not None and tensor.layout is not torch.strided:
            raise DataError(f"the inputs hold a tensor of layout {tensor.layout}; give dense ones: tensor.to_dense()")
    if isinstance(config.stem, PatchStemConfig):
        require_images(config.stem, arguments[0])
        return arguments[0], None, None
    ids, mask, segments = _check_tokens(config.stem, *arguments)
    warn_of_unmasked_padding(config.stem, ids, mask, preprocessing)
    if config.readout.pool == "cls":
        require_first_tokens(mask, config.encoder.window)
    return ids, mask, segments


def require_images(config: PatchStemConfig, images: Tensor) -> None:
    """Refuse images that this stem cannot cut into patches."""
    channels, patch = config.channels, config.patch_size
    if not images.is_floating_point():
        raise DataError(f"images are {images.dtype}; give normalised floats, or PIL images to `predict`")
    if images.dim() != 4 or images.shape[1] != channels:
        raise DataError(f"expected images of shape [batch, {channels}, height, width], got {list(images.shape)}")
    height, width = images.shape[2:]
    if height % patch[0] or width % patch[1] or not height or not width:
        raise DataError(f"images are {height}x{width}; give sides that the patch size {patch} divides")


def warn_of_raw_pixels(images: Tensor, preprocessing: object) -> None:
    """Warn, if values are visible, of images that are not normalised: from 0 to 255, or from 0 to 1 by mistake.

    A few pixels of the first images are checked; `preprocessing` is the model's, if any. Bright images may also
    lie between 0 and 1 once normalised. So values in that range count as raw only if undoing the normalisation does not
    give multiples of 1/255, and if they are such multiples themselves or (resized as floats) span most of the range.
    """
    pixels = images[:8, :, :: max(1, images.shape[2] // 32), :: max(1, images.shape[3] // 32)]
    if not _visible(images) or not pixels.numel():
        return
    low, high = (float(bound) for bound in pixels.aminmax())
    up_to_255, up_to_1 = low >= 0 and high > 50, False
    if isinstance(preprocessing, ImagePreprocessing):
        scales = list(zip(preprocessing.mean, preprocessing.std, strict=True))
        black, white = min(-mean / std for mean, std in scales), max((1 - mean) / std for mean, std in scales)
        up_to_255 = up_to_255 and high > 2 * white
        most_of_range = black < -0.5 and high - low > (0.6 if len(pixels) == 8 else 0.9)
        undone = [part * std + mean for part, (mean, std) in zip(pixels.unbind(1), scales, strict=False)]
        up_to_1 = (
            0 <= low < 0.5 < high <= 1 and (most_of_range or _in_steps(pixels)) and not all(map(_in_steps, undone))
        )
    if up_to_255 or up_to_1:
        found = f"images have values from {low:.3g} to {high:.3g}, like pixels that are not normalised"
        warn(f"{found}, and are used unchanged: give PIL images, or apply the model's preprocessing")


def _in_steps(pixels: Tensor) -> bool:
    """Whether all values are multiples of 1/255."""
    steps = 255 * pixels.float()
    return bool(((steps - steps.round()).abs() < 0.01).all())


def warn_of_odd_images(config: EnsembleConfig, images: Tensor, preprocessing: object) -> None:
    """Warn of raw pixels, and of an image size for which position embeddings have to be resampled."""
    warn_of_raw_pixels(images, preprocessing)
    if not isinstance(config.stem, PatchStemConfig) or config.encoder.rotary is not None:  # rotary: any size works
        return
    size = images.shape[2], images.shape[3]
    sizes = [config.stem.image_size, *([preprocessing.size] if isinstance(preprocessing, ImagePreprocessing) else [])]
    if size not in sizes and not torch.compiler.is_compiling():
        usual = f"{sizes[0][0]}x{sizes[0][1]}"
        warn(f"images are {size[0]}x{size[1]}, but positions, and any calibration, are for {usual}: answers change")


def _check_tokens(config: TextStemConfig, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Arguments:
    """Token ids and segments as int32 or int64, and a mask of 0 and 1, checked against each other and the stem."""
    if ids.dim() != 2 or not _is_integer_or_bool(ids) or ids.dtype == torch.bool:
        raise DataError(f"expected token ids [batch, tokens] as integers, got {ids.dtype} {list(ids.shape)}")
    if not 0 < ids.shape[1] <= config.max_tokens:
        raise DataError(f"got {ids.shape[1]} tokens, the model takes 1 to {config.max_tokens}; truncate them")
    for name, tensor in (("attention_mask", mask), ("token_type_ids, the segments,", segments)):
        if tensor is not None and (tensor.shape != ids.shape or tensor.is_meta != ids.is_meta):
            raise DataError(f"{name} must be like the token ids, {list(ids.shape)}; got {list(tensor.shape)}")
    ids = _in_range(ids, config.vocabulary, "token ids", "the vocabulary; use the tokenizer of this model")
    if segments is not None:
        if not _is_integer_or_bool(segments):
            raise DataError(f"token_type_ids must be integers, got {segments.dtype}")
        segments = _in_range(segments, max(config.segments, 1), "token_type_ids", "the segments this model knows")
    return ids, None if mask is None else _check_mask(mask), segments


def _check_mask(mask: Tensor) -> Tensor:
    """Check a mask of 1 (token) and 0 (padding); an additive mask (0 and -inf) would mean the opposite."""
    advice = (
        "give 1 for tokens and 0 for padding, with at least one token per row; for an additive mask use `mask == 0`"
    )
    if _visible(mask):
        ones = mask == 1
        if not bool((ones | (mask == 0)).all()) or not bool(ones.any(1).all()):
            problem = f"attention_mask ({mask.dtype}) has values other than 0 and 1, or a row without a token"
            raise DataError(f"{problem}; {advice}")
        return mask if _is_integer_or_bool(mask) else ones
    if not _is_integer_or_bool(mask):
        raise DataError(f"attention_mask is {mask.dtype}, whose values are not checked on a GPU; {advice}, as bool")
    return mask


def warn_of_unmasked_padding(config: TextStemConfig, ids: Tensor, mask: Tensor | None, preprocessing: object) -> None:
    """Warn, if values are visible, of texts padded at an end that have no mask, though the tokenizer gives one.

    Without a tokenizer, the padding id is only known if positions count from it (RoBERTa).
    """
    padding = config.positions_after
    if isinstance(preprocessing, TextPreprocessing):
        padding = preprocessing.pad_id if preprocessing.attention_mask else None
    if mask is None and padding is not None and _visible(ids) and bool((ids[:, [0, -1]] == padding).any()):
        problem = f"some texts begin or end with the padding id {padding}, but there is no attention_mask"
        warn(f"{problem}, so padding is read as tokens; pass all that the tokenizer returns, model(**batch)")


def require_first_tokens(mask: Tensor | None, window: int | None) -> None:
    """Warn, if values are visible, of texts whose first token is padding, for models that read only that token.

    With local attention (`window`) such a token may see no other token, so its answer would be meaningless: refused.
    """
    if mask is None or not mask.shape[1] or not _visible(mask) or bool(mask[:, 0].all()):
        return
    problem = "some texts begin with padding, and this model takes its answer from the first token"
    advice = "pad on the right (tokenizer.padding_side = 'right')"
    if window is not None:
        raise DataError(f"{problem}, which attends only to its neighbours; {advice}")
    warn(f"{problem}, as the original does: {advice}, unless it was trained on such texts")


def _in_range(numbers: Tensor, end: int, name: str, of: str) -> Tensor:
    """Numbers as int32 or int64; refused, if visible, when one is negative or at least `end`."""
    numbers = numbers if numbers.dtype in (torch.int32, torch.int64) else numbers.long()
    if _visible(numbers) and numbers.numel():
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < 0 or high >= end:
            raise DataError(f"{name} run from {low} to {high}; valid are 0 to {end - 1}, {of}")
    return numbers


def _is_integer_or_bool(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _visible(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without synchronisation."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def require_values(parameter: Tensor | None) -> None:
    """Refuse a model without values: `parameter`, any of its parameters, is on the `meta` device."""
    if parameter is not None and parameter.is_meta:
        raise ConfigError("the model on the device 'meta' has no values; load some: load_state_dict(..., assign=True)")


def check_device(tensors: Arguments, parameter: Tensor | None) -> None:
    """Refuse inputs on another device than the model, or of an incompatible dtype; `parameter` is any of its."""
    if parameter is None:  # replicas of `nn.DataParallel` have no parameters
        return
    for tensor in tensors:
        if tensor is not None and tensor.device != parameter.device:
            raise DataError(f"inputs are on {tensor.device}, weights on {parameter.device}; move one, or use `predict`")
    main = tensors[0]
    if main.is_floating_point() and main.dtype != parameter.dtype and not torch.is_autocast_enabled(main.device.type):
        raise DataError(f"inputs are {main.dtype}, the model {parameter.dtype}; convert one or use `predict`")
