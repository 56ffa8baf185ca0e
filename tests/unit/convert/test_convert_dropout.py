"""Dropout of models of one's own: read off their modules where it can be, said where it cannot."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from convert_cases import around
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures_own import (
    ENCODER_TEXT,
    ENCODER_VIT,
    HEADS,
    OWN_VIT,
    WIDTH,
    EncoderText,
    EncoderViT,
    MultiheadBlock,
    MultiheadViT,
    OwnBlock,
    OwnViT,
    own,
)
from hydra_ensembles.errors import HydraWarning

pytestmark = pytest.mark.filterwarnings("error::hydra_ensembles.errors.HydraWarning")


class DroppingText(EncoderText):
    """As PyTorch's tutorial has it: behind positions, and before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.behind_positions, self.before_classes = nn.Dropout(0.2), nn.Dropout(0.3)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.behind_positions(self.embedding(ids).transpose(0, 1) * WIDTH**0.5 + self.pe[: ids.shape[1]])
        return self.classify(self.before_classes(self.encoder(x, src_key_padding_mask=src_key_padding_mask)[0]))


class DroppingBlock(MultiheadBlock):
    """One module in two places, and another between them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention.dropout = 0.15
        self.drop, self.mlp = nn.Dropout(0.1), nn.Sequential(*self.mlp[:2], nn.Dropout(0.05), self.mlp[2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.drop(self.attention(x, x, x)[0]))
        return self.ln2(x + self.drop(self.mlp(x)))


class DroppingViT(MultiheadViT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(DroppingBlock(), DroppingBlock())


class ByHand(OwnBlock):
    """Attention weights that are dropped."""

    def __init__(self, rate: float = 0.25) -> None:
        super().__init__()
        self.weights, self.out = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(2, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        weights = self.weights((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1))
        x = self.after_attention(x + self.out(self.project((weights @ v).transpose(1, 2).flatten(2))))
        return self.after_mlp(x + self.narrow(F.relu(self.wide(x))))


class ByHandViT(OwnViT):
    def __init__(self, rates: tuple[float, float] = (0.25, 0.25)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(ByHand, rates))


def rates(ensemble: he.Ensemble) -> dict[str, float]:
    """All rates of an ensemble but zeros."""
    parts = {"stem": ensemble.config.stem, "encoder": ensemble.config.encoder, "readout": ensemble.config.readout}
    found = {f"{part}.{name}": value for part, one in parts.items() for name, value in vars(one).items()}
    return {name: value for name, value in found.items() if name.endswith("dropout") and value}


BLOCKS = {f"encoder.{one}_dropout": 0.1 for one in ("attention", "projection", "activation", "output")}


@pytest.mark.parametrize(
    ("kind", "declaration", "expected"),
    [
        (DroppingText, None, {**BLOCKS, "stem.dropout": 0.2, "readout.dropout": 0.3}),
        (DroppingText, ENCODER_TEXT, {**BLOCKS, "stem.dropout": 0.2, "readout.dropout": 0.3}),
        (DroppingViT, None, {**BLOCKS, "encoder.attention_dropout": 0.15, "encoder.activation_dropout": 0.05}),
        (ByHandViT, OWN_VIT, {"encoder.attention_dropout": 0.25, "encoder.projection_dropout": 0.25}),
        (OwnViT, OWN_VIT, {}),
    ],
)
def test_rates_are_read_off_modules_by_what_these_are_given(kind: Any, declaration: Any, expected: Any) -> None:
    model = own(kind)
    look = he.ImagePreprocessing(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    ensemble = he.convert(model, declaration=declaration, processor=look if "ViT" in kind.__name__ else None)
    assert rates(ensemble) == expected
    assert ensemble.training is False
    assert all(one.training for one in model.modules()) == model.training


# It drops by a function, which nobody sees.
FUNCTION = around(EncoderViT, lambda model, images: F.dropout(images, 0.1, model.training))


@pytest.mark.parametrize(
    ("model", "declaration"),
    [
        (lambda: own(FUNCTION), ENCODER_VIT),
        (lambda: own(ByHandViT, rates=(0.25, 0.1)), OWN_VIT),
    ],
)
def test_what_cannot_be_read_is_said_and_may_be_declared(model: Any, declaration: he.Declaration) -> None:
    sized = replace(declaration, image_size=32)
    with pytest.warns(HydraWarning, match="dropout=") as caught:
        found = he.convert(model(), declaration=sized)
    assert caught[0].filename == __file__
    assert rates(found) == (BLOCKS if declaration is ENCODER_VIT else {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = he.convert(model(), declaration=replace(sized, dropout=0.2))
    assert said.config.encoder.projection_dropout == said.config.stem.dropout == 0.2
