"""Decoders of transformers as classifiers: equal answers, whatever the padding; label words; refusals."""

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import ArchitectureCase
from architectures_decoders import CASES, texts


def apart(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_answers_equal_whatever_the_length_and_the_side_of_padding(case: ArchitectureCase) -> None:
    model = case.build()
    ensemble = he.convert(model)
    for tokens in (1, 2, 7, 64):
        for left in (False, True):
            inputs = texts(tokens, left)
            if left and "gpt2" in case.name:
                continue
            if left and ensemble.config.stem.learned_positions:  # the original counts padding: compare with texts alone
                rows = [ids[mask.bool()][None] for ids, mask in zip(*inputs.values(), strict=True)]
                expected = torch.cat([model(row).logits for row in rows])
            else:
                expected = case.logits(model, inputs)
            assert apart(ensemble(inputs)[0], expected) <= 2e-5, (tokens, left)
