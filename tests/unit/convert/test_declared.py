"""Hand-written models: converted by a table of names, or refused with a clear message."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from convert_cases import IDS, IMAGES, around, near, refused
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures_own import (
    ENCODER_TEXT,
    ENCODER_VIT,
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


NEIGHBOURS = but(ROPE_BERT, {"rotary_pairs": "neighbours"})
NORMED = but(NEIGHBOURS, None, query_norm="layers.{i}.qn", key_norm="layers.{i}.kn")
ASKED = but(ENCODER_TEXT, {"answer": lambda model, batch: model(batch["input_ids"], batch["attention_mask"] == 0)})
MEAN = but(ENCODER_VIT, {"pool": "mean", "pool_prefix": True})
MULTIHEAD = he.Declaration(
    {"patch": "patchify", "position": "position", "attention": "blocks.{i}.attention", "norm1": "blocks.{i}.ln1"}
    | {"norm2": "blocks.{i}.ln2", "up": "blocks.{i}.mlp.0", "down": "blocks.{i}.mlp.2", "norm": "norm"}
    | {"classifier": "head"},
    norm_first=False,
    activation="relu",
    pool="mean",
    norm_after_pool=True,
    image_size=32,
)
CASES: dict[str, tuple[Callable[[], nn.Module], he.Declaration, Any]] = {
    "encoder": (lambda: own(EncoderViT), ENCODER_VIT, IMAGES),
    "encoder-sequence-first": (lambda: own(EncoderViT, batch_first=False), ENCODER_VIT, IMAGES),
    "encoder-mean-of-all": (lambda: own(EncoderViT, mean=True), MEAN, IMAGES),
    "text": (lambda: own(EncoderText), ENCODER_TEXT, TEXTS),
    "text-asked": (lambda: own(EncoderText), ASKED, TEXTS),
    "multihead": (lambda: own(MultiheadViT), MULTIHEAD, IMAGES),
    "vit": (lambda: own(OwnViT), OWN_VIT, IMAGES),
    "vit-scaled": (lambda: own(OwnViT, block=OwnScale), but(OWN_VIT, {"attention_scale": WIDTH**-0.5}), IMAGES),
    "bert": (lambda: own(OwnBert), OWN_BERT, BERT_TEXTS),
    "rope-bert": (lambda: own(RopeBert), ROPE_BERT, TEXTS),
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
        expected = model(inputs["input_ids"], inputs["attention_mask"] == 0)
    near(ensemble(inputs)[0], expected)


SWAPPED = {"up": "layers.{i}.narrow", "down": "layers.{i}.wide"}
OTHER = around(EncoderViT, lambda model, images: images.flip(-1))  # the same modules, used differently
SQUASHED = around(EncoderViT, after=torch.sigmoid)


class ReshapedViT(EncoderViT):
    """Sequence first, with `reshape` where `transpose` was meant: right for a single image only."""

    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        return self.head(self.encoder(x.reshape(x.shape[1], x.shape[0], -1))[0])


@pytest.mark.parametrize(
    ("kind", "declaration", "token"),
    [
        # the table does not fit
        (OwnViT, but(OWN_VIT, None, qkv="layers.{i}.qkv"), r"qkv.*did you mean layers\.0\.to_qkv"),
        (OwnViT, but(OWN_VIT, {"pool": "mean"}, class_token=None), r"no canonical place: \['token'\]"),
        (OwnViT, but(OWN_VIT, None, up=None), "does not say where up is"),
        (OwnViT, but(OWN_VIT, None, **SWAPPED), r"0\.wide\.weight.*mlp\.down\.weight.*shape \[64, 32\] is not"),
        (OwnViT, but(OWN_VIT, {"heads": None}), "heads is None"),
        (EncoderViT, but(ENCODER_VIT, None, encoder="patchify"), "nn.TransformerEncoder"),
        (RopeBert, but(ROPE_BERT, {"max_tokens": None}), "max_tokens="),
        # the answers differ
        (OwnViT, but(OWN_VIT, {"heads": 8}), "answers.*differ by"),
        (OwnBert, but(OWN_BERT, {"activation": "silu"}), "answers.*differ by"),
        (
            OwnViT,
            but(OWN_VIT, {"answer": lambda model, batch: (model(batch["pixel_values"]),)}),
            "cannot answer",
        ),
        (OTHER, ENCODER_VIT, "answers.*differ by"),
        (SQUASHED, ENCODER_VIT, "answers.*differ by"),
        (ReshapedViT, ENCODER_VIT, "differ"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused(kind: Any, declaration: he.Declaration, token: str) -> None:
    refused(own(kind), token, declaration=declaration)


def test_images_that_are_no_square_are_those_of_the_processor() -> None:
    model, wide = own(EncoderViT), torch.randn(2, 3, 16, 64, generator=torch.Generator().manual_seed(3))
    look: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    ensemble = he.convert(
        model,
        declaration=but(ENCODER_VIT, {"image_size": None}),
        processor=he.ImagePreprocessing(size=(16, 64), **look),
    )
    assert ensemble.config.stem.image_size == (16, 64)
    near(ensemble(wide)[0], model(wide))
