"""Bad inputs of one batch, images and texts, given to every entry point that runs a model.

Every value states whether it must be refused or answered, and what the right answer is.
"""

from collections import UserDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hydra_ensembles.errors import HydraError

from .counting import Row, alike, count, drawn
from .small import LONGEST, VOCABULARY, hydra, model, samples

CASES = 2000

ENTRIES = (
    "predict",
    "predict of a hydra",
    "predict of an optimized hydra",
    "forward",
    "forward of a hydra",
    "features",
)
Value = tuple[str, Callable[[], Any], Callable[[], Any] | None]  # expectation, the value, an equivalent valid value
Case = tuple[str, str, str]  # kind of model, entry point, and the name of the value


def run(cases: int, seed: int) -> list[Row]:
    every = [(kind, *name) for kind in ("image", "text") for name in deeds(kind)]
    return [count("inputs of a model", check, drawn(every, cases, seed))]


def check(case: Case) -> str:
    """Give a value to an entry point, and compare the answer with that to its equivalent."""
    kind, entry, name = case
    expectation, make, plain = deeds(kind)[entry, name]
    ask = runners(kind)[entry]
    try:
        found = ask(make())
    except HydraError as error:
        if expectation == "same":
            raise AssertionError(f"refused, although it is valid: {error}") from error
        raise
    return "other" if expectation == "refused" else "same" if alike(found, ask((plain or make)())) else "other"


@cache
def good_inputs(kind: str) -> Any:
    return samples(kind, 4, seed=3)[0]


@cache
def runners(kind: str) -> dict[str, Callable[[Any], Any]]:
    """Entry points for one batch of inputs; those called predict take raw inputs and refuse NaN."""
    single, several = model(kind), hydra(kind)
    predict = [
        lambda inputs, one=one: one.predict(inputs).member_logits for one in (single, several, several.optimize())
    ]
    forward = [torch.no_grad()(run) for run in (single, several, single.features)]
    return dict(zip(ENTRIES, (*predict, *forward), strict=True))


@cache
def deeds(kind: str) -> dict[tuple[str, str], Value]:
    """Every value with every entry point; raw inputs only where accepted."""
    tensors, raw, values = (image_tensors(), raw_images(), image_values()) if kind == "image" else (*text_tables(), {})
    every = {**tensors, **raw, **values}
    return {
        (entry, name): value
        for entry in ENTRIES
        for name, value in (every if entry.startswith("predict") else tensors).items()
    }


def raw(make: Callable[[], Any], expectation: str = "refused", plain: Callable[[], Any] | None = None) -> Value:
    return expectation, make, plain


def image_tensors() -> dict[str, Value]:
    """Images as tensors, arrays and mappings."""
    x = good_inputs("image")

    def given(make: Callable[[Tensor], Any], expectation: str = "refused", plain: Any = None) -> Value:
        return expectation, lambda: make(x.clone()), lambda: x.clone() if plain is None else plain(x.clone())

    twice = partial(torch.repeat_interleave, repeats=2, dim=3)
    return {
        "None": given(lambda x: None),
        "a number": given(lambda x: 3),
        "an array": given(lambda x: x.numpy(), "either"),
        "whole numbers": given(lambda x: (x * 50).long(), "either", lambda x: (x * 50).long().float()),
        "bytes": given(lambda x: (x * 50).clamp(0, 255).to(torch.uint8), "refused"),
        "one image without a batch": given(lambda x: x[0]),
        "one channel": given(lambda x: x[:, :1]),
        "a side that patches do not divide": given(lambda x: x[..., :-1]),
        "no images": given(lambda x: x[:0], "either", lambda x: x[:0]),
        "an array in a mapping": given(lambda x: {"pixel_values": x.numpy()}, "either"),
        "whole": given(lambda x: x, "same"),
        "a mapping": given(lambda x: {"pixel_values": x}, "same"),
        "labels beside": given(lambda x: {"pixel_values": x, "labels": torch.zeros(4, dtype=torch.long)}, "same"),
        "larger images": given(twice, "same", lambda x: {"pixel_values": twice(x)}),
    }


def image_values() -> dict[str, Value]:
    """Values that can only be refused by checking the answer, and other floating dtypes."""
    x = good_inputs("image")

    def with_value(number: float) -> Tensor:
        changed = x.clone()
        changed[2, 1, 3, 3] = number
        return changed

    odd = {name: ("refused", partial(with_value, float(name)), None) for name in ("nan", "inf", "-inf")}
    types = {
        f"in {dtype}": ("same", lambda dtype=dtype: x.to(dtype), lambda dtype=dtype: x.to(dtype).float())
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
    }
    return {**odd, **types, "enormous": ("either", partial(with_value, 1e30), None)}


def dark(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), 9)


def raw_images() -> dict[str, Value]:
    """PIL images, and objects that are not images."""
    pixels = np.random.default_rng(0).integers(0, 255, (11, 13, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    modes = {
        f"a picture of mode {mode}": raw(
            lambda mode=mode: picture.convert(mode), "same", lambda mode=mode: [picture.convert(mode).convert("RGB")]
        )
        for mode in ("1", "L", "P", "CMYK", "YCbCr", "RGBA")
    }
    return {
        **modes,
        "a picture without rows": raw(lambda: dark(5, 0)),
        "a picture": raw(lambda: picture, "same", lambda: [picture]),
        "a very wide picture": raw(lambda: dark(2000, 1)),
        "no picture": raw(list),
        "None among pictures": raw(lambda: [picture, None]),
        "a text among pictures": raw(lambda: [picture, "cat.png"]),
        "a path": raw(lambda: "cat.png"),
    }


def text_tables() -> tuple[dict[str, Value], dict[str, Value]]:
    """Token ids, masks and segments; and raw texts."""
    good = good_inputs("text")
    ids, mask, segments = good["input_ids"], good["attention_mask"], good["token_type_ids"]

    def changed(expectation: str = "refused", plain: dict[str, Any] | None = None, **changes: Any) -> Value:
        def make() -> dict[str, Any]:
            merged = {**good, **{name: value() if callable(value) else value for name, value in changes.items()}}
            return {name: value for name, value in merged.items() if value is not MISSING}

        return expectation, make, lambda: {**good, **(plain or {})}

    def at(tensor: Tensor, value: float) -> Tensor:
        tensor = tensor.clone()
        tensor[1, 1] = value
        return tensor

    def tokens(count: int) -> Tensor:
        return torch.ones(2, count, dtype=torch.long)

    floating = mask.float()
    hidden = torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))
    no_mask = {"attention_mask": torch.ones_like(mask)}
    tables = {
        # token ids
        "ids beyond the vocabulary": changed(input_ids=at(ids, VOCABULARY)),
        "negative ids": changed(input_ids=at(ids, -1)),
        "ids of 32 bits": changed("same", input_ids=ids.int()),
        "ids without a batch": changed(input_ids=ids[0], attention_mask=mask[0], token_type_ids=segments[0]),
        "no tokens": changed(input_ids=ids[:, :0], attention_mask=mask[:, :0], token_type_ids=segments[:, :0]),
        "no texts": ("either", lambda: {name: tensor[:0] for name, tensor in good.items()}, None),
        "one token too many": raw(lambda: {"input_ids": tokens(LONGEST + 1)}),
        "as many tokens as there may be": raw(lambda: {"input_ids": tokens(LONGEST)}, "same", lambda: tokens(LONGEST)),
        "without ids": changed(input_ids=MISSING),
        "None": ("refused", lambda: None, None),
        # masks
        "a mask of floats": changed("same", attention_mask=floating),
        "a boolean mask": changed("same", attention_mask=mask.bool()),
        "an additive mask": changed("either", attention_mask=hidden),
        "a mask with NaN": changed(attention_mask=at(floating, float("nan"))),
        "a mask with halves": changed(attention_mask=floating / 2),
        "a mask of other samples": changed(attention_mask=mask[:2]),
        "no mask": changed("same", no_mask, attention_mask=MISSING),
        # segments
        "segments out of range": changed(token_type_ids=segments + 1),
        "boolean segments": changed("either", token_type_ids=segments.bool()),
        "no segments": changed("same", {"token_type_ids": torch.zeros_like(segments)}, token_type_ids=MISSING),
        # not read
        "texts beside": changed("same", texts=["a", "b", "c", "d"]),
        "a user's mapping": ("same", lambda: UserDict(good), lambda: dict(good)),
    }
    words = "a photo of a cat"
    texts = {
        "a text": raw(lambda: words, "same", lambda: [words]),
        "a pair without a list": raw(lambda: (words, "the dog")),
        "capital letters": raw(lambda: words.upper(), "same", lambda: [words]),
        "a very long text": raw(lambda: "cat " * 20_000, "same", lambda: ["cat " * LONGEST]),
        "an empty text": raw(lambda: "", "either", lambda: [""]),
        "a zero character": raw(lambda: "a\0b", "either", lambda: ["a\0b"]),
        "half a character": raw(lambda: "a \ud800 cat"),
        "no texts": raw(list),
        "None among texts": raw(lambda: [words, None]),
        "bytes": raw(lambda: words.encode()),
    }
    return tables, texts


MISSING = object()  # an omitted entry
