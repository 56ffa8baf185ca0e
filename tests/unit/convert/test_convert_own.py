"""What models of one's own are asked beside random batches: samples alone and together, every id, and dropout."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from convert_cases import IDS, IMAGES, around, look_for_no_remedy, near, refused
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
from hydra_ensembles.convert.core import Architecture, as_stored
from hydra_ensembles.convert.guess import _agrees
from hydra_ensembles.convert.own import Asked
from hydra_ensembles.errors import HydraWarning

# --- samples alone and together ------------------------------------------------------------------------------


class ReshapedViT(EncoderViT):
    """Sequence first, by `reshape` where `transpose` was meant: the same for one image alone."""

    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        return self.head(self.encoder(x.reshape(x.shape[1], x.shape[0], -1))[0])


class NormedText(EncoderText):
    """Embeddings are normalised by the statistics of the batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.embedding(ids).transpose(1, 2)).permute(2, 0, 1) + self.pe[: ids.shape[1]]
        return self.classify(self.encoder(x, src_key_padding_mask=src_key_padding_mask)[0])


RANDOM = around(OwnViT, lambda model, images: nn.functional.dropout(images, 0.1))  # it forgets to ask whether it trains


@pytest.mark.parametrize(
    ("kind", "declaration"), [(ReshapedViT, ENCODER_VIT), (NormedText, ENCODER_TEXT), (RANDOM, OWN_VIT)]
)
def test_a_model_that_answers_samples_by_their_neighbours_or_at_random_is_refused_as_such(
    kind: Any, declaration: he.Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_for_no_remedy(monkeypatch)
    refused(own(kind), r"one by one.*self\.training.*answer=", declaration=declaration)


def test_samples_may_be_said_to_be_answered_alone() -> None:
    def one_by_one(model: Any, batch: Any) -> Tensor:
        return torch.cat([model(one) for one in batch["pixel_values"].split(1)])

    model, alone = own(ReshapedViT), replace(ENCODER_VIT, answer=one_by_one, image_size=32)
    near(he.convert(model, declaration=alone)(IMAGES)[0], one_by_one(model, {"pixel_values": IMAGES}))


def test_answers_without_an_axis_of_samples_are_said() -> None:
    refused(own(around(OwnViT, after=Tensor.squeeze)), r"a tensor \[5\], where \[1, classes\]", declaration=OWN_VIT)


# --- what is asked of ids ------------------------------------------------------------------------------------


class Looks(nn.Module):
    """Looks up words, and does something with the ids besides."""

    def __init__(self, besides: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.words, self.besides = nn.Embedding(50, 4), besides
        self.special = torch.zeros(50, dtype=torch.bool)

    def forward(self, ids: Tensor) -> Tensor:
        self.besides(self, ids)
        return self.words(ids).sum((1, 2))[:, None]


@torch.jit.script
def _scripted(ids: Tensor) -> Tensor:
    return ids == 7


@pytest.mark.parametrize(
    ("besides", "kinds"),
    [
        (lambda model, ids: None, 1),
        (lambda model, ids: torch.ones_like(ids) + torch.arange(ids.shape[1]), 1),
        (lambda model, ids: model.words(torch.cat([ids[:, :1], ids[:, 1:]], 1).t().reshape(-1).int()), 1),
        (lambda model, ids: model.words.weight[ids], 1),
        (lambda model, ids: ids == 7, 2),
        (lambda model, ids: torch.tensor(7) != ids.t(), 2),
        (lambda model, ids: (ids == 7) & (ids < 3), 3),
        (lambda model, ids: (ids != 7).cumsum(1)[:, -1].tolist(), 2),
        (lambda model, ids: torch.isin(ids, torch.tensor([3, 4])), 2),
        (lambda model, ids: ids.bool(), 2),
        (lambda model, ids: _scripted(ids), 2),
        (lambda model, ids: ids == ids[:, :1], 50),
        (lambda model, ids: model.special[ids], 50),
        (lambda model, ids: ids.tolist(), 50),
        (lambda model, ids: ids.numpy(), 50),
        (lambda model, ids: [row.tolist() for row in ids], 50),
        (lambda model, ids: int(ids[0, 0]), 50),
        (lambda model, ids: ids.argmax(1), 50),
        (lambda model, ids: ids.float() / 50, 50),
        (lambda model, ids: nn.functional.one_hot(ids, 50), 50),
        (lambda model, ids: ids.sub_(1).clamp_(min=0), 50),
    ],
)
def test_ids_that_are_told_apart_are_known_by_what_is_asked_of_them(besides: Any, kinds: int) -> None:
    model = Looks(besides)
    stored: Any = ("", (), lambda *given: None, {"stem.words": as_stored("words.weight")})
    asked = Asked(Architecture(*stored, answer=lambda model, inputs, fresh: model(inputs["input_ids"])))
    with torch.no_grad():
        answer = asked(model, {"input_ids": IDS.clamp(max=49)}, False)
        assert type(answer) is Tensor
    found = asked.told_apart(torch.randperm(50))
    assert len(found.unique()) == len(found) == kinds
    assert kinds != 2 or ({7, 0, 3, 4} & set(found.tolist()))  # the one that is told from all others


class LargeText(EncoderText):
    """A vocabulary as large as that of BERT."""

    def __init__(self, pad: int | None) -> None:
        super().__init__()
        self.embedding, self.pad, self.seen = nn.Embedding(30522, WIDTH), pad, 0

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        self.seen += ids.numel()
        return super().forward(ids, None if self.pad is None else ids == self.pad)


@pytest.mark.parametrize(("pad", "accepted"), [(None, True), (30000, False), (40000, True)])
def test_a_large_vocabulary_costs_no_more_than_a_small_one(
    pad: int | None, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LargeText, "__deepcopy__", lambda self, memo: 1 / 0, raising=False)  # it is counted here
    model: Any = own(LargeText, pad=pad)
    if accepted:
        he.convert(model, declaration=ENCODER_TEXT)
    else:
        refused(model, "the id 30000,", declaration=ENCODER_TEXT)
    assert model.seen < 1000


# --- numbers that a model looks at -------------------------------------------------------------------------------


# It scales images itself where they seem to be bytes, without Python's knowing.
BYTES = around(OwnViT, lambda model, x: torch.where(x.amax((1, 2, 3), keepdim=True) > 100, x / 255, x))
EARLY_EXIT = around(OwnViT, after=lambda answers: answers.sign() if answers.abs().max() > 1e3 else answers)
# It looks at shapes, and at numbers of its own, which are the same for all inputs.
CHECKED = around(OwnViT, lambda model, x: x if x.shape[-1] % 4 == 0 and float(model.out.weight[0, 0]) < 1e9 else 1 / 0)


def test_images_of_another_range_are_compared_too() -> None:
    assert _agrees(OWN_VIT, [own(OwnViT)], None)
    assert not _agrees(OWN_VIT, [own(BYTES)], None)  # convert would look for a setting that helps


def test_a_model_that_looks_at_numbers_is_warned_of_with_the_line() -> None:
    with pytest.warns(he.HydraWarning, match=r"test_convert_own.py:\d+"):
        he.convert(own(EARLY_EXIT), declaration=OWN_VIT)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "reads numbers")
        he.convert(own(CHECKED), declaration=OWN_VIT)
        he.convert(own(EncoderText), declaration=ENCODER_TEXT)  # torch's own encoder looks at masks


class SelfMasked(RopeBert):
    """Looks for padding itself, where it is told of none."""

    padding: int | None = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids) if self.padding is None else input_ids != self.padding
        return super().forward(input_ids, attention_mask)


class TakesAll(SelfMasked):
    """Takes every id for a token, as the converted one."""

    padding = None


@pytest.mark.parametrize(("kind", "said"), [(SelfMasked, True), (TakesAll, False), (RopeBert, False)])
def test_a_model_that_finds_padding_itself_is_warned_of(kind: Any, said: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        he.convert(own(kind), declaration=ROPE_BERT)
    assert ["attention_mask" in str(one.message) for one in caught if "without" in str(one.message)] == [True] * said


# --- dropout -------------------------------------------------------------------------------------------------


class DroppingText(EncoderText):
    """As PyTorch's tutorial has it: behind positions, too, where the layers of torch drop as well."""

    def __init__(self) -> None:
        super().__init__()
        self.behind_positions = nn.Dropout(0.2)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.behind_positions(self.embedding(ids).transpose(0, 1) * WIDTH**0.5 + self.pe[: ids.shape[1]])
        return self.classify(self.encoder(x, src_key_padding_mask=src_key_padding_mask)[0])


def other_rate() -> nn.Module:
    model = own(EncoderText)
    model.encoder.layers[1].dropout1.p = 0.3
    return model


@pytest.mark.filterwarnings("error::hydra_ensembles.errors.HydraWarning")
@pytest.mark.parametrize("declaration", [ENCODER_TEXT, None])
def test_rates_are_read_off_layers_of_torch_and_other_dropout_is_named(declaration: he.Declaration | None) -> None:
    encoder = he.convert(own(EncoderText), declaration=declaration).config.encoder
    assert {encoder.attention_dropout, encoder.projection_dropout, encoder.activation_dropout} == {0.1}
    assert encoder.output_dropout == 0.1
    for model, name in ((own(DroppingText), "behind_positions,"), (other_rate(), "encoder.layers.1.dropout1,")):
        with pytest.warns(HydraWarning, match=f" {name}.*dropout=") as caught:
            assert he.convert(model, declaration=declaration).config.stem.dropout == 0.0
        assert caught[0].filename == __file__
    said = he.convert(own(DroppingText), declaration=replace(ENCODER_TEXT, dropout=0.2)).config
    assert said.encoder.projection_dropout == said.stem.dropout == 0.2
