"""Hand-written models: converted by a table of names or without one, or refused with a clear message."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from convert_cases import IDS, IMAGES, around, look_for_no_remedy, near, refused
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures_own import (
    ENCODER_TEXT,
    ENCODER_VIT,
    HEADS,
    OWN_BERT,
    OWN_VIT,
    ROPE_BERT,
    WIDTH,
    EncoderText,
    EncoderViT,
    MultiheadViT,
    OwnBert,
    OwnBlock,
    OwnViT,
    RopeBert,
    own,
)
from hydra_ensembles.errors import ConversionError, HydraWarning

MASK = torch.arange(11)[None] < torch.tensor([11, 7, 3])[:, None]
TEXTS = {"input_ids": IDS * MASK, "attention_mask": MASK.long()}
BERT_TEXTS = {**TEXTS, "token_type_ids": (torch.arange(11)[None] > 4).long() * MASK}


def but(declaration: he.Declaration, settings: dict[str, Any] | None = None, **names: Any) -> he.Declaration:
    """The same declaration with other settings and some names changed, or removed (None)."""
    changed: Any = {part: place for part, place in {**declaration.names, **names}.items() if place is not None}
    return replace(declaration, names=changed, **(settings or {}))


class OwnScale(OwnBlock):
    """A common variant: scores are divided by the square root of the whole width."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5)


class NestedText(nn.Module):
    """The usual way to write it: batch first, which uses nested tensors for padded texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, WIDTH, padding_idx=0), nn.Embedding(24, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 2)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        kept = ~src_key_padding_mask[:, : x.shape[1], None]
        return self.head((x * kept).sum(1) / kept.sum(1))


class PaddedText(EncoderText):
    """Masks an id of its own as padding, undeclared; its vocabulary is much larger than a short text covers."""

    def __init__(self, pad: int, told: bool = False) -> None:
        super().__init__()
        self.pad, self.embedding = pad, nn.Embedding(3000, WIDTH, padding_idx=pad if told else None)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids == self.pad)


class ComputedText(EncoderText):
    """Positions that are not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        table = self.pe
        del self.pe
        self.pe = table  # type: ignore[assignment]


NEIGHBOURS = but(ROPE_BERT, {"rotary_pairs": "neighbours"})
NORMED = but(NEIGHBOURS, None, query_norm="layers.{i}.qn", key_norm="layers.{i}.kn")
ASKED = but(ENCODER_TEXT, {"answer": lambda model, batch: model(batch["input_ids"])})
COMPUTED = but(ENCODER_TEXT, None, position=own(ComputedText).pe)
CASES: dict[str, tuple[Callable[[], nn.Module], he.Declaration | None, Any]] = {
    "encoder": (lambda: own(EncoderViT), ENCODER_VIT, IMAGES),
    "encoder-found": (lambda: own(EncoderViT), None, IMAGES),
    "encoder-post-relu-found": (lambda: own(EncoderViT, norm_first=False, activation="relu"), None, IMAGES),
    "encoder-sequence-first-found": (lambda: own(EncoderViT, batch_first=False), None, IMAGES),
    "encoder-mean-of-all-found": (lambda: own(EncoderViT, mean=True), None, IMAGES),
    "text": (lambda: own(EncoderText), ENCODER_TEXT, TEXTS),
    "text-found": (lambda: own(EncoderText), None, TEXTS),
    "text-positions-given": (lambda: own(ComputedText), COMPUTED, TEXTS),
    "text-nested-found": (lambda: own(NestedText), None, TEXTS),
    "text-asked": (lambda: own(PaddedText, pad=0), ASKED, TEXTS),
    "multihead-found": (lambda: own(MultiheadViT), None, IMAGES),
    "vit": (lambda: own(OwnViT), OWN_VIT, IMAGES),
    "vit-scaled": (lambda: own(OwnViT, block=OwnScale), but(OWN_VIT, {"attention_scale": WIDTH**-0.5}), IMAGES),
    "bert": (lambda: own(OwnBert), OWN_BERT, BERT_TEXTS),
    "rope-bert": (lambda: own(RopeBert), ROPE_BERT, TEXTS),
    "neighbours-bert": (lambda: own(RopeBert, neighbours=True), NEIGHBOURS, TEXTS),
    "normed-neighbours-bert": (lambda: own(RopeBert, neighbours=True, normed=True), NORMED, TEXTS),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_original(name: str) -> None:
    build, declaration, inputs = CASES[name]
    model = build()
    ensemble = he.convert(model, declaration=declaration)
    if isinstance(inputs, Tensor):
        expected = model(inputs)
    elif name.endswith("bert"):
        answer = model(**inputs)
        expected = answer if isinstance(answer, Tensor) else answer["logits"]
    else:
        told = () if name == "text-asked" else (inputs["attention_mask"] == 0,)
        expected = model(inputs["input_ids"], *told)
    near(ensemble(inputs)[0], expected)


def test_all_that_does_not_fit_is_said_at_once_with_the_nearest_name() -> None:
    wrong = but(OWN_VIT, None, qkv="layers.{i}.qkv", class_token=None, norm2="layers.{i}.norm")
    with pytest.raises(ConversionError) as caught:
        he.convert(own(OwnViT), declaration=wrong)
    text = str(caught.value)
    for token in ("layers.0.qkv", "did you mean layers.0.to_qkv", "layers.0.norm,", "'token'"):
        assert token in text, text


@pytest.mark.parametrize(
    ("name", "settings", "agrees"),
    [
        ("vit", {"heads": 8}, "heads=4"),
        ("vit", {"head_layout": "qkv h d"}, "'h qkv d'"),
        ("vit", {"pool": "mean", "pool_prefix": True}, "'cls', pool_prefix=False|pool_prefix=False, pool='cls'"),
        ("vit-scaled", {"attention_scale": None}, r"attention_scale=0\.17"),
        ("normed-neighbours-bert", {"rotary_pairs": "halves"}, "rotary_pairs='neighbours'"),
        ("bert", {"activation": "silu"}, "activation='gelu'"),  # its blocks are never called as modules
    ],
)
def test_a_wrong_setting_is_found_out_and_the_right_one_named(name: str, settings: Any, agrees: str) -> None:
    build, declaration, _ = CASES[name]
    where = r"somewhere: layers\.0 is not called.*" if name == "bert" else ""
    refused(build(), f"{where}agree with .*({agrees})", declaration=but(declaration, settings))


SWAPPED = {"up": "layers.{i}.narrow", "down": "layers.{i}.wide"}
ROTARY = {"rotary": he.RotaryConfig(100.0), "ignored": ("place",)}


@pytest.mark.parametrize(
    ("kind", "declaration", "token"),
    [
        (OwnViT, but(OWN_VIT, {"heads": None}), "heads="),
        (OwnViT, but(OWN_VIT, {"image_size": (64, 64)}), "too few"),
        (OwnViT, but(OWN_VIT, ROTARY, position=None), "image_size="),
        (OwnViT, but(OWN_VIT, None, **SWAPPED), r"0\.wide\.weight.*mlp\.down\.weight.*shape \[64, 32\] is not"),
        (OwnViT, but(OWN_VIT, {"answer": lambda model, batch: (model(batch["pixel_values"]),)}), "answer= returns"),
        (EncoderViT, but(ENCODER_VIT, None, encoder="patchify"), "nn.TransformerEncoder"),
    ],
)
def test_what_a_model_cannot_be_is_said(kind: Any, declaration: he.Declaration, token: str) -> None:
    refused(own(kind), token, declaration=declaration)


def test_what_cannot_be_found_is_refused() -> None:
    model: Any = own(EncoderViT)
    model.cls = nn.Parameter(torch.zeros(3, WIDTH))
    refused(model, "not a supported architecture")


OTHER = around(EncoderViT, lambda model, images: images.flip(-1))  # the same modules, used differently


def test_what_answers_otherwise_than_its_modules_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    look_for_no_remedy(monkeypatch)
    refused(own(OTHER), "Around is not a supported.*Its parts were found; begin with names.*'encoder': 'encoder'")
    refused(own(OTHER), "differ", declaration=ENCODER_VIT)
    refused(own(around(EncoderViT, after=torch.sigmoid)), "differ", declaration=ENCODER_VIT)


def test_rotations_are_compared_as_sharply_as_their_rounding_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = own(RopeBert)
    for layer in model.layers:
        layer.precise = True
        layer.activation = partial(F.gelu, approximate="tanh")
        layer.w2.weight.data.mul_(0.05)  # so that logits differ by less than float32's tolerance
    right = but(ROPE_BERT, {"activation": "gelu_tanh"})
    found, expected = he.convert(model, declaration=right)(TEXTS)[0], model(**TEXTS)
    near(found, expected)
    for settings, says in (({"activation": "gelu"}, "agree with activation='gelu_tanh'"), ({"rotary": 9990}, "differ")):
        close = he.convert(model, declaration=but(right, settings), probe=False)(TEXTS)[0]
        assert (close - expected).abs().max() < 1e-4 * close.abs().max()
        refused(model, says, declaration=but(right, settings))
        look_for_no_remedy(monkeypatch)  # the last setting has none


class NearBlock(OwnBlock):
    """Tokens attend only to nearby tokens."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, (at[:, None] - at).abs() <= 40)


class NearText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, WIDTH), nn.Embedding(100, WIDTH)
        self.layers, self.head = nn.ModuleList([NearBlock(), NearBlock()]), nn.Linear(WIDTH, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


NEAR_TEXT = but(OWN_VIT, None, patch=None, class_token=None, words="words", position="places", classifier="head")


def test_attention_that_does_not_reach_all_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    look_for_no_remedy(monkeypatch)
    refused(own(NearText), r"differ.*\[1, 100\]", declaration=NEAR_TEXT)
    short = he.convert(own(NearText), declaration=but(NEAR_TEXT, {"max_tokens": 41}))
    assert short.config.stem.max_tokens == 41
    refused(own(NearText), "max_tokens", declaration=but(NEAR_TEXT, {"max_tokens": 101}))


class TwicePaddedText(PaddedText):
    """Takes a mask, and still masks its own padding id."""

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return EncoderText.forward(self, ids, src_key_padding_mask | (ids == self.pad))


@pytest.mark.parametrize("declaration", [ENCODER_TEXT, None])
def test_ids_that_are_padding_are_tried_and_named(declaration: he.Declaration | None) -> None:
    for kind, told in ((PaddedText, False), (PaddedText, True), (TwicePaddedText, False)):
        refused(own(kind, pad=2990, told=told), r"the id 2990,.*padding_idx", declaration=declaration)
    model, ids = own(TwicePaddedText, pad=2990, told=True), IDS.masked_fill(~MASK, 2990)  # as the error advises
    near(he.convert(model, declaration=declaration)(ids, attention_mask=MASK)[0], model(ids, ~MASK))
    model, masked = own(PaddedText, pad=2990, told=True), but(ENCODER_TEXT, {"masked": True})
    near(he.convert(model, declaration=masked)(ids, attention_mask=MASK)[0], model(ids))
    tokenizer = he.TextPreprocessing(tokenizer="{}", max_length=20, pad_id=2990)
    assert he.convert(own(PaddedText, pad=2990), declaration=masked, processor=tokenizer).num_classes == 5


class CountedText(EncoderText):
    """Positions count the tokens, as in RoBERTa: padding before them takes none."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)  # [B, T]
        x = self.embedding(ids).transpose(0, 1) * math.sqrt(WIDTH) + self.pe[places, 0].transpose(0, 1)
        return self.classify(self.encoder(x, src_key_padding_mask=attention_mask == 0)[0])


@pytest.mark.parametrize("declaration", [ENCODER_TEXT, None])
def test_padding_on_the_left_is_warned_of_where_it_is_not_the_same(declaration: he.Declaration | None) -> None:
    with pytest.warns(HydraWarning, match="padding_side='right'") as caught:
        counted = he.convert(own(CountedText), declaration=declaration)
    assert caught[0].filename == __file__
    near(counted(TEXTS)[0], own(CountedText)(IDS * MASK, MASK.long()))
    with warnings.catch_warnings(action="error"):
        alike = he.convert(own(EncoderText), declaration=declaration)
    left = {name: one.flip(1) for name, one in TEXTS.items()}
    near(alike(left)[0], own(EncoderText)(left["input_ids"], left["attention_mask"] == 0))


class OtherName(EncoderText):
    """A mask under a name that does not identify it."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return super().forward(ids, None if mask is None else mask == 0)


def test_an_argument_that_nothing_is_known_of_is_asked_for() -> None:
    model = own(OtherName)
    for declaration in (ENCODER_TEXT, None):
        refused(model, r"mask too: say with answer=", declaration=declaration)
    said = but(ENCODER_TEXT, {"answer": lambda model, batch: model(batch["input_ids"], mask=batch["attention_mask"])})
    near(he.convert(model, declaration=said)(TEXTS)[0], model(TEXTS["input_ids"], mask=MASK))
    near(he.convert(model, declaration=but(ENCODER_TEXT, {"masked": False}))(IDS)[0], model(IDS))


@pytest.mark.parametrize("declaration", [ENCODER_VIT, None])
def test_images_that_are_no_square_are_those_of_the_processor(declaration: he.Declaration | None) -> None:
    model, wide = own(EncoderViT), torch.randn(2, 3, 16, 64, generator=torch.Generator().manual_seed(3))
    look: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    ensemble = he.convert(model, declaration=declaration, processor=he.ImagePreprocessing(size=(16, 64), **look))
    assert ensemble.config.stem.image_size == (16, 64)
    near(ensemble(wide)[0], model(wide))
    with pytest.warns(he.HydraWarning, match="square"):
        assert he.convert(model, declaration=declaration).config.stem.image_size == (32, 32)


class AnySizeViT(EncoderViT):
    """Resamples its positions to the size of the image."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patchify(images)
        size, places = x.shape[2:], self.pos[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        if self.way == "first":
            places = places.repeat(1, 1, 2, 2)[:, :, : size[0], : size[1]]
        elif size != (4, 4):
            places = F.interpolate(places, tuple(size), mode=self.way)
        x = (x + places).flatten(2).transpose(1, 2)
        return torch.cat([(self.cls + self.pos[:, :1]).expand(len(x), -1, -1), x], dim=1)


def test_other_sizes_are_answered_as_the_original_does_or_refused() -> None:
    model, larger = own(AnySizeViT, way="bilinear"), torch.randn(2, 3, 40, 56)
    refused(model, r"48x48.*agree with resample='bilinear'", declaration=ENCODER_VIT)
    for declaration in (but(ENCODER_VIT, {"resample": "bilinear"}), None):
        near(he.convert(model, declaration=declaration)(larger)[0], model(larger))
    for declaration in (ENCODER_VIT, None):
        refused(own(AnySizeViT, way="first"), r"differ.*48x48.*answer=", declaration=declaration)
