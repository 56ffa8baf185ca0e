"""Familiarity: every score against an independent computation, a model's life cycle, reasons, and bad input."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from checkpoint_models import ensemble, hydra, labelled, ragged, single, text
from hydra_ensembles.errors import ConfigError, DataError, HydraWarning
from hydra_ensembles.familiarity import SHRINKAGE, Answered, fit_familiarity, fit_on
from hydra_ensembles.metrics.distance import BY_CLASS, FAMILIARITY_NAMES
from hydra_ensembles.model.config import EnsembleConfig
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Metadata
from zero_shot_models import NAMES, dual_of

CONFIG = single()


def model(config: EnsembleConfig) -> Ensemble:
    return ensemble(config, metadata=Metadata())


def joined(data: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.cat([inputs for inputs, _ in data]), torch.cat([labels for _, labels in data])


def features_of(one: Ensemble, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return one.features_and_logits(inputs)[0].double()


RAGGED, NEW = ragged(), joined(labelled(ragged(), 40, seed=1, shift=1.0))[0]


def distances(name: str, fit: np.ndarray, labels: np.ndarray, new: np.ndarray, shrinkage: float) -> np.ndarray:
    """The score of one member in NumPy, class by class."""
    if name.endswith("++"):
        fit, new = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (fit, new))
    means = np.stack([fit[labels == one].mean(0) for one in np.unique(labels)])
    within = (fit - means[labels]).T @ (fit - means[labels]) / len(fit)

    def distance(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        covariance = covariance + shrinkage * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        inverse = np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)
        return np.einsum("bi,ij,bj->b", new - mean, inverse, new - mean)

    nearest = np.min([distance(mean, within) for mean in means], axis=0)
    return nearest - distance(fit.mean(0), np.cov(fit.T, bias=True)) if name.startswith("relative") else nearest


@pytest.mark.parametrize("name", BY_CLASS)
def test_distances_are_those_of_the_definition(name) -> None:
    one, data = model(RAGGED), labelled(RAGGED)
    inputs, labels = joined(data)
    p = fit_familiarity(one, data, name, held_out=0.0).predict(NEW)
    pairs = zip(features_of(one, inputs).numpy(), features_of(one, NEW).numpy(), strict=True)
    by_member = [distances(name, fit, labels.numpy(), new, SHRINKAGE) for fit, new in pairs]
    atol = 5e-4 if name.startswith("relative") else 1e-4  # a difference of large numbers
    np.testing.assert_allclose(p.unfamiliarity.member_scores[0].numpy(), by_member, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(p.score(name).numpy(), np.mean(by_member, axis=0), rtol=1e-4, atol=atol)
    assert one.metadata.familiarity is None  # the input is not modified


def test_pytorch_ood_agrees() -> None:
    detector = pytest.importorskip("pytorch_ood.detector")
    one, data = model(RAGGED), labelled(RAGGED)
    inputs, labels = joined(data)
    ours = fit_familiarity(one, data, "knn", held_out=0.0).predict(NEW)
    for member, (fit, new) in enumerate(zip(features_of(one, inputs), features_of(one, NEW), strict=True)):
        torch.set_default_dtype(torch.float64)  # it computes statistics in torch's default dtype
        try:
            theirs = detector.KNN(None, k=len(fit) // 50).fit_features(fit, labels).predict_features(new)
        finally:
            torch.set_default_dtype(torch.float32)
        scores = ours.unfamiliarity.member_scores[0, member].double()
        torch.testing.assert_close(scores, theirs.double(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("config", [single(), hydra(), text()], ids=["one member", "two tokens, a trunk", "text"])
def test_it_is_saved_loaded_optimized_and_evaluated(config, tmp_path) -> None:
    data, other = labelled(config), labelled(config, 40, seed=3, shift=4.0)
    names = ("mahalanobis++", "knn", "relative_mahalanobis")
    fitted = fit_familiarity(model(config), data, names)
    fitted = he.calibrate(fitted, labelled(config, 60, seed=2), share=0.9)
    inputs = joined(other)[0]
    p = fitted.predict(inputs)
    fitted.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    assert loaded.metadata == fitted.metadata
    for name in fitted.metadata.familiarity.settings.scores:
        assert torch.equal(loaded.predict(inputs).score(name), p.score(name))
        torch.testing.assert_close(fitted.optimize().predict(inputs).score(name), p.score(name), rtol=1e-3, atol=1e-4)
    assert loaded.predict(inputs).reason == p.reason
    assert torch.equal(loaded.predict(inputs).familiarity, p.familiarity)
    half = Ensemble.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.metadata == fitted.metadata  # statistics stay in float32
    assert half.predict(inputs).score("knn").dtype == torch.float32
    found = he.evaluate(fitted, data, {"other": other}, scores=("mahalanobis++", "knn"), progress=False)
    expected = he.metrics.auroc(fitted.predict(joined(data)[0]).score("knn"), p.score("knn"))
    assert found.numbers()["knn:ood.other.auroc"] == pytest.approx(expected, abs=1e-6)
    assert found.numbers()["ood.other.abstained"] == pytest.approx((~p.accept).double().mean().item())


def test_a_zero_shot_ensemble_learns_what_is_familiar() -> None:
    classifier = he.zero_shot(dual_of(DUAL_CASES[0]), NAMES)
    many = torch.randn(60, *DUAL_CASES[0].pixels().shape[1:], generator=torch.Generator().manual_seed(0))
    fitted = fit_familiarity(classifier, [(many, torch.arange(60) % len(NAMES))])
    assert fitted.predict(many).familiarity.mean() > 0.2
    assert (fitted.predict(50 + 30 * many).score("mahalanobis") > fitted.predict(many).score("mahalanobis").max()).all()


def test_a_shuffling_loader_gives_the_same_every_time() -> None:
    inputs, labels = joined(labelled(CONFIG, 120, seed=1))
    loader = DataLoader(TensorDataset(inputs, labels), 16, shuffle=True)
    for fit in (partial(he.fit_familiarity, score=["mahalanobis", "knn"]), he.calibrate):
        first, again = (fit(model(CONFIG), loader).predict(inputs) for _ in range(2))
        assert torch.equal(first.familiarity, again.familiarity)
        assert torch.equal(first.score("mahalanobis"), again.score("mahalanobis"))


def test_it_does_not_outlive_the_features_it_knows() -> None:
    fitted = fit_familiarity(model(CONFIG), labelled(CONFIG))
    assert he.prune(fitted, [(0, 0)]).metadata.familiarity is None
    assert he.fuse([fitted, he.prune(fitted, [(0, 0)])], mlp="separate").metadata.familiarity is None
    assert fitted.member(0).metadata.familiarity == fitted.metadata.familiarity  # a single member keeps it


def test_foreign_inputs_are_unfamiliar_and_p_values_of_familiar_ones_uniform() -> None:
    fitted = fit_familiarity(model(CONFIG), labelled(CONFIG, 1500), held_out=0.5)
    fresh, foreign = (fitted.predict(joined(labelled(CONFIG, 600, 9, 600, shift))[0]) for shift in (0.0, 6.0))
    for level in (0.05, 0.2, 0.5):
        assert (fresh.familiarity <= level).double().mean() == pytest.approx(level, abs=0.06)
    assert foreign.familiarity.mean() < 0.2


def test_a_class_without_samples_to_fit_is_far_from_everything() -> None:
    inputs, labels = joined(labelled(CONFIG, 120))
    known = Answered(features_of(model(CONFIG), inputs).float(), torch.zeros(1, 120, 3), labels, torch.arange(120))
    fitted = fit_on(model(CONFIG), known.pick(labels != 2), ("mahalanobis",), np.random.default_rng(0))
    rows, every = known.features[0, labels != 2].double().numpy(), known.features[0].double().numpy()
    wanted = distances("mahalanobis", rows, labels[labels != 2].numpy(), every, 0.01)
    np.testing.assert_allclose(fitted.scores(known.features, known.logits)[0, 0], wanted, rtol=1e-3, atol=1e-3)


def test_calibrate_without_familiarity_or_with_another() -> None:
    one, data = model(CONFIG), labelled(CONFIG, 200)
    few_rows = [(data[0][0][:8], data[0][1][:8])]
    assert he.calibrate(one, data, familiarity=None).metadata.familiarity is None
    for name in FAMILIARITY_NAMES:
        settings = he.calibrate(one, data, familiarity=name).metadata.familiarity.settings
        assert settings.scores == (name,)
        assert settings.threshold is not None
    with pytest.warns(HydraWarning, match="not fitted"):
        few = he.calibrate(one, few_rows)
    assert few.metadata.familiarity is None
    with pytest.raises(DataError, match="too few"):
        he.calibrate(one, few_rows, familiarity="mahalanobis")


def test_what_fitted_familiarity_does_not_certify() -> None:
    data = labelled(CONFIG, 120)
    with pytest.raises(DataError, match="fitted the familiarity"):
        he.calibrate(fit_familiarity(model(CONFIG), data), data)
    again = he.calibrate(he.calibrate(model(CONFIG), data), data)  # a half of the same data fits it again
    assert again.metadata.familiarity == he.calibrate(model(CONFIG), data).metadata.familiarity


def test_a_bank_is_drawn_from_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_ensembles.familiarity.STORED", 40)
    fitted = fit_familiarity(model(CONFIG), labelled(CONFIG, 90), "knn", held_out=0.0)
    assert fitted.metadata.familiarity.state["knn.bank"].shape == (1, 40, 8)


@pytest.mark.parametrize(
    ("data", "settings", "error", "token"),
    [
        (lambda c: [(x[y != 2], y[y != 2]) for x, y in labelled(c)], {}, DataError, "classes 2 have no samples.*'knn'"),
        (lambda c: labelled(c, 4), {"held_out": 0.0}, DataError, "4 samples of 3 classes"),
    ],
)
def test_what_cannot_be_fitted_is_named(data, settings, error, token) -> None:
    with pytest.raises(error, match=token):
        fit_familiarity(model(CONFIG), data(CONFIG), **settings)


def test_what_was_not_fitted_or_calibrated_is_named_and_labels_are_not_needed_without_classes() -> None:
    one, data = model(CONFIG), labelled(CONFIG)
    plain, fitted = one.predict(data[0][0]), fit_familiarity(one, data, held_out=0.0).predict(data[0][0])
    for call, token in (
        (lambda: plain.score("mahalanobis"), "fit_familiarity"),
        (lambda: fitted.p_value("mahalanobis"), "calibrate"),
        (lambda: fitted.score("knn"), "'knn'"),
    ):
        with pytest.raises(ConfigError, match=token):
            call()
    unlabelled = fit_familiarity(one, [inputs for inputs, _ in data], ("knn",))  # which ignores classes
    assert unlabelled.predict(data[0][0]).familiarity.shape == (16,)
