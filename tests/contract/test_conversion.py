"""Converted == original, for every architecture."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import ArchitectureCase, Inputs, relative_error
from contract.models import ALL_CASES, base, original

every_architecture = pytest.mark.parametrize("case", ALL_CASES, ids=str)
resizable = pytest.mark.parametrize("case", [case for case in ALL_CASES if case.other_inputs], ids=str)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@every_architecture
@torch.no_grad()
def test_logits_equal_the_originals(case: ArchitectureCase) -> None:
    model, ensemble, inputs = original(case), base(case), case.inputs()
    logits = ensemble(inputs)
    expected = case.logits(model, inputs)
    assert ensemble.num_members == 1
    assert logits.shape == (1, *expected.shape)
    assert relative_error(logits[0], expected) < 1e-5


@resizable
@torch.no_grad()
def test_other_sizes_equal_the_originals(case: ArchitectureCase) -> None:
    model, ensemble = original(case), base(case)
    for make in case.other_inputs:
        inputs = make()
        assert relative_error(ensemble(inputs)[0], case.logits(model, inputs)) < 1e-5


@every_architecture
@torch.no_grad()
def test_bfloat16_stays_within_its_rounding_and_the_original_is_not_touched(case: ArchitectureCase) -> None:
    model, inputs = original(case), case.inputs()
    exact = case.logits(model, inputs)
    half = copy.deepcopy(model).to(torch.bfloat16)
    rounded = cast(inputs, torch.bfloat16)
    theirs = case.logits(half, rounded).float()
    ensemble = he.convert(half, **case.convert_kwargs)
    allowed = 2 * (theirs - exact).abs().max() + exact.abs().max() * 2**-7
    assert (ensemble(rounded)[0].float() - exact).abs().max() <= allowed
    for parameter in ensemble.parameters():
        parameter.zero_()
    assert torch.equal(case.logits(half, rounded).float(), theirs)


@every_architecture
def test_gradients_equal_the_originals_in_training(case: ArchitectureCase) -> None:
    model, inputs = copy.deepcopy(original(case)).train(), case.inputs()
    ensemble = he.convert(model, **case.convert_kwargs).train()
    logits = case.logits(model, inputs)
    labels = torch.arange(len(logits)) % logits.shape[1]
    F.cross_entropy(logits, labels).backward()
    F.cross_entropy(ensemble(inputs)[0], labels).backward()

    holder = he.convert(_holding_gradients(model), **case.convert_kwargs, probe=False)  # no useful logits to compare
    expected = dict(holder.named_parameters())
    scale = max(parameter.abs().max().item() for parameter in expected.values())
    found = {name: parameter.grad for name, parameter in ensemble.named_parameters()}
    for name, gradient in found.items():
        assert gradient is not None, name
        if case.one_layer and name.startswith("encoder.layers."):
            leaf = name.split(".", 3)[3]
            gradient = sum(one for other, one in found.items() if other.endswith(f".{leaf}") and other[:7] == "encoder")
        assert (gradient - expected[name]).abs().max() <= 1e-4 * scale, name


def _holding_gradients(model: nn.Module) -> nn.Module:
    """A copy whose parameters hold the gradients: converting it rearranges them as it does weights."""
    holder = copy.deepcopy(model)
    for mine, theirs in zip(holder.parameters(), model.parameters(), strict=True):
        mine.data = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
    return holder
