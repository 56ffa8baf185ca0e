"""Columns of a comparison: the paper's, and what a model with familiarity declines."""

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.evaluation import Evaluation
from hydra_ensembles.report import COLUMNS, compare
from hydra_ensembles.report.columns import columns_for
from random_ensembles import noisy, small
from sample_evaluations import cells, evaluation


def image_batches(sizes, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(size, 3, 8, 8, generator=draw), torch.arange(size) % 3) for size in sizes]


OOD = {"near": {"close": image_batches((11,), seed=5)}, "far": {"noise": image_batches((9,), seed=6, scale=40.0)}}
DATA = image_batches((30, 30), seed=1)


@pytest.fixture(scope="module")
def known() -> he.Ensemble:
    """An ensemble with two thresholds."""
    fitted = he.fit_familiarity(noisy(small()), image_batches((60, 60), seed=2), "knn")
    return he.calibrate(fitted, image_batches((60,), seed=3), share=0.8)


@pytest.fixture(scope="module")
def found(known) -> Evaluation:
    return he.evaluate(known, DATA, OOD, name="Known", progress=False)


@pytest.fixture(scope="module")
def plain() -> Evaluation:
    return he.evaluate(noisy(small()), DATA, OOD, name="Plain", progress=False)


def test_what_is_fitted_and_what_is_declined_is_shown_unasked(known, found, plain):
    p = known.predict(OOD["far"]["noise"][0][0])
    inside = known.predict(torch.cat([inputs for inputs, _ in DATA])).score("knn")
    by_distance = he.metrics.auroc(inside, p.score("knn"))
    shown = cells(compare([plain, found]), "Known")
    assert shown["knn:far.auroc"].value == pytest.approx(by_distance, abs=1e-6)
    assert shown["far.abstained"].value == pytest.approx((~p.accept).double().mean().item(), abs=1e-6)
    assert shown["selective.accepted"].value == found.selective.accepted
    mean = (found.ood["close"].abstained + found.ood["noise"].abstained) / 2
    assert shown["all.abstained"].value == pytest.approx(mean)
    other = cells(compare([plain, found]), "Plain")
    assert {other[key].text for key in shown if key.startswith("knn:") or key.endswith("abstained")} == {"–"}


def test_without_familiarity_the_columns_are_those_of_the_paper(plain):
    assert columns_for([plain, evaluation(threshold=0.5)]) == COLUMNS
    only = he.fit_familiarity(noisy(small()), image_batches((60,), seed=2), "knn")  # no threshold, none declined
    found = he.evaluate(only, DATA, OOD, name="Fitted", progress=False)
    assert {"knn:far.auroc"} < {column.key for column in compare([found]).columns}
    assert not [column.key for column in compare([found]).columns if column.key.endswith(("abstained", "accepted"))]
