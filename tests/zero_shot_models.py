"""Small dual encoders that read strings, for zero-shot classification."""

import json

import torch
from torch import nn

import hydra_ensembles as he
from architectures_clip import CONTEXT, END, VOCABULARY, DualCase

WORDS = ("a", "photo", "of", "the", "picture", ".", "cat", "dog", "bus", "red", "green", "tree", "house", "boat")
NAMES = ("cat", "dog", "red bus", "green tree")
OTHER_NAMES = ("house", "boat", "green cat")
TEMPLATES = ("A photo of a {label}.", "the {label}", "a picture of the {label}")


def tokenizer_for(case: DualCase) -> he.TextPreprocessing:
    """A tokenizer whose ids suit the vocabulary of a case: its end token, its padding, its mask."""
    inputs = case.texts()
    end, pad = int(inputs["input_ids"][3, 1]), int(inputs["input_ids"][3, 2])
    return word_tokenizer(end, pad, "attention_mask" in inputs)


def word_tokenizer(end: int = END, pad: int = 0, mask: bool = False) -> he.TextPreprocessing:
    """A tokenizer that knows a few words, as the content of a `tokenizer.json`."""
    ids = {word: 10 + index for index, word in enumerate(WORDS)}
    ids |= {"[UNK]": 9, "[START]": 8, "[END]": end}
    special = [
        {"id": ids[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for word in ("[START]", "[END]")
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(special, key=lambda token: token["id"]),  # type: ignore[arg-type,return-value]
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special("[START]"), {"Sequence": {"id": "A", "type_id": 0}}, _special("[END]")],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[START]", "[END]")
            },
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"},
    }
    assert max(ids.values()) < VOCABULARY
    return he.TextPreprocessing(
        max_length=CONTEXT, pad_id=pad, pad_to_max=True, attention_mask=mask, tokenizer=json.dumps(content)
    )


def _special(name: str) -> dict[str, dict[str, object]]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def dual_of(case: DualCase, model: nn.Module | None = None) -> he.DualEncoder:
    """The case's model, converted, with a tokenizer."""
    dual = he.convert(case.build() if model is None else model, processor=tokenizer_for(case))
    assert isinstance(dual, he.DualEncoder)
    return dual


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()
