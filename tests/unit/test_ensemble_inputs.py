"""Inputs that an ensemble cannot take: an error that says what to give instead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from checkpoint_models import ensemble, single, text
from hydra_ensembles import ImagePreprocessing, TextPreprocessing, mc_dropout
from hydra_ensembles.errors import DataError

IDS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_whole_number_images_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match="normalised floats"):
        ensemble(single())(torch.zeros(1, 3, 8, 8, dtype=dtype))


@pytest.mark.parametrize("name", ["position_ids", "inputs_embeds", "head_mask"])
def test_inputs_that_would_change_the_answer_are_refused(name: str) -> None:
    model = ensemble(text())
    assert torch.equal(model({"input_ids": IDS, name: None}), model(IDS))
    with pytest.raises(DataError, match=name):
        model({"input_ids": IDS, name: torch.zeros(2, 5)})


@pytest.mark.parametrize(
    ("ids", "segments"), [(IDS[:, :0], None), (IDS, torch.zeros(2, 4, dtype=torch.long))], ids=["empty", "shape"]
)
def test_sequences_need_tokens_and_segments_of_their_shape(ids: Tensor, segments: Tensor | None) -> None:
    with pytest.raises(DataError, match="at least one token"):
        ensemble(text())(ids, token_type_ids=segments)


PIXELS = np.zeros((10, 10, 3), np.uint8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (PIXELS, r"ndarray.*PIL\.Image\.fromarray"),
        ([PIXELS], r"PIL\.Image\.fromarray"),
        ([torch.zeros(3, 8, 8)], r"item 0 is a Tensor.*one tensor \[B, channels, H, W\]"),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(2)), r"item 0 is a Tensor.*the images alone"),
        ("cat.png", r"str.*PIL\.Image\.open"),
        ([Path("cat.png")], r"PIL\.Image\.open"),
        (None, r"NoneType.*PIL\.Image\.open"),
    ],
)
def test_what_is_no_image_is_told_how_to_become_one(inputs: Any, message: str) -> None:
    model = ensemble(single()).with_metadata(preprocessing=ImagePreprocessing((8, 8)))
    for predictor in (model, mc_dropout(model, 0.1, 2)):
        with pytest.raises(DataError, match=message):
            predictor.predict(inputs)


def test_a_column_of_images_is_a_list_of_them() -> None:
    model = ensemble(single()).with_metadata(preprocessing=ImagePreprocessing((8, 8)))
    column = np.empty(2, dtype=object)
    column[:] = [Image.fromarray(PIXELS), Image.fromarray(PIXELS + 90)]
    assert torch.equal(model.predict(column).probs, model.predict(list(column)).probs)


@pytest.mark.parametrize("inputs", [[IDS], (IDS, torch.zeros(2)), IDS.numpy(), 3])
def test_what_is_no_text_is_told_how_to_give_token_ids(inputs: Any) -> None:
    model = ensemble(text()).with_metadata(preprocessing=TextPreprocessing(8))
    with pytest.raises(DataError, match=r"expected a string .*token ids as one tensor \[B, T\].*the inputs alone"):
        model.predict(inputs)
