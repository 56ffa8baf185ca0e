"""Preprocessing of other libraries: read from a tokenizer or image processor, and proven by running it on examples."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from .._utils import library, warn
from ..errors import ConversionError
from ..model.config import EnsembleConfig, PatchStemConfig, TextStemConfig
from ..model.metadata import Metadata
from ..preprocessing import ImagePreprocessing, Interpolation, TextCleaning, TextPreprocessing
from .core import pair, qualified_name

_ACCEPTED = {
    "text": "a fast tokenizer of transformers, a tokenizer of open_clip, or a TextPreprocessing",
    "image": "an image processor of transformers, the transforms of torchvision's weights, a Compose of Resize, "
    "CenterCrop, ToTensor and Normalize, or an ImagePreprocessing",
}
_TEXTS = ["What 1 processor makes of a Text, it is asked.", "Nothing else"]
SPARE_WORDS = 1024  # vocabularies are padded to multiples of 64, 128 or so
_LEVELS = 1.0  # allowed mean difference of pixels, of 255: libraries resize slightly differently
# Numbers of PIL, and names that differ from ours; torchvision's default is None.
_RESAMPLING: dict[Any, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_RESAMPLING |= {"nearest-exact": "nearest", None: "bilinear"}


def with_processor(metadata: Metadata, processor: Any, config: EnsembleConfig, model: Any) -> Metadata:
    """Set preprocessing and its origin in the metadata of a model from a processor, if one was given."""
    if processor is None:
        return metadata
    part = part_for(isinstance(config.stem, PatchStemConfig), processor) or processor
    if hasattr(part, "backend_tokenizer") and isinstance(config.stem, TextStemConfig):
        _warn_of_another_tokenizer(part, config, getattr(model, "config", None))
        if config.encoder.causal and getattr(part, "padding_side", "right") != "right":
            part = deepcopy(part)  # decoders answer alike whatever the side
            part.padding_side = "right"
    origin = f"the {type(part).__name__} that was given"
    return replace(metadata, preprocessing=read_processor(part, config.stem), preprocessing_from=origin)


def read_processor(processor: Any, stem: PatchStemConfig | TextStemConfig) -> ImagePreprocessing | TextPreprocessing:
    """Read the preprocessing that turns raw inputs into tensors for a stem; raise if it does not fit the stem."""
    if isinstance(stem, TextStemConfig):
        text = _read_tokenizer(processor, stem)
        if text.max_length > stem.max_tokens:
            asked = f"texts of {text.max_length} tokens were requested"
            raise ConversionError(f"{asked}, but there are positions for {stem.max_tokens}; lower max_length")
        return text
    image = _read_image_processor(processor)
    if len(image.mean) == 1:  # one value for all channels
        image = replace(image, mean=image.mean * stem.channels, std=image.std * stem.channels)
    if len(image.mean) != stem.channels:
        raise ConversionError(f"images of {len(image.mean)} channels were requested, the model reads {stem.channels}")
    if any(side % patch for side, patch in zip(image.size, stem.patch_size, strict=True)):
        raise ConversionError(
            f"images of {image.size} were requested, but patches of {stem.patch_size} do not fill them"
        )
    return image


def with_images_of(transform: Any, metadata: Metadata, origin: str, **exact: Any) -> Metadata:
    """Add the preprocessing of a library's own transform, or why it cannot be reproduced."""
    try:
        read = replace(_read_image_processor(transform), **exact)
        return replace(metadata, preprocessing=read, preprocessing_from=origin)
    except ConversionError as error:
        return replace(metadata, preprocessing_from=str(error))


def part_for(images: bool, processor: Any) -> Any:
    """Return what reads images, or texts, of one processor, one of both kinds, or several; None if nothing does."""
    for one in processor if isinstance(processor, list | tuple) else [processor]:
        if hasattr(one, "image_processor") and hasattr(one, "tokenizer"):
            return one.image_processor if images else one.tokenizer
        theirs = any(hasattr(one, name) for name in ("image_mean", "crop_size", "transforms"))
        if images == (theirs or isinstance(one, ImagePreprocessing)):
            return one
    return None


def size_of_images(processor: Any) -> tuple[int, int] | None:
    """Return the image height and width given by a processor; None if it does not."""
    part = part_for(True, processor)
    return None if part is None else _read_image_processor(part).size


def _unread(processor: Any, kind: str, problem: str = "is not read as preprocessing") -> ConversionError:
    return ConversionError(f"a {qualified_name(processor)} {problem}; for {kind}s give {_ACCEPTED[kind]}")


# --- tokenizers ----------------------------------------------------------------------------------------------


def _warn_of_another_tokenizer(tokenizer: Any, config: EnsembleConfig, theirs: Any) -> None:
    """Warn of a tokenizer whose words or special tokens are not the model's (CLIP's own configurations are wrong)."""
    stem: Any = config.stem
    words = max(tokenizer.get_vocab().values(), default=-1) + 1
    signs = [f"it has {words} words, the model {stem.vocabulary}"] if stem.vocabulary - words > SPARE_WORDS else []
    for name in ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"):
        ours, given = getattr(theirs, name, None), getattr(tokenizer, name, None)
        if stem.norm and None not in (ours, given) and ours != given:
            signs.append(f"its {name} is {given}, in the model's configuration {ours}")
    if signs and config.readout.pool == "last":  # a decoder: its configuration is right
        raise ConversionError(f"the tokenizer is that of another vocabulary: {signs[0]}; give the model's own")
    if signs:
        warn(f"the tokenizer may be that of another model: {'; '.join(signs)}; give the one the model was trained with")


def _read_tokenizer(processor: Any, stem: TextStemConfig) -> TextPreprocessing:
    if isinstance(processor, TextPreprocessing):
        return processor
    name = qualified_name(processor)
    if name == "open_clip.tokenizer.SimpleTokenizer":
        return read_open_clip_tokenizer(processor)
    if name == "open_clip.tokenizer.HFTokenizer":  # cleans texts and pads all to one length
        length, cleaning = int(processor.context_length), _cleaning(processor)
        settings: Any = {"max_length": length, "pad_to_max": True, "attention_mask": False, "segments": False}
        read = replace(_read_fast_tokenizer(processor.tokenizer, stem), cleaning=cleaning, **settings)
        return _proven(processor, read, {"input_ids": processor(_TEXTS)})
    if hasattr(processor, "backend_tokenizer"):
        read = _read_fast_tokenizer(processor, stem)
        settings = {"padding": True, "truncation": True, "max_length": read.max_length, "return_tensors": "pt"}
        return _proven(processor, read, processor(_TEXTS, **settings))
    raise _unread(processor, "text")


def _proven(processor: Any, read: TextPreprocessing, theirs: Mapping[str, Any]) -> TextPreprocessing:
    """Return the preprocessing if it makes the same tokens of examples as the processor it was read from."""
    if any(name in theirs and theirs[name].tolist() != tensor.tolist() for name, tensor in read(_TEXTS).items()):
        raise _unread(processor, "text", "produces different tokens than its tokenizer.json says, by rules of its own")
    return read


def _read_fast_tokenizer(processor: Any, stem: TextStemConfig) -> TextPreprocessing:
    if processor.pad_token is None:
        raise ConversionError("the tokenizer has no padding token; set tokenizer.pad_token first")
    if getattr(processor, "padding_side", "right") != "right" or getattr(processor, "split_special_tokens", False):
        raise ConversionError("the tokenizer must pad on the right and keep special tokens whole: set its padding_side")
    highest = max(processor.get_vocab().values(), default=0)
    if highest >= stem.vocabulary:
        problem = f"the tokenizer gives ids up to {highest}, the model has {stem.vocabulary} word embeddings"
        raise ConversionError(f"{problem}; give its own tokenizer, or resize its embeddings first")
    copied = library("tokenizers", extra="text").Tokenizer.from_str(processor.backend_tokenizer.to_str())
    copied.no_padding()  # settings left by its last call
    copied.no_truncation()
    most = min(int(processor.model_max_length), stem.max_tokens)
    if getattr(processor, "truncation_side", "right") == "left":
        copied.enable_truncation(most, direction="left")  # stored in the tokenizer file
    return TextPreprocessing(
        max_length=most,
        pad_id=int(processor.pad_token_id),
        pad_token=str(processor.pad_token),
        attention_mask="attention_mask" in processor.model_input_names,
        segments="token_type_ids" in processor.model_input_names and stem.segments > 0,  # DistilBERT reads none
        tokenizer=copied.to_str(),
    )


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def _cleaning(tokenizer: Any) -> TextCleaning:
    """Return how a tokenizer of open_clip cleans texts: see `clean_text`."""
    name: Any = tokenizer.clean_fn.__name__.removeprefix("_clean_")
    if name not in get_args(TextCleaning):
        raise ConversionError(f"this tokenizer cleans with {name}; supported are {list(get_args(TextCleaning))}")
    return name


def read_open_clip_tokenizer(tokenizer: Any) -> TextPreprocessing:
    """Read open_clip's `SimpleTokenizer`.

    The normalizers (Unicode normalisation, white space, lower case), padding and truncation in the tokenizer file are
    for users of the file without this library; `TextPreprocessing` cleans texts more thoroughly first, and lower-cases
    a Greek sigma at the end of a word as Python does.
    """
    if tokenizer.reduction_fn is not None:
        raise ConversionError("this tokenizer shortens texts in a way of its own (reduction_fn); set it to None first")
    tokenizers = library("tokenizers", extra="text")
    cleaning, length = _cleaning(tokenizer), int(tokenizer.context_length)
    vocabulary = dict(tokenizer.encoder)
    names = {index: token for token, index in vocabulary.items()}
    start, end, *others = (names[index] for index in tokenizer.all_special_ids)
    model = tokenizers.models.BPE(vocabulary, list(tokenizer.bpe_ranks), end_of_word_suffix="</w>")
    built = tokenizers.Tokenizer(model)
    norms, splits = tokenizers.normalizers, tokenizers.pre_tokenizers
    steps = [norms.NFC(), norms.Replace(tokenizers.Regex(r"\s+"), " "), norms.Strip()]
    built.normalizer = norms.Sequence(steps if cleaning == "whitespace" else [*steps, norms.Lowercase()])
    words = splits.Split(tokenizers.Regex(_WORDS), behavior="removed", invert=True)
    built.pre_tokenizer = splits.Sequence([words, splits.ByteLevel(add_prefix_space=False, use_regex=False)])
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B {end}",
        special_tokens=[(token, vocabulary[token]) for token in (start, end)],
    )
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(token, normalized=True) for token in (start, end, *others)])
    built.enable_truncation(length)
    built.enable_padding(pad_id=0, pad_token=names[0], length=length)
    settings: Any = {"pad_token": names[0], "pad_to_max": True, "attention_mask": False, "cleaning": cleaning}
    return TextPreprocessing(max_length=length, tokenizer=built.to_str(), **settings)


# --- images --------------------------------------------------------------------------------------------------

# Steps of a `Compose` besides resizing, cropping and normalising: they convert to RGB or to a tensor, as ours does.
_CHANGING_NOTHING = {"ToTensor", "MaybeToTensor", "PILToTensor", "ToImage", "ConvertImageDtype", "ToDtype", "RGB"}
_CHANGING_NOTHING |= {"MaybeConvertMode", "_convert_to_rgb"}


def _read_image_processor(processor: Any) -> ImagePreprocessing:
    """Read an image processor, and compare the pixels that it and what was read make of two pictures."""
    if isinstance(processor, ImagePreprocessing):
        return processor
    if hasattr(processor, "image_mean") and hasattr(processor, "size"):
        read = _read_transformers_images(processor)
    elif hasattr(processor, "resize_size"):  # of torchvision's weights
        resized, crop = ((int(size[0]), int(size[-1])) for size in (processor.resize_size, processor.crop_size))
        squash = len(processor.resize_size) == 2
        scale = {"mean": _channels(processor.mean), "std": _channels(processor.std)}
        read = _image_preprocessing(resized, crop, squash, processor.interpolation, **scale)
    else:
        read = _read_composed(processor)
    for size in ((2 * read.size[0] + 1, 3 * read.size[1]), (81, 53)):  # larger than what is read, and smaller
        noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        picture = library("PIL.Image", extra="data").fromarray(noise).convert("L" if len(read.mean) == 1 else "RGB")
        named = hasattr(processor, "image_mean")
        theirs = processor(picture, return_tensors="pt")["pixel_values"] if named else processor(picture)[None]
        ours, levels = read(picture), 255 * torch.tensor(read.std).view(-1, 1, 1)
        if ours.shape != theirs.shape or ((ours - theirs.to(ours)) * levels).abs().mean() > _LEVELS:
            raise _unread(processor, "image", "produces different pixels than its settings say, by rules of its own")
    return read


def _read_composed(processor: Any) -> ImagePreprocessing:
    """Read a `Compose` of torchvision, as timm and open_clip create for evaluation."""
    transforms = getattr(processor, "transforms", ())
    names = [getattr(step, "__name__", type(step).__name__).removesuffix("KeepRatio") for step in transforms]
    steps: dict[str, Any] = dict(zip(names, transforms, strict=True))
    resize, crop, scale = (steps.pop(name, None) for name in ("Resize", "CenterCrop", "Normalize"))
    sides = np.atleast_1d(getattr(resize, "size", ())).tolist()
    squash = len(sides) == 2 and type(resize).__name__ == "Resize"
    unread = [name for name in steps if name not in _CHANGING_NOTHING]
    if unread or resize is None or not (crop or squash):
        raise _unread(processor, "image", f"with the steps {names} is not read as preprocessing")
    resized = (int(sides[0]), int(sides[-1]))
    cropped = resized if crop is None else (int(crop.size[0]), int(crop.size[-1]))
    mean, std = ((0.0,), (1.0,)) if scale is None else (_channels(scale.mean), _channels(scale.std))
    return _image_preprocessing(resized, cropped, squash, resize.interpolation, mean=mean, std=std)


def _read_transformers_images(processor: Any) -> ImagePreprocessing:
    size = _named_sides(processor.size)
    crop = _named_sides(processor.crop_size) if getattr(processor, "do_center_crop", False) else {}
    squash = size.keys() == {"height", "width"}
    if not squash and (size.keys() != {"shortest_edge"} or not crop):
        raise ConversionError(
            f"processor.size is {size} and the centre crop {crop or 'off'}, so images come out in different sizes; "
            "give height and width, or shortest_edge with do_center_crop and a crop_size"
        )
    resized = (size["height"], size["width"]) if squash else pair(size["shortest_edge"])
    return _image_preprocessing(
        resized,
        (crop["height"], crop["width"]) if crop else resized,
        squash,
        processor.resample,
        mean=_channels(processor.image_mean),
        std=_channels(processor.image_std),
        crop_corner="floor",
    )


def _image_preprocessing(
    resized: tuple[int, int], crop: tuple[int, int], squash: bool, filter_: Any, **settings: Any
) -> ImagePreprocessing:
    """Resize to `resized` (its short side, unless `squash`) by a filter of PIL or torchvision, then crop the centre."""
    value = getattr(filter_, "value", filter_)
    name: Any = _RESAMPLING.get(value, value)
    if name not in get_args(Interpolation):
        raise ConversionError(f"the interpolation {filter_!r} is not supported; use one of {get_args(Interpolation)}")
    fraction = min(side / before for side, before in zip(crop, resized, strict=True))
    if fraction > 1 or any(int(side / fraction + 1e-6) != before for side, before in zip(crop, resized, strict=True)):
        raise ConversionError(f"images are resized to {resized}, cropped to {crop}; give a smaller crop of that shape")
    mode: Any = "squash" if squash else "shortest"
    return ImagePreprocessing(crop, crop_fraction=fraction, resize_mode=mode, interpolation=name, **settings)


def _named_sides(size: Any) -> dict[str, int]:
    """Return the sides in a size of transformers, which is a dictionary or an object."""
    sides: Mapping[str, Any] = size if isinstance(size, Mapping) else getattr(size, "__dict__", {})
    return {name: int(value) for name, value in sides.items() if value is not None}


def _channels(values: Any) -> tuple[float, ...]:
    """Return a mean or standard deviation per channel, for pixels in [0, 1]."""
    return tuple(map(float, [values] * 3 if isinstance(values, int | float) else values))
