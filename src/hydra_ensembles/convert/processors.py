"""Preprocessing read off the objects that libraries use for it: tokenizers, image processors, transforms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .._utils import require
from ..errors import ConversionError
from ..model.config import PatchStemConfig, TextStemConfig
from ..preprocessing import ImagePreprocessing, Interpolation, TextPreprocessing
from .core import qualified_name

_ACCEPTED = {
    "text": "a fast tokenizer of transformers, a tokenizers.Tokenizer, a path to a tokenizer.json, a TextPreprocessing",
    "image": "an image processor of transformers, the transforms of torchvision's weights, an ImagePreprocessing",
}
_PAD_TOKENS = ("[PAD]", "<pad>")
_PIL_RESAMPLING: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_SIZE_KEYS = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width", "min_pixels", "max_pixels")


def read_processor(processor: Any, stem: PatchStemConfig | TextStemConfig) -> ImagePreprocessing | TextPreprocessing:
    """Our description of what turns raw inputs into the tensors a stem takes.

    Args:
        processor: A fast tokenizer or an image processor of transformers (or a processor that holds both), a
            `tokenizers.Tokenizer`, a path to a `tokenizer.json`, the transforms of torchvision's weights, or
            one of our own descriptions.
        stem: The stem the tensors are for; it bounds the number of tokens and the vocabulary.

    Raises:
        ConversionError: The object is of another kind, or does something our description cannot say.
    """
    part = getattr(processor, "tokenizer" if isinstance(stem, TextStemConfig) else "image_processor", None)
    processor = processor if part is None or isinstance(processor, TextPreprocessing) else part
    if isinstance(stem, TextStemConfig):
        text = processor if isinstance(processor, TextPreprocessing) else _read_tokenizer(processor, stem)
        if text.max_length > stem.max_tokens:
            raise ConversionError(
                f"texts of {text.max_length} tokens were asked for, the position embedding covers {stem.max_tokens}; "
                "lower max_length"
            )
        return text
    image = processor if isinstance(processor, ImagePreprocessing) else _read_image_processor(processor)
    if any(side % patch for side, patch in zip(image.size, stem.patch_size, strict=True)):
        raise ConversionError(
            f"images of {image.size[0]}x{image.size[1]} were asked for, which the patch size "
            f"{stem.patch_size[0]}x{stem.patch_size[1]} does not divide"
        )
    return image


# --- text ------------------------------------------------------------------------------------------------


def _read_tokenizer(processor: Any, stem: TextStemConfig) -> TextPreprocessing:
    if hasattr(processor, "backend_tokenizer"):
        return _read_fast_tokenizer(processor, stem)
    if isinstance(processor, str | Path):
        processor = _tokenizer_from_file(Path(processor))
    if type(processor).__module__.partition(".")[0] == "tokenizers" and hasattr(processor, "get_vocab"):
        return _read_plain_tokenizer(processor, stem)
    if hasattr(processor, "model_max_length"):
        raise ConversionError(
            f"{qualified_name(processor)} is a slow tokenizer, which needs transformers to run; give its fast "
            "counterpart: transformers.AutoTokenizer.from_pretrained(...), or a tokenizers.Tokenizer"
        )
    raise _unsupported(processor, "text")


def _read_fast_tokenizer(processor: Any, stem: TextStemConfig) -> TextPreprocessing:
    for attribute, supported in (("padding_side", "right"), ("truncation_side", "right")):
        _require_setting(f"tokenizer.{attribute}", getattr(processor, attribute, supported), supported)
    _require_setting("tokenizer.split_special_tokens", getattr(processor, "split_special_tokens", False), False)
    if processor.pad_token is None:
        raise ConversionError("the tokenizer has no padding token; set tokenizer.pad_token first")
    return TextPreprocessing(
        max_length=min(int(processor.model_max_length), stem.max_tokens),
        pad_id=int(processor.pad_token_id),
        pad_token=str(processor.pad_token),
        attention_mask="attention_mask" in processor.model_input_names,
        segments="token_type_ids" in processor.model_input_names,
        tokenizer=_content(processor.backend_tokenizer, stem),
    )


def _read_plain_tokenizer(tokenizer: Any, stem: TextStemConfig) -> TextPreprocessing:
    """A tokenizer of the `tokenizers` library: padding token and length as it is set up, else by convention."""
    padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
    _require_setting("the tokenizer's padding direction", padding.get("direction", "right"), "right")
    _require_setting("the tokenizer's truncation direction", truncation.get("direction", "right"), "right")
    _require_setting(
        "the tokenizer's truncation strategy", truncation.get("strategy", "longest_first"), "longest_first"
    )
    known = [token for token in _PAD_TOKENS if tokenizer.token_to_id(token) is not None]
    token = padding.get("pad_token") or next(iter(known), None)
    if token is None:
        raise ConversionError(
            f"the tokenizer has no padding set up and knows none of {list(_PAD_TOKENS)}; "
            "call tokenizer.enable_padding(pad_id=..., pad_token=...) first"
        )
    return TextPreprocessing(
        max_length=min(int(truncation.get("max_length", stem.max_tokens)), stem.max_tokens),
        pad_id=int(padding["pad_id"] if padding else tokenizer.token_to_id(token)),
        pad_token=token,
        segments=stem.segments > 1,
        tokenizer=_content(tokenizer, stem),
    )


def _tokenizer_from_file(path: Path) -> Any:
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConversionError(f"there is no file {str(path)!r}; give the path of a tokenizer.json")
    try:
        return require("tokenizers", extra="text").Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ConversionError(f"{str(path)!r} is not a tokenizer.json that tokenizers can read: {error}") from error


def _content(tokenizer: Any, stem: TextStemConfig) -> str:
    """The `tokenizer.json` of a tokenizer, without the padding and truncation its last call left behind."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= stem.vocabulary:
        raise ConversionError(
            f"the tokenizer gives ids up to {highest}, the model has {stem.vocabulary} word embeddings; give the "
            "tokenizer of this model, or resize the embeddings of the model before converting it"
        )
    copied = require("tokenizers", extra="text").Tokenizer.from_str(tokenizer.to_str())
    copied.no_padding()
    copied.no_truncation()
    return cast(str, copied.to_str())


# --- images ----------------------------------------------------------------------------------------------


def _read_image_processor(processor: Any) -> ImagePreprocessing:
    if hasattr(processor, "image_mean") and hasattr(processor, "size"):
        return _read_transformers_images(processor)
    if all(hasattr(processor, name) for name in ("resize_size", "crop_size", "mean", "std", "interpolation")):
        resized, crop = (_sides(size) for size in (processor.resize_size, processor.crop_size))
        mean, std = _channels(processor.mean), _channels(processor.std)
        squash = len(processor.resize_size) == 2
        return _image_preprocessing(resized, crop, squash, mean=mean, std=std, filter_=processor.interpolation)
    raise _unsupported(processor, "image")


def _read_transformers_images(processor: Any) -> ImagePreprocessing:
    for attribute in ("do_pad", "crop_pct"):
        _require_setting(f"processor.{attribute}", getattr(processor, attribute, None) or False, False)
    _require_setting("processor.do_resize", processor.do_resize, True)
    size = _named_sides(processor.size)
    if size.keys() not in ({"height", "width"}, {"shortest_edge"}):
        raise ConversionError(f"processor.size is {size}; supported are height and width, or shortest_edge alone")
    squash, resized = "height" in size, _sides(list(size.values()))
    crop = _named_sides(processor.crop_size) if getattr(processor, "do_center_crop", False) else {}
    if crop.keys() != {"height", "width"} and (crop or not squash):
        raise ConversionError(
            f"processor.size is {size} and the centre crop {crop or 'off'}, so that images come out in different "
            "sizes; set do_center_crop and a crop_size with height and width"
        )
    scale = 255.0 * float(processor.rescale_factor) if processor.do_rescale else 255.0  # of pixels in [0, 1]
    scale = 1.0 if abs(scale - 1.0) < 1e-6 else scale
    return _image_preprocessing(
        resized,
        (crop["height"], crop["width"]) if crop else resized,
        squash,
        mean=_channels(processor.image_mean if processor.do_normalize else 0.0, scale),
        std=_channels(processor.image_std if processor.do_normalize else 1.0, scale),
        filter_=processor.resample,
        crop_corner="floor",
    )


def _image_preprocessing(
    resized: tuple[int, int], crop: tuple[int, int], squash: bool, filter_: Any, **settings: Any
) -> ImagePreprocessing:
    """Resize to `resized` (its short side, unless `squash`), then crop the centre."""
    if crop[0] * resized[1] != crop[1] * resized[0] or crop[0] > resized[0]:
        raise ConversionError(
            f"images are resized to {resized[0]}x{resized[1]} and cropped to {crop[0]}x{crop[1]}; supported is a crop "
            "of the same shape that is not larger"
        )
    return ImagePreprocessing(
        size=crop,
        crop_fraction=crop[0] / resized[0],
        resize_mode="squash" if squash else "shortest",
        interpolation=_interpolation(filter_),
        **settings,
    )


def _sides(size: Sequence[int]) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    return int(size[0]), int(size[-1])


def _named_sides(size: Any) -> dict[str, int]:
    """The sides that a size of transformers names, whether it is a dictionary or an object; the height comes first."""
    named: Mapping[str, Any] = (
        size if isinstance(size, Mapping) else {name: getattr(size, name, None) for name in _SIZE_KEYS}
    )
    order = [*_SIZE_KEYS, *(name for name in named if name not in _SIZE_KEYS)]  # what is not known is refused later
    return {name: int(named[name]) for name in order if named.get(name) is not None}


def _channels(values: Any, scale: float = 1.0) -> tuple[float, ...]:
    """A mean or deviation per channel, for pixels in [0, 1]."""
    several = [values] * 3 if isinstance(values, int | float) else list(values)
    return tuple(float(value) / scale for value in several)


def _interpolation(method: Any) -> Interpolation:
    """The name of a resampling filter of PIL (a number) or torchvision (an enum with a name as value)."""
    name = getattr(method, "value", method)
    if name is None:
        return "bilinear"
    if isinstance(name, int) and name in _PIL_RESAMPLING:
        return _PIL_RESAMPLING[name]
    name = "nearest" if name == "nearest-exact" else name
    if name not in _PIL_RESAMPLING.values():
        raise ConversionError(
            f"the interpolation {method!r} is not supported; use one of {[*_PIL_RESAMPLING.values()]}"
        )
    return cast(Interpolation, name)


# --- errors ----------------------------------------------------------------------------------------------


def _require_setting(name: str, value: object, supported: object) -> None:
    if value != supported:
        raise ConversionError(f"{name} is {value!r}; only {supported!r} is supported, set it so first")


def _unsupported(processor: Any, kind: str) -> ConversionError:
    return ConversionError(
        f"a {qualified_name(processor)} cannot be read as preprocessing for {kind} input; give {_ACCEPTED[kind]}"
    )
