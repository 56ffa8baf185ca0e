"""Temperature and threshold: the minimum of the NLL, the accepted share, and refusals."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from checkpoint_models import labelled
from hydra_ensembles.calibrate import COLDEST, HOTTEST, calibrate, fit_calibration
from hydra_ensembles.errors import ConfigError, DataError, HydraWarning
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.familiarity import fit_familiarity
from hydra_ensembles.model.ensemble import Ensemble, weights_of
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.prediction import Prediction
from random_ensembles import noisy, small


def tiny(members: int = 2, classes: int = 4) -> Ensemble:
    config = small("image", classes, members, width=8, layers=1, heads=2, head_dim=4, mlp_width=8)
    return noisy(config, noise=0.5, metadata=Metadata(history=("made",), metrics={"kept": 1.0}))


def sample(members: int, count: int, classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Member logits with some signal, scaled by `scale`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    logits = torch.randn(members, count, classes, generator=generator) + F.one_hot(labels, classes)
    return logits * scale, labels


def nll(logits: Tensor, labels: Tensor, temperature: tuple[float, ...]) -> float:
    """The definition, as a loop over members: one temperature after the mean, or one per member before it."""
    degrees = temperature if len(temperature) > 1 else (1.0,) * len(logits)
    members = [(one.double() / t).log_softmax(-1) for one, t in zip(logits, degrees, strict=True)]
    mean = torch.stack(members).logsumexp(0) - math.log(len(members))
    return F.cross_entropy(mean / (temperature[0] if len(temperature) == 1 else 1.0), labels).item()


@settings(max_examples=15, deadline=None)
@given(
    members=st.integers(1, 3),
    count=st.integers(2, 40),
    classes=st.integers(2, 5),
    scale=st.floats(0.01, 30.0),
    seed=st.integers(0, 1000),
    per_member=st.booleans(),
    share=st.floats(0.01, 1.0),
    score=st.sampled_from(["msp", "entropy", "mutual_information", "max_logit", "energy"]),
)
def test_nll_never_worsens_and_the_threshold_accepts_the_share(
    members, count, classes, scale, seed, per_member, share, score
):
    assume(members > 1 or score != "mutual_information")
    logits, labels = sample(members, count, classes, scale, seed)
    fitted = fit_calibration(logits, labels, share=share, score=score, per_member=per_member)
    temperature = fitted.temperature
    assert len(temperature) in (1, members if per_member else 1)
    assert nll(logits, labels, temperature) <= nll(logits, labels, (1.0,)) + 1e-12
    prediction, plain = fitted.prediction(logits), Prediction.from_logits(logits)
    assert int(prediction.accept.sum()) >= min(share * (count + 1), count) - 1e-9
    fewer = int((prediction.score() < fitted.threshold).sum())  # a smaller threshold would not suffice
    assert fewer < share * (count + 1)
    assert torch.equal(prediction.score(), plain.score(score))  # scores ignore the temperature
    if len(temperature) == 1:
        assert torch.equal(prediction.label, plain.label)
    assert ((prediction.p_value() <= 1 - share) <= ~prediction.accept).all()


def prior(temperature: tuple[float, ...], count: int) -> float:
    """The term added to the NLL of `count` samples: log temperatures are normal with mean 0, deviation 0.5."""
    return sum(math.log(one) ** 2 for one in temperature) / (2 * 0.5**2 * count)


@pytest.mark.parametrize("count", [20, 200])
def test_the_found_temperatures_are_the_likeliest_under_the_prior(count):
    logits, labels = sample(3, count, 5, 4.0, seed=1)
    found = fit_calibration(logits, labels).temperature
    steps = torch.linspace(math.log(COLDEST), math.log(HOTTEST), 1001).exp().tolist()
    best = min(nll(logits, labels, (one,)) + prior((one,), count) for one in steps)
    assert nll(logits, labels, found) + prior(found, count) <= best + 1e-9

    def cost(logs) -> float:
        degrees = tuple(np.exp(logs).tolist())
        return nll(logits, labels, degrees) + prior(degrees, count)

    each = np.log(fit_calibration(logits, labels, per_member=True).temperature)
    assert cost(each) <= minimize(cost, each, bounds=[(-3, 3)] * 3).fun + 1e-10  # a joint minimum over members


@pytest.mark.filterwarnings("error")
def test_the_temperature_stays_exactly_one_where_asked_or_where_none_is_better():
    assert fit_calibration(torch.zeros(2, 20, 3), torch.arange(20) % 3).temperature == (1.0,)
    assert fit_calibration(*sample(2, 50, 3, 10.0, seed=3), temperature=False).temperature == (1.0,)


def test_separable_data_stay_within_the_range_and_warn():
    labels = torch.arange(3000) % 3
    logits = F.one_hot(labels, 3).float()[None]
    for separable, bound in ((logits / 10, COLDEST), (-5 * logits, HOTTEST)):
        with pytest.warns(UserWarning, match=f"temperature {bound:g}"):
            fitted = fit_calibration(separable, labels)
        assert fitted.temperature[0] == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("per_member", [False, True])
def test_labels_that_do_not_fit_are_told_of(per_member):
    """The prior keeps the temperature away from its bound, which used to be the only sign of wrong labels."""
    logits, labels = sample(2, 140, 7, 3.0, seed=6)
    with warnings.catch_warnings(action="error"):
        fit_calibration(logits, labels, per_member=per_member)
    with pytest.warns(UserWarning, match=r"1\.946 for a guess"):
        fit_calibration(logits, (labels + 1) % 7, per_member=per_member)


def test_too_few_samples_for_the_share_accept_everything_and_say_so():
    logits, labels = sample(2, 18, 3, 1.0, seed=6)
    with pytest.warns(UserWarning, match="takes 19 samples, but there are 18"):
        fitted = fit_calibration(logits, labels, share=0.95)
    assert fitted.prediction(100 * logits).accept.all()
    assert fit_calibration(logits, labels, share=1.0).prediction(logits).accept.all()  # requested, so no warning


LOGITS, LABELS = sample(2, 10, 3, 1.0, seed=5)


def test_data_that_cannot_calibrate_are_refused():
    with pytest.raises(DataError, match="\\(0, 3, 0\\)"):
        fit_calibration(LOGITS.index_fill(1, torch.tensor(3), math.nan), LABELS)
    with pytest.raises(DataError, match="10 inputs"):
        fit_calibration(LOGITS, LABELS[:9])


def validation(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    return labelled(tiny().config, count, seed=7)


def test_a_class_without_samples_is_said_once_whether_familiarity_was_fitted_before_or_not():
    images, labels = (torch.cat(parts) for parts in zip(*validation(200), strict=True))
    some = [(images[labels != 2], labels[labels != 2])]
    fitted = fit_familiarity(tiny(), validation(200))
    for ensemble in (tiny(), fitted):
        with pytest.warns(HydraWarning) as said:
            calibrate(ensemble, [(images[labels != 2] + 1, some[0][1])])
        assert sum("no samples of 2" in str(one.message) for one in said) == 1


def test_the_digest_of_the_weights_tells_that_they_were_edited():
    data, fresh = validation(), labelled(tiny().config, 40, seed=8)
    calibrated = calibrate(tiny(), data)
    assert calibrated.metadata.calibration.weights == weights_of(calibrated)
    with warnings.catch_warnings(action="error"):
        evaluate(calibrated, fresh, progress=False)
        evaluate(Ensemble.from_state(calibrated.config, calibrated.state_dict(), calibrated.metadata).bfloat16(), fresh)
    with torch.no_grad():
        next(calibrated.parameters()).add_(1.0)
    with pytest.warns(HydraWarning, match="calibrate again"):
        evaluate(calibrated, fresh, progress=False)


def test_parameters_that_were_frozen_stay_so():
    model = tiny()
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(False)
    trains = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for copy in (calibrate(model, validation()), fit_familiarity(model, validation())):
        assert [name for name, parameter in copy.named_parameters() if parameter.requires_grad] == trains


@pytest.mark.parametrize("per_member", [False, True])
def test_a_calibrated_ensemble_predicts_and_abstains(per_member):
    ensemble, data = tiny(), validation()
    labels = torch.cat([target for _, target in data])
    calibrated = calibrate(ensemble, data, share=0.8, score="entropy", per_member=per_member, familiarity=None)
    calibration, metrics = calibrated.metadata.calibration, calibrated.metadata.metrics
    assert (calibration.score, calibration.accepted_share) == ("entropy", 0.8)
    assert len(calibration.temperature) == (2 if per_member else 1)
    again = calibrate(calibrated, data, share=0.8, score="entropy", per_member=per_member, familiarity=None)
    assert again.metadata.calibration == calibration  # replaced, not stacked
    assert (metrics["kept"], metrics["validation/accepted_share"]) == (1.0, 33 / 40)  # ⌈0.8 · 41⌉ of 40
    assert metrics["validation/nll"] <= metrics["validation/nll_uncalibrated"]
    predictions = Prediction.concat([calibrated.predict(images) for images, _ in data])
    assert int(predictions.accept.sum()) == 33
    found = F.nll_loss(predictions.log_probs, labels).item()
    assert found == pytest.approx(metrics["validation/nll"], rel=1e-5)
    wrong = (predictions.label != labels)[predictions.accept].double().mean().item()
    assert wrong == pytest.approx(metrics["validation/risk_of_accepted"])


def test_a_member_taken_out_does_not_keep_the_calibration_of_all():
    data = validation()
    calibrated = calibrate(tiny(), data)
    member = calibrated.member(1)
    assert (member.metadata.calibration, member.metadata.metrics) == (None, {})
    assert member.metadata.history == calibrated.metadata.history
    single = calibrate(tiny(members=1), data)
    assert single.member(0).metadata == single.metadata  # a single member keeps it
    with pytest.raises(ConfigError, match="mutual_information"):  # one member cannot disagree
        calibrate(single, ["not read"], score="mutual_information")


def test_neither_calibrations_nor_distances_follow_a_callers_autocast():
    """Half-precision features are used as given; distances are not computed in half precision."""
    model, data = tiny(), validation(200)
    features, logits = torch.randn(2, 50, 8), torch.randn(2, 50, 4)
    wanted = calibrate(model, data).metadata
    with torch.autocast("cpu", torch.bfloat16):
        found = calibrate(model, data).metadata
        distances = wanted.familiarity.scores(features, logits)
        assert torch.is_autocast_enabled("cpu")
    for name in ("calibration", "familiarity", "metrics"):
        assert getattr(found, name) == getattr(wanted, name)
    assert torch.equal(distances, wanted.familiarity.scores(features, logits))
