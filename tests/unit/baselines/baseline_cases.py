"""Helpers for the tests of all baselines: tiny models, a short training, an interrupted run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_models import same_state
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.training.loop import Learner
from hydra_ensembles.training.recipe import Recipe
from processes import count_calls
from random_ensembles import random_batches, random_ensemble

QUICK = Recipe(optimizer="sgd", learning_rate=0.02, steps=4, schedule="constant", dropout=0.1)
KINDS = ("image-cls", "text-post-norm")


def single(kind: str = "image-cls", seed: int = 0, **options: Any) -> Ensemble:
    return random_ensemble(kind, seed=seed, **options)


def some(model: Ensemble, sizes: tuple[int, ...] = (6, 6, 3), seed: int = 0) -> list[Any]:
    return random_batches(model, sizes, 100 + seed)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: Ensemble, other: Ensemble) -> None:
    assert one.config == other.config
    assert same_state(one, other)


def assert_an_ensemble(found: Ensemble, source: Ensemble, folder: Path) -> None:
    """Check that it predicts, saves and loads without extras, runs optimized, and records its history."""
    inputs = some(source)[0][0]
    logits = found(inputs)
    assert logits.shape == (found.num_members, 6, found.num_classes)
    assert len(found.metadata.history) > len(source.metadata.history)
    found.save_pretrained(folder)
    torch.testing.assert_close(Ensemble.from_pretrained(folder)(inputs), logits)
    fast = found.optimize(plans=["batched"], compile=False)
    torch.testing.assert_close(fast(inputs), logits)
    assert found.predict(inputs).probs.shape == (6, found.num_classes)


def assert_resumes(make: Callable[..., Ensemble], folder: Path, monkeypatch: pytest.MonkeyPatch, stop: int = 3) -> None:
    """Check that a run interrupted at update number `stop` resumes from its checkpoint and gives the same bits."""
    whole, made = make(), list[int]()
    with monkeypatch.context() as patch:
        count_calls(patch, Learner, "update", lambda: made.append(1), lambda: len(made) == stop + 1)
        with pytest.raises(KeyboardInterrupt):
            make(output=folder, checkpoint_every=1)
    made.clear()
    count_calls(monkeypatch, Learner, "update", lambda: made.append(1))
    assert_same(make(output=folder, checkpoint_every=1), whole)
    rest = len(made)
    make(output=folder, checkpoint_every=1)  # finished: nothing is trained again
    assert len(made) == rest
