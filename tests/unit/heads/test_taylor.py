"""Taylor scores against plain autograd, the data they use, and every mistake a caller can make."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.heads.taylor import taylor
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import HEADS, LAYERS, SHAPES, Batch, random_batches, random_ensemble, without_heads


def model_and_batches(sizes: tuple[int, ...] = (5, 5, 2), **options: Any) -> tuple[Ensemble, list[Batch]]:
    ensemble = random_ensemble(**options)
    return ensemble, random_batches(ensemble, sizes)


def joined(batches: list[Batch]) -> Batch:
    labels = torch.cat([labels for _, labels in batches])
    first = batches[0][0]
    if isinstance(first, Tensor):
        return torch.cat([inputs for inputs, _ in batches if isinstance(inputs, Tensor)]), labels
    return {key: torch.cat([inputs[key] for inputs, _ in batches]) for key in first}, labels  # type: ignore[index]


def slow_scores(
    ensemble: Ensemble, inputs: Any, labels: Tensor, layers: list[int], off: set[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """The formula again: one backward pass from the mean loss over all samples, then a loop over heads."""
    left = without_heads(ensemble, off)
    F.cross_entropy(left(inputs)[0], labels).backward()
    scores = {}
    for layer in layers:
        weight = attention_of(left, layer).qkv
        sensitivity = (weight.detach() * weight.grad).abs()  # [H, 3, d_k, d]
        for row, head in enumerate(left.config.heads[0][layer]):
            scores[layer, head] = sum(float(sensitivity[row, part].mean()) for part in range(3)) / 3
    return scores


def lowest(scores: dict[tuple[int, int], float], count: int) -> list[tuple[int, int]]:
    return sorted(scores, key=lambda head: (scores[head], head))[:count]


class TestScores:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_global(self, shape: str) -> None:
        ensemble, batches = model_and_batches((5, 1, 3), shape=shape)  # unequal: means of batches differ
        ranking = taylor(ensemble, batches, budget=3, scope="global")
        counts = ensemble.config.head_counts  # attention pooling included
        expected = slow_scores(ensemble, *joined(batches), list(range(len(counts))), set())
        order = lowest(expected, sum(counts))
        stays = [head for head in order if head[0] == LAYERS][-1:]  # the best pooling head, if any
        order = [head for head in order if head not in stays]
        assert [head[:2] for head in ranking.heads] == order
        assert ranking.scores == pytest.approx([expected[head] for head in order], rel=1e-9)
        assert ranking.only is None

    @pytest.mark.parametrize("shape", ["image-cls", "text-mean-post-norm"])
    @pytest.mark.parametrize("each", [1, 3])
    def test_layer_by_layer(self, shape: str, each: int) -> None:
        ensemble, batches = model_and_batches((4, 2), shape=shape, seed=3)
        ranking = taylor(ensemble, batches, budget=each * LAYERS)
        off: list[tuple[int, int]] = []
        expected: list[float] = []
        for layer in range(LAYERS):  # score, remove, rescore the rest
            scores = slow_scores(ensemble, *joined(batches), [layer], set(off))
            off += lowest(scores, each)
            expected += [scores[head] for head in off[-each:]]
        assert [head[:2] for head in ranking.heads] == off
        assert ranking.scores == pytest.approx(expected, rel=1e-9)
        assert len(ranking) == ranking.only == each * LAYERS

    def test_ties_go_to_the_first_head(self) -> None:
        ensemble = random_ensemble()
        with torch.no_grad():
            for layer in ensemble.encoder.layers:
                layer.attention.out.zero_()
        ranking = taylor(ensemble, random_batches(ensemble), budget=3, scope="global")
        assert [head[:2] for head in ranking.heads] == list(itertools.product(range(LAYERS), range(HEADS)))


class TestCalibrationData:
    def test_seeds_draw_different_batches(self) -> None:
        ensemble, batches = model_and_batches((3,) * 8)
        options: dict[str, Any] = {"budget": 3, "scope": "global"}
        drawn = [taylor(ensemble, batches, seed=seed, calibration_batches=2, **options) for seed in range(6)]
        assert len({tuple(ranking.provenance["batches"]) for ranking in drawn}) > 3
        assert len({ranking.scores for ranking in drawn}) > 3
        chosen = drawn[0].provenance["batches"]
        assert taylor(ensemble, [batches[index] for index in chosen], **options).scores == drawn[0].scores

    def test_a_loader_reads_only_what_is_drawn_and_a_stream_gives_the_same(self) -> None:
        ensemble, batches = model_and_batches((3,) * 6)
        images, labels = joined(batches)
        read: list[int] = []

        def collate(rows: list[int]) -> Batch:
            read.extend(rows)
            return images[rows], labels[rows]  # type: ignore[index]

        loader: DataLoader[Any] = DataLoader(range(18), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        ranking = taylor(ensemble, loader, budget=3, seed=1, calibration_batches=2)
        assert ranking == taylor(ensemble, batches, budget=3, seed=1, calibration_batches=2)
        assert ranking == taylor(ensemble, iter(batches), budget=3, seed=1, calibration_batches=2)
        assert read == [3 * batch + sample for batch in ranking.provenance["batches"] for sample in range(3)]


def test_dropout_is_off() -> None:
    ensemble, batches = model_and_batches()
    noisy = replace(ensemble.config.encoder, attention_dropout=0.5, output_dropout=0.5, drop_path=(0.5,) * LAYERS)
    trained = Ensemble.from_state(replace(ensemble.config, encoder=noisy), ensemble.state_dict()).train()
    assert taylor(trained, batches, budget=3).scores == taylor(ensemble, batches, budget=3).scores
