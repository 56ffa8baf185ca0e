"""Inputs that an ensemble cannot take: an error that says what to give instead."""

import pytest
import torch
from torch import Tensor

from checkpoint_models import ensemble, single, text
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
