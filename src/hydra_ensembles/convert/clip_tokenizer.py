"""CLIP's byte-pair encoding as the content of a `tokenizer.json`, which the `tokenizers` library reads alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConversionError
from ..preprocessing import TextCleaning, TextPreprocessing
from .core import qualified_name

SIMPLE_TOKENIZER = "open_clip.tokenizer.SimpleTokenizer"
VOCABULARY = 49408  # size of the vocabulary that OpenAI's CLIP and its successors share
PADDING_ID = 0

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLEANINGS: dict[str, TextCleaning] = {
    "_clean_lower": "lower",
    "_clean_whitespace": "whitespace",
    "_clean_canonicalize": "canonicalize",
}


def read_simple_tokenizer(tokenizer: Any) -> TextPreprocessing:
    """Our description of open_clip's `SimpleTokenizer`.

    Texts are cleaned as `hydra_ensembles.text_cleaning` says, which is what open_clip does except for the
    repair of mojibake; they are cut to the context length with the end token kept, and padded with zeros.
    """
    if qualified_name(tokenizer) != SIMPLE_TOKENIZER:
        raise ConversionError(f"expected open_clip's SimpleTokenizer, got a {qualified_name(tokenizer)}")
    cleaning = _CLEANINGS.get(tokenizer.clean_fn.__name__)
    if cleaning is None or tokenizer.reduction_fn is not None:
        raise ConversionError(
            f"this SimpleTokenizer cleans with {tokenizer.clean_fn.__name__} and has the reduction "
            f"{tokenizer.reduction_fn}; supported are {sorted(_CLEANINGS)} without reduction"
        )
    vocabulary, length = dict(tokenizer.encoder), int(tokenizer.context_length)
    names = {index: token for token, index in vocabulary.items()}
    special = [names[index] for index in tokenizer.all_special_ids]
    content = clip_tokenizer_json(
        vocabulary, list(tokenizer.bpe_ranks), special, length, lower=cleaning != "whitespace"
    )
    return TextPreprocessing(
        max_length=length,
        pad_id=PADDING_ID,
        pad_token=names[PADDING_ID],
        pad_to_max=True,
        attention_mask=False,
        cleaning=cleaning,
        tokenizer=content,
    )


def clip_tokenizer_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    context_length: int,
    lower: bool = True,
) -> str:
    """The content of a `tokenizer.json`.

    The normalizers in it (Unicode normalisation, white space, lower case) serve whoever reads the file
    without this library; `TextPreprocessing` cleans more thoroughly before, and lower-cases a Greek sigma at
    the end of a word as Python does.

    Args:
        vocabulary: Token → id; a token that ends a word carries the suffix `</w>`.
        merges: Pairs of tokens, in the order in which they are merged.
        special: Special tokens: start of text, end of text, further ones.
        context_length: Length that texts are cut and padded to.
        lower: Whether texts are lower-cased.
    """
    start, end = special[0], special[1]
    normalizers: list[dict[str, Any]] = [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "</w>",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": dict(vocabulary),
        "merges": [" ".join(pair) for pair in merges],
    }
    template: list[dict[str, Any]] = [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": end, "type_id": 0}},
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": context_length,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": context_length},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": PADDING_ID,
            "pad_type_id": 0,
            "pad_token": next(token for token, index in vocabulary.items() if index == PADDING_ID),
        },
        "added_tokens": [{"id": vocabulary[token], "content": token, **added} for token in special],
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, *([{"type": "Lowercase"}] if lower else [])]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 0}}, template[-1]],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (start, end)
            },
        },
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
