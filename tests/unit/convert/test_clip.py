"""CLIP: where preprocessing comes from, and a tokenizer that gives the ids of open_clip and transformers."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from convert_cases import alike, near, refused

import hydra_ensembles as he
from architectures_clip import DualCase, open_clip_model, transformers_clip, transformers_siglip
from hydra_ensembles.convert.processors import read_open_clip_tokenizer
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing
from zero_shot_models import NAMES, word_tokenizer


def test_image_preprocessing_is_open_clips_own() -> None:
    model = open_clip_model()
    plain = he.convert(model).image.metadata.preprocessing
    assert (plain.size, plain.interpolation, plain.resize_mode) == ((32, 32), "bicubic", "shortest")
    assert plain.mean[0] == pytest.approx(0.48145466)
    settings: dict[str, Any] = {"size": 32, "mean": (0.5,) * 3, "std": (0.25,) * 3, "resize_mode": "squash"}
    model.visual.preprocess_cfg = settings | {"interpolation": "bilinear"}  # type: ignore[union-attr,assignment]
    read = he.convert(model).image.metadata.preprocessing
    assert read == ImagePreprocessing((32, 32), (0.5,) * 3, (0.25,) * 3, interpolation="bilinear", resize_mode="squash")
    given = ImagePreprocessing((32, 32), crop_fraction=0.5)
    dual = he.convert(model, processor=[given])
    assert (dual.image.metadata.preprocessing, dual.text.metadata.preprocessing) == (given, None)


CLASS_NAMES = ["tench", "black-and-gold garden spider", "St. Bernard", "jack-o'-lantern"]
TEXTS = [
    *(f"A photo of a {name}." for name in CLASS_NAMES),
    *("", " ", "\t\n", "a", "<START_OF_TEXT>", "x" * 500, "1" * 100),
    "it's we're I've I'm you'll he'd don't CAN'T O'Brien's",
    "!!! ??? ... -- (a) [b] {c} <d> #e @f $g %h ^i &j *k _l ~m `n |o \\p /q",
    "café naïve Ångström façade jalapeño Dvořák Łódź İstanbul ẞtraße ΣΊΣΥΦΟΣ",
    "e\u0301 n\u0303 A\u030a",  # decomposed accents
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ a😀b",
    "“curly” ‘quotes’ it’s – dash — dash … «guillemets»",
    "&amp; &lt;b&gt; &eacute; &#39; &#x27; &amp;amp; &quot;hi&quot; &nosuch; &copy 2020 AT&T",
    "nul\x00 bell\x07 bom\ufeff esc\x1b[31mred\x1b[0m del\x7f",
    "<start_of_text> in the middle <end_of_text>",
    "word " * 200,
    *("a " * count + "b" for count in (74, 75, 76)),  # one below the limit, at it, above it
]


@cache
def open_clip_tokenizer(**settings: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        import open_clip

    return open_clip.get_tokenizer("ViT-B-32", **settings)


@cache
def ours(**settings: Any) -> TextPreprocessing:
    return read_open_clip_tokenizer(open_clip_tokenizer(**settings))


def test_ids_equal_open_clips() -> None:
    encoded = ours()(TEXTS)
    assert encoded.keys() == {"input_ids"}
    for text, mine, theirs in zip(TEXTS, encoded["input_ids"], open_clip_tokenizer()(TEXTS), strict=True):
        assert torch.equal(mine, theirs), text


@pytest.mark.parametrize("settings", [{"clean": "whitespace"}, {"clean": "canonicalize"}, {"context_length": 9}])
def test_other_settings_equal_open_clips(settings: Any) -> None:
    texts = [text for text in TEXTS if text != "<START_OF_TEXT>"]  # a special token to a tokenizer that lower-cases
    assert torch.equal(ours(**settings)(texts)["input_ids"], open_clip_tokenizer(**settings)(texts))


def test_a_model_with_clips_vocabulary_gets_clips_tokenizer_or_the_given_one() -> None:
    model = open_clip_model(text={"vocab_size": 49408, "context_length": 16})
    dual = he.convert(model)
    texts = ["a photo of a cat", "Dogs!"]
    assert dual.text.metadata.preprocessing == ours(context_length=16)
    with torch.no_grad():
        expected = model.encode_text(open_clip_tokenizer(context_length=16)(texts), normalize=True)  # type: ignore[operator]
        near(dual.encode_text(tuple(texts))[0], expected)
    refused(model, "16", processor=open_clip_tokenizer())


def test_transformers_tokenizer_and_processor() -> None:
    """CLIP's transformers tokenizer, made from open_clip's vocabulary: same tokens, other names for start and end."""
    import transformers

    simple, names = open_clip_tokenizer(), {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(token, token): index for token, index in simple.encoder.items()}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=list(simple.bpe_ranks), model_max_length=77)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model = transformers_clip({}, {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407})
    dual = he.convert(model, processor=transformers.CLIPProcessor(images, tokenizer))
    assert dual.image.metadata.preprocessing.size == (32, 32)
    texts = [*CLASS_NAMES, "it's 100% café 😀", "", "word " * 200]
    expected = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    encoded = dual.text.metadata.preprocessing(texts)
    assert all(torch.equal(encoded[name], expected[name]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        features = model.get_text_features(**expected).pooler_output  # type: ignore[operator]
        alike(dual.encode_text(texts, normalize=False)[0], features)


@torch.no_grad()
def test_zero_shot_logits_have_the_scale_and_the_bias_of_the_sigmoid() -> None:
    model, pixels = transformers_siglip(), DualCase.pixels()
    classifier = he.zero_shot(he.convert(model, processor=word_tokenizer(mask=True)), NAMES)
    ids = word_tokenizer()([f"A photo of a {name}." for name in NAMES])["input_ids"]  # padded, no mask, as in training
    alike(classifier(pixels)[0], model(pixel_values=pixels, input_ids=ids).logits_per_image)
