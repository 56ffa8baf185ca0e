"""Cascades: who answers, with which shares, and that sharing layers, optimizing and saving change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.cascade import Cascade, common_layers, doubt_of, sizes_up_to
from hydra_ensembles.errors import ConfigError, TooFewSamplesError
from random_ensembles import noisy, small

CLASSES = 4


def tuned(base: he.Ensemble, seed: int, noise: float = 0.1) -> he.Ensemble:
    draws = torch.Generator().manual_seed(seed)
    state = {name: one + noise * torch.randn(one.shape, generator=draws) for name, one in base.state_dict().items()}
    return he.Ensemble.from_state(base.config, state, base.metadata)


@pytest.fixture(scope="module")
def base() -> he.Ensemble:
    return noisy(small(classes=CLASSES, layers=3)).with_metadata(labels=tuple("abcd"))


@pytest.fixture(scope="module")
def held_out(base: he.Ensemble) -> list[tuple[Tensor, Tensor]]:
    stem = base.config.stem
    draws = torch.Generator().manual_seed(7)
    shape = (100, stem.channels, *stem.image_size)
    return [
        (torch.randn(shape, generator=draws), torch.randint(0, CLASSES, (100,), generator=draws)) for _ in range(12)
    ]


@pytest.fixture(scope="module")
def chain(base: he.Ensemble, held_out: Any) -> Cascade:
    return he.cascade([base, tuned(base, 1)], held_out, ask=0.2)


def test_only_unsure_rows_go_on_and_get_the_answer_of_the_next_stage(chain: Cascade, held_out: Any) -> None:
    images = torch.cat([images for images, _ in held_out])
    p = chain.predict(images)
    first, second = (stage.predict(images).log_probs for stage in chain.stages)
    goes = doubt_of(first) > chain.settings.thresholds[0]
    assert 0.1 < goes.float().mean() < 0.3
    assert chain.settings.asked[0] <= 0.2
    assert torch.equal(p.stage, goes.long())
    torch.testing.assert_close(p.log_probs, torch.where(goes[:, None], second, first))
    assert len(chain.metadata.chosen) == 240  # a fifth of 1,200 rows
    mixed = Cascade(chain.stages, replace(chain.settings, mix=True), chain.metadata).predict(images)
    both = torch.where(goes[:, None], (first.exp() + second.exp()) / 2, first.exp())
    torch.testing.assert_close(mixed.probs, both)


def test_a_common_trunk_runs_once_and_answers_the_same(base: he.Ensemble, held_out: Any) -> None:
    models = [tuned(base, seed) for seed in range(3)]
    soup, hydra = he.soup(models), he.fuse(models, mlp="separate", average=2)
    assert common_layers(soup, hydra) == 2
    shared = he.cascade([soup, hydra], held_out, ask=0.5)
    apart = Cascade(shared.stages, replace(shared.settings, layers=0), shared.metadata)
    images = held_out[0][0]
    p, q = shared.predict(images), apart.predict(images)
    assert shared.settings.layers == 2
    assert torch.equal(p.stage, q.stage)
    assert 0 < p.stage.sum() < 100
    torch.testing.assert_close(p.log_probs, q.log_probs)
    fast = shared.optimize(images)
    r = fast.predict(images)
    assert torch.equal(p.stage, r.stage)
    torch.testing.assert_close(p.log_probs, r.log_probs, rtol=1e-4, atol=1e-4)


def test_rows_are_padded_to_few_sizes() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(20) == [2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes_up_to(128) == [8, 12, 16, 24, 32, 48, 64, 96, 128]


def test_saved_equals_loaded_with_functions_and_cascades_inside(
    chain: Cascade, base: he.Ensemble, held_out: Any, tmp_path: Path
) -> None:
    remote_model = tuned(base, 5)

    def remote(images: Tensor) -> Tensor:
        return remote_model.predict(images).probs

    nested = he.cascade([base, chain, remote], held_out, ask=[0.5, 0.3])
    images = held_out[3][0]
    p = nested.predict(images)
    assert set(p.stage.tolist()) == {0, 1, 2}
    nested.save_pretrained(tmp_path / "folder")
    nested.save_pretrained(tmp_path / "folder")
    again = he.load(tmp_path / "folder", stages={"remote": remote})
    q = again.predict(images)
    assert torch.equal(p.stage, q.stage)
    assert torch.equal(p.log_probs, q.log_probs)
    assert again.metadata == nested.metadata
    with pytest.raises(ConfigError, match="remote"):
        he.load(tmp_path / "folder")


def test_what_may_not_go_on_or_fails_is_declined(base: he.Ensemble, held_out: Any) -> None:
    calls = list[int]()

    def broken(images: Tensor) -> Tensor:
        calls.append(len(images))
        raise TimeoutError("no route")

    chain = he.cascade([base, broken], held_out, ask=0.5)
    images = held_out[0][0]
    with pytest.warns(he.HydraWarning, match="no route"):
        p = chain.limited(0.1).predict(images)
    goes = doubt_of(chain.stages[0].predict(images).log_probs) > chain.settings.thresholds[0]
    assert calls == [10]
    assert chain.faults == [0, 0]
    assert torch.equal(p.accept, ~goes)
    assert p.stage.sum() == 0
    assert {p.reason[row] for row in goes.nonzero()[:, 0].tolist()} == {"unsure"}


def test_classes_are_matched_by_name_or_refused(chain: Cascade, base: he.Ensemble, held_out: Any) -> None:
    images = held_out[0][0]
    second = chain.stages[1]
    state = dict(second.state_dict())
    order = [2, 0, 3, 1]
    for name in ("readout.classifier.weight", "readout.classifier.bias"):
        state[name] = state[name][:, order]
    turned = he.Ensemble.from_state(second.config, state, replace(second.metadata, labels=tuple("cadb")))
    p = Cascade([chain.stages[0], turned], chain.settings, chain.metadata).predict(images)
    torch.testing.assert_close(p.log_probs, chain.predict(images).log_probs)
    with pytest.raises(ConfigError, match="'b'"):
        he.cascade([base, second.with_metadata(labels=tuple("axcd"))], held_out)


def test_bad_requests_are_refused_in_a_sentence(base: he.Ensemble, held_out: Any) -> None:
    with pytest.raises(ConfigError, match="not both"):
        he.cascade([base, base], held_out, ask=0.1, cost=1.2)
    with pytest.raises(TooFewSamplesError, match="200"):
        he.cascade([base, base], held_out[:1])
    with pytest.raises(ConfigError, match="two stages"):
        he.cascade([base], held_out)


def test_cost_sets_the_share(base: he.Ensemble, held_out: Any) -> None:
    chain = he.cascade([base, base], held_out, cost=1.3)  # a second stage as dear as the first: about 30 %
    assert 0.05 < chain.settings.asked[0] < 0.6
