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

import hydra_ensembles as he

from .counting import Row, count
from .expected import Deed, cases_of, check_of, drawn, must_refuse_of
from .small import LONGEST, SIZE, TOKENS, VOCABULARY, hydra, model, samples

CASES = 2000

ENTRIES = (
    *("predict", "predict of a hydra", "predict of an optimized hydra", "predict of MC dropout"),
    *("forward", "forward of a hydra", "forward of an optimized hydra", "forward of MC dropout", "features"),
)
Value = tuple[str, Callable[[], Any], Callable[[], Any] | None]  # expectation, the value, an equivalent valid value


def run(cases: int, seed: int) -> list[Row]:
    return [count("inputs of a model", check, drawn(all_cases(), cases, seed))]


@cache
def good_inputs(kind: str) -> Any:
    return samples(kind, 4, seed=3)[0]


@cache
def runners(kind: str) -> dict[str, Callable[[Any], Any]]:
    """Entry points for one batch of inputs; those called predict take raw inputs and refuse NaN."""
    single, several = model(kind), hydra(kind)
    with torch.no_grad():
        frozen, dropping = several.optimize(), he.mc_dropout(single, 0.2, 3)
    asked = (single, several, frozen, dropping)
    predict = [lambda inputs, one=one: one.predict(inputs).member_logits for one in asked]
    forward = [torch.no_grad()(run) for run in (*asked, single.features)]
    return dict(zip(ENTRIES, (*predict, *forward), strict=True))


@cache
def deeds(kind: str) -> dict[tuple[str, str], Callable[[], Deed]]:
    """Every value with every entry point; raw inputs only where accepted."""
    tensors, raw, values = (image_tensors(), raw_images(), image_values()) if kind == "image" else (*text_tables(), {})
    every = {**tensors, **raw, **values}
    return {
        (entry, name): partial(_input_deed, kind, entry, value)
        for entry in ENTRIES
        for name, value in (every if entry.startswith("predict") else tensors).items()
    }


def _input_deed(kind: str, entry: str, value: Value) -> Deed:
    expectation, make, plain = value
    run_on = runners(kind)[entry]
    if expectation == "refused":
        return Deed(lambda: run_on(make()))
    reference = make if plain is None else plain
    return Deed(lambda: run_on(make()), lambda: run_on(reference()), may_refuse=expectation == "either")


def raw(make: Callable[[], Any], expectation: str = "refused", plain: Callable[[], Any] | None = None) -> Value:
    return expectation, make, plain


def image_tensors() -> dict[str, Value]:
    """Images as tensors, arrays and mappings."""
    x = good_inputs("image")

    def given(make: Callable[[Tensor], Any], expectation: str = "refused", plain: Any = None) -> Value:
        return expectation, lambda: make(x.clone()), lambda: x.clone() if plain is None else plain(x.clone())

    twice, mapping = partial(torch.repeat_interleave, repeats=2, dim=3), {"pixel_values": x}
    return {
        "None": given(lambda x: None),
        "a number": given(lambda x: 3),
        "a nested list": given(lambda x: x.tolist(), "either"),
        "an array": given(lambda x: x.numpy(), "either"),
        "whole numbers": given(lambda x: (x * 50).long(), "either", lambda x: (x * 50).long().float()),
        "bytes": given(lambda x: (x * 50).clamp(0, 255).to(torch.uint8), "refused"),
        "complex": given(lambda x: x.to(torch.complex64)),
        "one image without a batch": given(lambda x: x[0]),
        "one channel": given(lambda x: x[:, :1]),
        "a side that patches do not divide": given(lambda x: x[..., :-1]),
        "no columns": given(lambda x: x[..., :0]),
        "no images": given(lambda x: x[:0], "either", lambda x: x[:0]),
        "sparse": given(lambda x: x.to_sparse(), "either"),
        "a misspelt key": given(lambda x: {"pixel_value": x}),
        "None in a mapping": given(lambda x: {"pixel_values": None}),
        "an array in a mapping": given(lambda x: {"pixel_values": x.numpy()}, "either"),
        "a text in a mapping": given(lambda x: {"pixel_values": "cat.png"}),
        "masked positions": given(lambda x: {**mapping, "bool_masked_pos": torch.ones(4, 4, dtype=torch.bool)}),
        "a mask of pixels that hides some": given(lambda x: {**mapping, "pixel_mask": torch.zeros(4, SIZE, SIZE)}),
        "whole": given(lambda x: x, "same"),
        "a mapping": given(lambda x: {"pixel_values": x}, "same"),
        "labels beside": given(lambda x: {"pixel_values": x, "labels": torch.zeros(4, dtype=torch.long)}, "same"),
        "strided": given(lambda x: x.repeat_interleave(2, 0)[::2], "same"),
        "channels last in memory": given(lambda x: x.contiguous(memory_format=torch.channels_last), "same"),
        "with a gradient": given(lambda x: x.requires_grad_(), "same"),
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
        "a tuple of pictures": raw(lambda: (picture, picture), "same", lambda: [picture, picture]),
        "pictures one by one": raw(lambda: (one for one in [picture, picture]), "either", lambda: [picture, picture]),
        "a picture of one pixel": raw(lambda: dark(1, 1), "same", lambda: dark(2, 2)),
        "a very wide picture": raw(lambda: dark(2000, 1), "same", lambda: dark(8, 8)),
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
        "boolean ids": changed(input_ids=ids > 3),
        "ids of 32 bits": changed("same", input_ids=ids.int()),
        "ids without a batch": changed(input_ids=ids[0], attention_mask=mask[0], token_type_ids=segments[0]),
        "no tokens": changed(input_ids=ids[:, :0], attention_mask=mask[:, :0], token_type_ids=segments[:, :0]),
        "no texts": ("either", lambda: {name: tensor[:0] for name, tensor in good.items()}, None),
        "one token too many": raw(lambda: {"input_ids": tokens(LONGEST + 1)}),
        "as many tokens as there may be": raw(lambda: {"input_ids": tokens(LONGEST)}, "same", lambda: tokens(LONGEST)),
        "ids in an array": changed("either", input_ids=ids.numpy()),
        "ids that are None": changed(input_ids=None),
        "sparse ids": changed("either", input_ids=lambda: ids.to_sparse()),
        "without ids": changed(input_ids=MISSING),
        "None": ("refused", lambda: None, None),
        # masks
        "a mask in an array": changed("either", attention_mask=mask.numpy()),
        "a mask of floats": changed("same", attention_mask=floating),
        "a boolean mask": changed("same", attention_mask=mask.bool()),
        "an additive mask": changed("either", attention_mask=hidden),
        "an additive mask that hides nothing": changed("either", no_mask, attention_mask=torch.zeros(mask.shape)),
        "a mask with NaN": changed(attention_mask=at(floating, float("nan"))),
        "a mask with halves": changed(attention_mask=floating / 2),
        "a mask of other samples": changed(attention_mask=mask[:2]),
        "a mask without a batch": changed(attention_mask=mask[0]),
        "a mask of every pair": changed("either", attention_mask=mask[:, None, None, :]),
        "no mask": changed("same", no_mask, attention_mask=MISSING),
        "a mask under another name": changed(attention_mask=MISSING, attention_masks=mask),
        "a mask of padding under torch's name": changed(attention_mask=MISSING, key_padding_mask=mask == 0),
        # segments
        "segments out of range": changed(token_type_ids=segments + 1),
        "negative segments": changed(token_type_ids=segments - 1),
        "boolean segments": changed("either", token_type_ids=segments.bool()),
        "segments of other samples": changed(token_type_ids=segments[:2]),
        "no segments": changed("same", {"token_type_ids": torch.zeros_like(segments)}, token_type_ids=MISSING),
        "segments under a short name": changed(token_type_ids=MISSING, segment_ids=segments),
        # not read
        "positions": changed(position_ids=torch.arange(TOKENS).flip(0)[None].expand(4, -1)),
        "texts beside": changed("same", texts=["a", "b", "c", "d"]),
        "lengths beside": changed("either", length=mask.sum(1)),
        "a user's mapping": ("same", lambda: UserDict(good), lambda: dict(good)),
        "strided": ("same", lambda: {n: t.repeat_interleave(2, 0)[::2] for n, t in good.items()}, lambda: dict(good)),
    }
    words = "a photo of a cat"
    texts = {
        "a text": raw(lambda: words, "same", lambda: [words]),
        "a pair": raw(lambda: (words, "the dog"), "same", lambda: [(words, "the dog")]),
        "capital letters": raw(lambda: words.upper(), "same", lambda: [words]),
        "a very long text": raw(lambda: "cat " * 20_000, "same", lambda: ["cat " * LONGEST]),
        "texts one by one": raw(lambda: iter([words, "dog"]), "either", lambda: [words, "dog"]),
        "an empty text": raw(lambda: "", "either", lambda: [""]),
        "a zero character": raw(lambda: "a\0b", "either", lambda: ["a\0b"]),
        "half a character": raw(lambda: "a \ud800 cat"),
        "no texts": raw(list),
        "None among texts": raw(lambda: [words, None]),
        "bytes": raw(lambda: words.encode()),
        "lists of texts": raw(lambda: [[words], ["dog"]]),
        "half a pair": raw(lambda: (words, None)),
    }
    return tables, texts


MISSING = object()  # an omitted entry
all_cases, check, must_refuse = partial(cases_of, deeds), partial(check_of, deeds), partial(must_refuse_of, deeds)
