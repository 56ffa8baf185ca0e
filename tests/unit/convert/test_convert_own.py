"""Further checks of hand-written models besides random batches: single samples, special ids, dropout."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from convert_cases import around, changed, look_for_no_remedy, refused
from torch import Tensor, nn

import hydra_ensembles as he
from architectures_own import (
    ENCODER_TEXT,
    ENCODER_VIT,
    OWN_VIT,
    ROPE_BERT,
    WIDTH,
    EncoderText,
    EncoderViT,
    OwnViT,
    RopeBert,
    own,
)
from hydra_ensembles.convert.guess import _Trial
from hydra_ensembles.errors import HydraWarning


class ReshapedViT(EncoderViT):
    """Sequence first, with `reshape` where `transpose` was meant: right for a single image only."""

    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        return self.head(self.encoder(x.reshape(x.shape[1], x.shape[0], -1))[0])


class PassedText(EncoderText):
    """One more part after the positions, where PyTorch's tutorial has dropout."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.behind_positions = part

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.behind_positions(self.embedding(ids).transpose(0, 1) * WIDTH**0.5 + self.pe[: ids.shape[1]])
        return self.classify(self.encoder(x, src_key_padding_mask=src_key_padding_mask)[0])


CENTRED = partial(PassedText, lambda x: x - x.mean(1, keepdim=True))  # over the batch, also in eval mode
DROPPING = partial(PassedText, nn.Dropout(0.2))
RANDOM = around(OwnViT, lambda model, images: nn.functional.dropout(images, 0.1))  # ignores self.training


@pytest.mark.parametrize(
    ("kind", "declaration"), [(ReshapedViT, ENCODER_VIT), (CENTRED, ENCODER_TEXT), (RANDOM, OWN_VIT)]
)
def test_a_model_that_answers_samples_by_their_neighbours_or_at_random_is_refused_as_such(
    kind: Any, declaration: he.Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_for_no_remedy(monkeypatch)
    refused(own(kind), r"one by one.*self\.training.*answer=", declaration=declaration)


# Scales images that look like bytes, without a Python branch.
BYTES = around(OwnViT, lambda model, x: torch.where(x.amax((1, 2, 3), keepdim=True) > 100, x / 255, x))


def test_images_of_another_range_are_compared_too() -> None:
    assert _Trial(own(OwnViT), None).agrees(OWN_VIT)
    assert not _Trial(own(BYTES), None).agrees(OWN_VIT)  # convert would search for a setting that fixes it


class SelfMasked(RopeBert):
    """Masks its own padding id when it gets no mask."""

    padding: int | None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids) if self.padding is None else input_ids != self.padding
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(("padding", "said"), [(0, True), (None, False)])  # None: every id is a token
def test_a_model_that_finds_padding_itself_is_warned_of(padding: int | None, said: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        he.convert(changed(own(SelfMasked), "padding", padding), declaration=ROPE_BERT)
    assert ["attention_mask" in str(one.message) for one in caught if "without" in str(one.message)] == [True] * said


@pytest.mark.filterwarnings("error::hydra_ensembles.errors.HydraWarning")
@pytest.mark.parametrize("declaration", [ENCODER_TEXT, None])
def test_rates_are_read_off_layers_of_torch_and_other_dropout_is_named(declaration: he.Declaration | None) -> None:
    encoder = he.convert(own(EncoderText), declaration=declaration).config.encoder
    assert {encoder.attention_dropout, encoder.projection_dropout, encoder.activation_dropout} == {0.1}
    assert encoder.output_dropout == 0.1
    other_rate = changed(own(EncoderText), "encoder.layers.1.dropout1.p", 0.3)
    for model, name in ((own(DROPPING), "behind_positions,"), (other_rate, "encoder.layers.1.dropout1,")):
        with pytest.warns(HydraWarning, match=f" {name}.*dropout=") as caught:
            assert he.convert(model, declaration=declaration).config.stem.dropout == 0.0
        assert caught[0].filename == __file__
    said = he.convert(own(DROPPING), declaration=replace(ENCODER_TEXT, dropout=0.2)).config
    assert said.encoder.projection_dropout == said.stem.dropout == 0.2
