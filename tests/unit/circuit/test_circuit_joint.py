"""Circuits over both towers of a dual encoder: exact == naive."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from circuit_models import evidence
from hydra_ensembles.digest import digest
from hydra_ensembles.errors import HydraError
from zero_shot_models import NAMES, TEMPLATES, dual_of

CASES = {case.name: case for case in DUAL_CASES}
HALF = [(layer, head, tower) for layer in range(2) for head in (0, 2) for tower in ("image", "text")]  # half of them
KNOWN, ODD = 14, 9  # numbers of ID and OOD samples
Batch = tuple[torch.Tensor, torch.Tensor]


@cache
def dual_in_float64(name: str = "open_clip-nonscalar") -> he.DualEncoder:
    """Cached; tests must not modify it."""
    return dual_of(CASES[name]).double()


@cache
def batches(dual: he.DualEncoder, count: int, seed: int) -> list[Batch]:
    """Random images in two batches of different size; about two of three labels agree with the model."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        answers = he.zero_shot(dual, NAMES)(images)[0].argmax(-1)
    other = torch.randint(0, len(NAMES), (count,), generator=generator)
    labels = torch.where(torch.rand(count, generator=generator) < 0.67, answers, other)
    return [(images[:7], labels[:7]), (images[7:], labels[7:])]


def extract(
    dual: he.DualEncoder, method: Any, labelled_by: he.DualEncoder | None = None, several: bool = False, **settings: Any
) -> he.HeadRanking:
    options = {"score": "avg", "budget": 4, "class_names": NAMES, "templates": TEMPLATES[:2], "progress": False}
    known, odd = (batches(labelled_by or dual, count, seed) for seed, count in enumerate((KNOWN, ODD)))
    sources: Any = {"few": batches(dual, 8, 3), "more": batches(dual, 12, 4)} if several else odd
    return he.extract_circuit(dual, known, sources, method=method, **{**options, **settings})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("open_clip-no-text-projection", {"budget": 1}),
        ("open_clip-nonscalar", {"score": "acc", "budget": 2}),
        ("open_clip-nonscalar", {"score": "ood", "budget": 2, "several": True}),
        ("open_clip-nonscalar", {"budget": 2, "ties": "order"}),
        ("transformers-quickgelu", {"budget": 8, "gone": HALF, "batch_size": 5, "max_memory": 20000}),  # all heads
    ],
    ids=str,
)
def test_exact_equals_naive(name: str, settings: dict[str, Any]) -> None:
    whole = dual_in_float64(name)
    dual = he.prune(whole, settings["gone"]) if "gone" in settings else whole
    options = {key: value for key, value in settings.items() if key != "gone"}
    naive, exact = (extract(dual, method, labelled_by=whole, **options) for method in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)
    assert exact.provenance["model_forwards"] < naive.provenance["model_forwards"]
    if settings["budget"] == 8:
        assert {head.tower for head in exact.heads} == {"image", "text"}


def test_the_score_is_that_of_the_pruned_model_also_after_a_stop(tmp_path: Path) -> None:
    dual, before = dual_in_float64(), digest(dual_in_float64())
    ranking = extract(dual, "exact", score="acc", budget=5)
    assert digest(dual) == before
    pruned = he.zero_shot(he.prune(dual, ranking.heads), NAMES, TEMPLATES[:2])
    data = batches(dual, KNOWN, 0)
    with torch.no_grad():
        right = sum(int((pruned(images)[0].argmax(-1) == labels).sum()) for images, labels in data)
    assert ranking.scores[-1] == right / KNOWN
    extract(dual, "exact", score="acc", budget=1, output=tmp_path)
    resumed = extract(dual, "exact", score="acc", budget=5, output=tmp_path)
    assert (resumed.heads, resumed.scores) == (ranking.heads, ranking.scores)
    with pytest.raises(HydraError, match="candidates"):
        extract(dual, "exact", score="acc", budget=5, output=tmp_path, templates="the {label}")
