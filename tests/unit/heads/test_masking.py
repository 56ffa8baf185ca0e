"""Masking heads: a gate in the forward pass of this thread."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hydra_ensembles.errors import HeadError
from hydra_ensembles.heads.masking import masked
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import HEADS, LAYERS, random_batches, random_ensemble, without_heads

UNEQUAL = (((0, 2), (1,), (0, 1, 2, 3)), ((1, 2, 3), (), (0, 3)))  # two members


def model_and_inputs(**options: Any) -> tuple[Ensemble, Any]:
    ensemble = random_ensemble(**options)
    return ensemble, random_batches(ensemble)[0][0]


def test_weights_stay_and_masks_add_up_and_end_in_any_order() -> None:
    ensemble, inputs = model_and_inputs()
    before, whole = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}, ensemble(inputs)
    heads = ({(0, 0), (1, 1)}, {(1, 1), (2, 2)})
    masks = [masked(ensemble, one) for one in heads]
    assert [mask.__enter__() for mask in masks] == [ensemble, ensemble]
    torch.testing.assert_close(ensemble(inputs), without_heads(ensemble, heads[0] | heads[1])(inputs))
    assert torch.equal(copy.deepcopy(ensemble)(inputs), whole)  # what is made inside is whole
    masks[0].__exit__(None, None, None)
    torch.testing.assert_close(ensemble(inputs), without_heads(ensemble, heads[1])(inputs))
    masks[1].__exit__(None, None, None)
    for error, gone in ((KeyboardInterrupt, [(0, 0), (2, 1)]), (HeadError, [(0, 0), (0, HEADS)])):
        with pytest.raises(error), masked(ensemble, gone):
            raise KeyboardInterrupt
    assert torch.equal(ensemble(inputs), whole)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ensemble.state_dict().items())


def test_gradients_inside_across_the_end_of_a_mask_and_across_a_mask() -> None:
    ensemble = random_ensemble().train()
    inputs, labels = random_batches(ensemble)[0]

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(ensemble(inputs)[0], labels)

    weight = ensemble.encoder.layers[1].attention.qkv
    (unmasked,) = torch.autograd.grad(loss(), weight)
    whole = loss()
    with masked(ensemble, [(1, 1)]):
        (inside,) = torch.autograd.grad(loss(), weight)
        late = loss()
    assert torch.equal(torch.autograd.grad(late, weight)[0], inside)
    assert torch.equal(torch.autograd.grad(whole, weight)[0], unmasked)
    assert torch.equal(inside[1], torch.zeros_like(inside[1]))  # a masked head gets no gradient
    assert inside[0].abs().max() > 0


def test_other_threads_do_not_see_a_mask() -> None:
    ensemble, inputs = model_and_inputs()
    with ThreadPoolExecutor(1) as thread, masked(ensemble, [(1, 1)]):
        elsewhere = thread.submit(lambda: ensemble(inputs)).result()
        here = ensemble(inputs)
    assert torch.equal(elsewhere, ensemble(inputs))
    assert not torch.allclose(here, elsewhere)


def test_a_compiled_model_follows_masks() -> None:
    ensemble, inputs = model_and_inputs(heads=UNEQUAL)
    torch.compiler.reset()
    compiled = torch.compile(ensemble, fullgraph=True, backend="eager")
    with torch.no_grad():
        before = compiled(inputs)
        with masked(ensemble, [(0, 2)]):
            torch.testing.assert_close(compiled(inputs), ensemble(inputs))
        torch.testing.assert_close(compiled(inputs), before)
    torch.compiler.reset()


SHARED: dict[str, Any] = {"heads": ((tuple(range(HEADS)),) * LAYERS,) * 3}


@pytest.mark.parametrize(
    ("options", "member", "heads", "off"),
    [
        ({"heads": UNEQUAL}, 0, [(0, 2), (2, 3)], [[(0, 2), (2, 3)], []]),
        ({"heads": UNEQUAL}, 1, [(0, 2), (2, 3)], [[], [(0, 2), (2, 3)]]),
        ({"heads": UNEQUAL}, -1, [(0, 2), (2, 3)], [[], [(0, 2), (2, 3)]]),
        ({"heads": ((tuple(range(HEADS)),) * LAYERS,) * 2}, -1, [(1, 2)], [[], [(1, 2)]]),  # in one batched product
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
