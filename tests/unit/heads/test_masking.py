"""Masking heads and removing the mask, and listing heads."""

from typing import Any

import pytest
import torch

from hydra_ensembles.errors import ConfigError, HeadError
from hydra_ensembles.fingerprints import model_fingerprint
from hydra_ensembles.heads.masking import masked
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import HEADS, LAYERS, random_batches, random_ensemble, without_heads

UNEQUAL = (((0, 2), (1,), (0, 1, 2, 3)), ((1, 2, 3), (), (0, 3)))  # two members


def model_and_inputs(**options: Any) -> tuple[Ensemble, Any]:
    ensemble = random_ensemble(**options)
    return ensemble, random_batches(ensemble)[0][0]


def test_restores_every_bit_whatever_happens() -> None:
    ensemble = random_ensemble()
    with torch.no_grad():
        ensemble.encoder.layers[1].attention.out[2] = torch.tensor(-0.0)
        ensemble.encoder.layers[1].attention.out[3, 0, :3] = torch.tensor([torch.nan, torch.inf, 5e-324])
    before = model_fingerprint(ensemble)
    with masked(ensemble, [(1, 2), (1, 3), (0, 0)]):
        assert model_fingerprint(ensemble) != before
    assert model_fingerprint(ensemble) == before
    for error, heads in ((KeyboardInterrupt, [(0, 0), (2, 1)]), (HeadError, [(0, 0), (0, HEADS)])):
        with pytest.raises(error), masked(ensemble, heads):
            raise KeyboardInterrupt
        assert model_fingerprint(ensemble) == before


@pytest.mark.parametrize("first_off", [0, 1])
def test_masks_add_up_and_come_off_in_any_order(first_off: int) -> None:
    ensemble, inputs = model_and_inputs()
    before, heads = model_fingerprint(ensemble), ({(0, 0), (1, 1)}, {(1, 1), (2, 2)})
    masks = [masked(ensemble, one) for one in heads]
    assert [mask.__enter__() for mask in masks] == [ensemble, ensemble]
    torch.testing.assert_close(ensemble(inputs), without_heads(ensemble, heads[0] | heads[1])(inputs))
    masks[first_off].__exit__(None, None, None)
    torch.testing.assert_close(ensemble(inputs), without_heads(ensemble, heads[1 - first_off])(inputs))
    masks[1 - first_off].__exit__(None, None, None)
    assert model_fingerprint(ensemble) == before


def test_gradients_inside_and_across_the_end_of_a_mask() -> None:
    ensemble = random_ensemble().train()
    inputs, labels = random_batches(ensemble)[0]
    parameters = dict(ensemble.named_parameters())
    with masked(ensemble, [(1, 1)]):
        torch.nn.functional.cross_entropy(ensemble(inputs)[0], labels).backward()
        late = ensemble(inputs)
    assert all(parameter is parameters[name] for name, parameter in ensemble.named_parameters())  # for optimisers
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ensemble.parameters())
    gradient = ensemble.encoder.layers[1].attention.qkv.grad
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))  # a masked head gets no gradient
    assert gradient[0].abs().max() > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


SHARED: dict[str, Any] = {"heads": ((tuple(range(HEADS)),) * LAYERS,) * 3}


@pytest.mark.parametrize(
    ("options", "member", "heads", "off"),
    [
        ({"heads": UNEQUAL}, 0, [(0, 2), (2, 3)], [[(0, 2), (2, 3)], []]),
        ({"heads": UNEQUAL}, 1, [(0, 2), (2, 3)], [[], [(0, 2), (2, 3)]]),
        ({"heads": UNEQUAL}, None, [(0, 2), (0, 0)], [[(0, 2), (0, 0)], [(0, 2)]]),  # only the first has head 0.0
        ({**SHARED, "sharing": Sharing(attention=True)}, None, [(0, 2)], [[(0, 2)]] * 3),
        ({**SHARED, "trunk": 1}, None, [(0, 2)], [[(0, 2)]] * 3),
    ],
)
def test_each_member_answers_as_it_does_alone_without_its_heads(
    options: dict[str, Any], member: int | None, heads: list[Any], off: list[list[tuple[int, int]]]
) -> None:
    ensemble, inputs = model_and_inputs(**options)
    before = ensemble(inputs)
    with masked(ensemble, heads, member):
        logits = ensemble(inputs)
    for index, gone in enumerate(off):
        alone = ensemble.member(index)
        with masked(alone, gone):
            torch.testing.assert_close(logits[index], alone(inputs)[0])
        assert torch.equal(logits[index], before[index]) == (not gone)
    if len(off) == 3:  # one member cannot lose a head of shared attention
        with pytest.raises(HeadError, match="layer 0"), masked(ensemble, heads, member=1):
            pass


@pytest.mark.parametrize(
    ("heads", "member", "error", "token"),
    [
        ([(0, 9)], None, HeadError, r"0\.9 does not exist.*\[0, 2\].*\[1, 2, 3\]"),
        ([(0, 3)], 0, HeadError, r"0\.3 was pruned.*\[0, 2\]"),
        ([(0, 2, "text")], None, HeadError, "'text'"),
        ([(0, 2)], 2, ConfigError, "member 2"),
    ],
)
def test_what_does_not_exist(heads: list[Any], member: int | None, error: type[Exception], token: str) -> None:
    with pytest.raises(error, match=token), masked(random_ensemble(heads=UNEQUAL), heads, member):
        pass
