"""Rewriting weights for inference keeps results, and simplifies what it promises."""

from functools import partial

import pytest
import torch

from architectures import close as near
from hydra_ensembles.model.config import KeptHeads, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.optimize.freeze import simplified
from random_ensembles import SHAPES, random_batches, random_ensemble

UNEVEN: KeptHeads = (((0, 1, 2), (0, 3), (1,)), ((0, 2), (0, 1, 2, 3), (2, 3)), ((1,), (3,), (0, 1, 2)))
WITH_GAPS: KeptHeads = (((), (0, 3), ()), ((0, 2), (), ()), ((1,), (3,), ()))
HYDRA = Sharing(stem=True, mlp=True)
close = partial(near, tolerance=1e-10)
CASES: dict[str, tuple[Sharing, KeptHeads | None]] = {
    "single": (Sharing(), None),
    "trunk": (HYDRA, tuple(((0, 1, 2, 3), *member[1:]) for member in UNEVEN)),
    "nothing": (Sharing(), UNEVEN),
    "hydra": (HYDRA, UNEVEN),
    "all-but-heads": (Sharing(stem=True, mlp=True, norms=True, readout=True), UNEVEN),
    "gaps": (HYDRA, WITH_GAPS),
    "gaps-nothing": (Sharing(), WITH_GAPS),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_stay_for_every_plan_sharing_and_architecture(shape: str, case: str) -> None:
    sharing, heads = CASES[case]
    ensemble = random_ensemble(shape, heads, sharing, trunk=int(case == "trunk"))
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    inputs = random_batches(ensemble, (3, 1))
    expected = [ensemble(batch) for batch, _ in inputs]
    assert close(simplified(ensemble)(inputs[0][0]), expected[0])
    fast = ensemble.optimize(plans=["batched", "loop"])
    for plan in ("batched", "loop"):
        run = fast.module(plan)
        assert all(close(run(batch), logits) for (batch, _), logits in zip(inputs, expected, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ensemble.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_members_that_differ_in_their_classifiers_alone_stay_the_same(shape: str) -> None:
    first, second = random_ensemble(shape), random_ensemble(shape)
    second.get_parameter("readout.classifier.weight").add_(1.0)
    ensemble = Ensemble.stack([first, second])
    batch = random_batches(ensemble, (3,))[0][0]
    assert close(ensemble.optimize()(batch), ensemble(batch))


@torch.no_grad()
def test_images_of_another_size_take_the_usual_way() -> None:
    ensemble = random_ensemble("image-cls", UNEVEN, HYDRA)
    fast = ensemble.optimize()
    other = torch.randn(2, 3, 8, 4, dtype=torch.float64)
    assert close(fast(other), ensemble(other))
