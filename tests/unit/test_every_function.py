"""Common to every function that reads a model and batches: it does not modify them, and reports what it cannot use."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as he
from hydra_ensembles.digest import digest
from hydra_ensembles.errors import DataError
from unit.pipeline import build_cases as cases

CIRCUIT: dict[str, Any] = {"score": "acc", "budget": 2, "progress": False}
TAYLOR: dict[str, Any] = {"strategy": "taylor", "prune": 3, "shared_layers": 0, "members": 2, "calibration_batches": 2}
STEPS = he.Recipe(learning_rate=0.1, steps=3, dropout=0.2)
Function = Callable[[Any, Any], Any]
FUNCTIONS: dict[str, Function] = {
    "evaluate": lambda model, data: he.evaluate(model, data, progress=False).numbers(),
    "calibrate": lambda model, data: he.calibrate(model, data, familiarity=None),
    "fit_familiarity": lambda model, data: he.fit_familiarity(model, data),
    "finetune": lambda model, data: he.finetune(model, data, STEPS, progress=False),
    "taylor": lambda model, data: he.taylor(model, data, budget=3),
    "taylor of all layers": lambda model, data: he.taylor(model, data, budget=3, scope="global", calibration_batches=2),
    **{
        method: lambda model, data, method=method: he.extract_circuit(model, data, method=method, **CIRCUIT)
        for method in ("naive", "exact")
    },
    "build": lambda model, data: he.build(model, he.HydraConfig(**TAYLOR), id=data, progress=False),
    "synthetic_ood": lambda model, data: he.data.synthetic_ood(data),
}
LABELLED = [name for name in FUNCTIONS if name != "synthetic_ood"]
AS_IT_COMES = ("evaluate", "calibrate", "fit_familiarity")  # use the loader's own order
X, Y = cases.samples(8, seed=5)


def content(found: Any) -> Any:
    """The content of a result, comparable with ==."""
    if isinstance(found, nn.Module):
        return digest(found.state_dict()), found.metadata
    if isinstance(found, he.HeadRanking):
        return found.heads, found.scores, found.provenance["data"]
    if isinstance(found, list):
        return [content({"pixels": one}) for (one,) in found]
    by_name = isinstance(found, dict) and all(isinstance(one, Tensor) for one in found.values())
    return digest(found) if by_name else found


def state(model: he.Ensemble) -> list[Any]:
    """Everything an owner relies on: tensor identities, values and flags of a model."""
    tensors = [one for weight in model.parameters() for one in (weight, weight.grad) if one is not None]
    parts = [(id(one), one.requires_grad, digest({"": one})) for one in tensors]
    return [*parts, *(module.training for module in model.modules())]


@pytest.mark.filterwarnings("ignore::hydra_ensembles.HydraWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_model_loader_and_random_numbers_are_left_alone_and_the_answer_is_the_same_again(name: str) -> None:
    """Regardless of earlier random draws and of disabled gradients, and also after an error."""
    model, generator = cases.image_model().train(), torch.Generator().manual_seed(3)
    model.encoder.layers[1].eval()
    model.readout.requires_grad_(False)
    model(X).sum().backward()
    data = TensorDataset(*cases.samples(24, seed=1))
    own: Any = DataLoader(data, 4, shuffle=True, generator=generator)
    own = cases.batches() if name in AS_IT_COMES else own

    def surroundings() -> list[Any]:
        numbers = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), generator.get_state().tolist()
        return [*state(model), numbers, random.getstate()]

    before = surroundings()
    first = content(FUNCTIONS[name](model, own))
    assert surroundings() == before
    torch.rand(5), torch.rand(2, generator=generator), random.random()
    before = surroundings()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert content(FUNCTIONS[name](model, own)) == first
    if name in LABELLED and name not in AS_IT_COMES:
        bad = TensorDataset(X, Y + 100)
        with pytest.raises(DataError, match="batch") as caught:
            FUNCTIONS[name](model, DataLoader(bad, 2, shuffle=True, generator=generator))
        assert caught.tb is not None  # frames are alive: nothing was restored merely by their end
    assert surroundings() == before
