"""Local attention windows against their definition, and behaviour of rotary models beyond the contract tests."""

import pytest
import torch
from torch import Tensor

from random_ensembles import random_batches, random_ensemble


def test_padding_far_from_all_words_stays_a_number_and_changes_no_answer() -> None:
    model = random_ensemble("text-rotary-local")
    (inputs, _), *_ = random_batches(model, (3,))
    mask = torch.arange(7)[None] < torch.tensor([[1], [2], [7]])
    answer = model({**inputs, "attention_mask": mask})
    assert answer.isfinite().all()
    short = model({"input_ids": inputs["input_ids"][:1, :1], "attention_mask": mask[:1, :1]})
    assert torch.allclose(answer[:, :1], short)


@torch.no_grad()
def test_one_program_serves_texts_shorter_and_longer_than_the_window() -> None:
    model = random_ensemble("text-rotary-local", dtype=torch.float32)
    tokens, samples = torch.export.Dim("tokens", max=8), torch.export.Dim("samples")
    given = torch.randint(20, (3, 5)), torch.ones(3, 5, dtype=torch.long)
    shapes = {"inputs": {0: samples, 1: tokens}, "attention_mask": {0: samples, 1: tokens}}
    names = dict(zip(shapes, given, strict=True))
    program = torch.export.export(model, (), names, dynamic_shapes=shapes).module()
    for length in (2, 8):
        ids, mask = torch.randint(20, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, 1:] = 0
        assert torch.allclose(program(inputs=ids, attention_mask=mask), model(ids, mask), atol=1e-5)


@pytest.mark.parametrize("shape", ["image-rotary", "text-rotary-local"])
def test_autocast_trains_what_it_turns(shape: str) -> None:
    model = random_ensemble(shape, dtype=torch.float32).train()
    (inputs, _), *_ = random_batches(model, (3,))
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs.float() if isinstance(inputs, Tensor) else inputs).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
