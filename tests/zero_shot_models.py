"""Small dual encoders that read strings, for zero-shot classification."""

from functools import cache

from torch import nn

import hydra_ensembles as he
from architectures import perturbed
from architectures_clip import CONTEXT, END, VOCABULARY, DualCase

WORDS = ("a", "photo", "of", "the", "picture", ".", "cat", "dog", "bus", "red", "green", "tree", "house", "boat")
NAMES = ("cat", "dog", "red bus", "green tree")
TEMPLATES = ("A photo of a {label}.", "the {label}", "a picture of the {label}")


def tokenizer_for(case: DualCase) -> he.TextPreprocessing:
    """A tokenizer with ids that suit a case: its end token, padding and mask."""
    inputs = case.texts()
    end, pad = int(inputs["input_ids"][3, 1]), int(inputs["input_ids"][3, 2])
    return word_tokenizer(end, pad, "attention_mask" in inputs)


def word_tokenizer(end: int = END, pad: int = 0, mask: bool = False) -> he.TextPreprocessing:
    """A tokenizer of a few words, stored as the content of a `tokenizer.json`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    ids = {word: 10 + index for index, word in enumerate(WORDS)} | {"[UNK]": 9, "[START]": 8, "[END]": end}
    assert max(ids.values()) < VOCABULARY
    core = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ends = [(name, ids[name]) for name in ("[START]", "[END]")]
    core.post_processor = processors.TemplateProcessing("[START] $A [END]", "$A $B:1", ends)
    core.add_special_tokens([name for name, _ in ends])
    return he.TextPreprocessing(
        max_length=CONTEXT, pad_id=pad, pad_to_max=True, attention_mask=mask, tokenizer=core.to_str()
    )


def dual_of(case: DualCase, model: nn.Module | None = None) -> he.DualEncoder:
    return he.convert(case.build() if model is None else model, processor=tokenizer_for(case))


@cache
def three(case: DualCase) -> list[he.DualEncoder]:
    """Three dual encoders with different values in every parameter, scales included; tests must not modify them."""
    return [dual_of(case, perturbed(case.build(), seed)) for seed in (11, 12, 13)]
