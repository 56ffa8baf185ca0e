"""Temperature and threshold: the minimum of the NLL, the accepted share, and refusals."""

import json
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
from hydra_ensembles.calibrate import COLDEST, HOTTEST, calibrate, fit_calibration, warn_of_exchanged_classes
from hydra_ensembles.errors import ConfigError, DataError, HydraWarning
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
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
    fit = fit_calibration(logits, labels, share=share, score=score, per_member=per_member)
    temperature = fit.calibration.temperature
    assert len(temperature) == (members if per_member and members > 1 else 1)
    assert fit.nll_after <= fit.nll_before
    assert fit.nll_before == pytest.approx(nll(logits, labels, (1.0,)), rel=1e-9)
    assert fit.nll_after == pytest.approx(nll(logits, labels, temperature), rel=1e-9)
    prediction, plain = fit.calibration.prediction(logits), Prediction.from_logits(logits)
    accepted = int(prediction.accept.sum())
    assert accepted >= min(share * (count + 1), count) - 1e-9
    assert accepted / count == fit.accepted
    fewer = int((prediction.score() < fit.calibration.threshold).sum())  # a smaller threshold would not suffice
    assert fewer < share * (count + 1)
    assert torch.equal(prediction.score(), plain.score(score))  # scores ignore the temperature
    if len(temperature) == 1:
        assert torch.equal(prediction.label, plain.label)
    assert ((prediction.p_value() <= 1 - share) <= ~prediction.accept).all()
    wrong = prediction.label != labels
    assert fit.risk == pytest.approx(wrong[prediction.accept].double().mean().item())
    assert fit.accuracy == int((~wrong).sum()) / count  # divided once, as in an evaluation


def prior(temperature: tuple[float, ...], count: int) -> float:
    """The term added to the NLL of `count` samples: log temperatures are normal with mean 0, deviation 0.5."""
    return sum(math.log(one) ** 2 for one in temperature) / (2 * 0.5**2 * count)


@pytest.mark.parametrize("count", [20, 200])
def test_the_found_temperatures_are_the_likeliest_under_the_prior(count):
    logits, labels = sample(3, count, 5, 4.0, seed=1)
    fit = fit_calibration(logits, labels)
    steps = torch.linspace(math.log(COLDEST), math.log(HOTTEST), 1001).exp().tolist()
    best = min(nll(logits, labels, (one,)) + prior((one,), count) for one in steps)
    assert fit.nll_after + prior(fit.calibration.temperature, count) <= best + 1e-7

    def cost(logs) -> float:
        degrees = tuple(np.exp(logs).tolist())
        return nll(logits, labels, degrees) + prior(degrees, count)

    each = np.log(fit_calibration(logits, labels, per_member=True).calibration.temperature)
    assert cost(each) <= minimize(cost, each, bounds=[(-3, 3)] * 3).fun + 1e-10  # a joint minimum over members


@pytest.mark.filterwarnings("error")
def test_the_temperature_stays_exactly_one_where_asked_or_where_none_is_better():
    assert fit_calibration(torch.zeros(2, 20, 3), torch.arange(20) % 3).calibration.temperature == (1.0,)
    fit = fit_calibration(*sample(2, 50, 3, 10.0, seed=3), temperature=False)
    assert (fit.calibration.temperature, fit.nll_after) == ((1.0,), fit.nll_before)


def test_separable_data_stay_within_the_range_and_warn():
    labels = torch.arange(3000) % 3
    logits = F.one_hot(labels, 3).float()[None]
    for separable, bound in ((logits / 10, COLDEST), (-5 * logits, HOTTEST)):
        with pytest.warns(UserWarning, match=f"temperature {bound:g} stopped at the bound {bound:g}"):
            fit = fit_calibration(separable, labels)
        assert fit.calibration.temperature[0] == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("per_member", [False, True])
def test_labels_that_do_not_fit_are_told_of(per_member):
    """The prior keeps the temperature away from its bound, which used to be the only sign of wrong labels."""
    logits, labels = sample(2, 140, 7, 3.0, seed=6)
    with warnings.catch_warnings(action="error"):
        fit_calibration(logits, labels, per_member=per_member)
    with pytest.warns(UserWarning, match=r"likelier than a guess .* 1\.946 "):
        fit_calibration(logits, (labels + 1) % 7, per_member=per_member)


def test_too_few_samples_for_the_share_accept_everything_and_say_so():
    logits, labels = sample(2, 18, 3, 1.0, seed=6)
    with pytest.warns(UserWarning, match="takes 19 samples, but there are 18"):
        fit = fit_calibration(logits, labels, share=0.95)
    assert fit.calibration.prediction(100 * logits).accept.all()
    assert fit_calibration(logits, labels, share=1.0).accepted == 1.0  # requested, so no warning


LOGITS, LABELS = sample(2, 10, 3, 1.0, seed=5)


def test_data_that_cannot_calibrate_are_refused():
    with pytest.raises(DataError, match="\\(0, 3, 0\\)"):
        fit_calibration(LOGITS.index_fill(1, torch.tensor(3), math.nan), LABELS)
    with pytest.raises(DataError, match="10 inputs"):
        fit_calibration(LOGITS, LABELS[:9])


def validation(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    return labelled(tiny().config, count, seed=7)


def test_classes_that_are_mostly_declined_are_told_of():
    """The share is promised over all classes: a rare one may be declined entirely."""
    images, labels = (torch.cat(parts) for parts in zip(*validation(400), strict=True))
    ensemble, labels = tiny(), labels % 3
    labels[ensemble.predict(images).score().topk(12).indices] = 3  # the model's least certain samples
    with pytest.warns(HydraWarning, match="class 3"):
        calibrated = calibrate(ensemble, [(images, labels)])
    with pytest.warns(HydraWarning, match="class 3"):
        evaluate(calibrated, [(images + 0.01, labels)], progress=False)


def test_classes_that_look_exchanged_are_told_of():
    """As labels of a loader that numbers two classes in another order; a class that is merely hard is not meant."""
    labels = torch.arange(3).repeat_interleave(12)
    with warnings.catch_warnings(action="error"):
        warn_of_exchanged_classes(torch.tensor([1, 1, 2])[labels], labels, ("a", "b", "c"), "id")
    images = torch.cat([images for images, _ in validation(400)])
    exchanged = [(images, (2 - tiny().predict(images).label))]
    with pytest.warns(HydraWarning, match="classes of validation are answered as another: class 0 as class 2"):
        calibrate(tiny(), exchanged)
    with pytest.warns(HydraWarning, match="classes of id are answered as another: class 0 as class 2"):
        evaluate(tiny(), exchanged, progress=False)


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


@pytest.mark.parametrize("temperature", [(0.5,), (0.5, 3.0)])
def test_a_calibration_of_before_answers_as_before(tmp_path, temperature):
    """In older files, which do not say what a temperature divides, it divides the logits, for everything."""
    images = validation()[0][0]
    model = tiny().with_metadata(calibration=Calibration(temperature, 0.3, "msp", 0.9))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["metadata"]["calibration"]
    assert stored == {"temperature": list(temperature), "threshold": 0.3, "score": "msp", "accepted_share": 0.9}
    found = Ensemble.from_pretrained(tmp_path).predict(images)
    with torch.no_grad():
        probs = (model(images) / torch.tensor(temperature)[:, None, None]).softmax(-1)
    torch.testing.assert_close(found.probs, probs.mean(0))
    torch.testing.assert_close(found.score(), 1 - probs.mean(0).amax(-1))
    torch.testing.assert_close(found.aleatoric, torch.special.entr(probs).sum(-1).mean(0))
    torch.testing.assert_close(found.entropy, torch.special.entr(probs.mean(0)).sum(-1))
    assert torch.equal(found.accept, found.score() <= 0.3)


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


def test_copies_of_a_sample_are_said_and_do_not_fit_what_they_are_held_against():
    """Drawn with replacement: a copy of a fitted sample looks familiar, and the threshold would reject new data."""
    data = validation(200)
    images, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    ensemble = tiny()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*copies")
        once = calibrate(ensemble, data)
    with pytest.warns(HydraWarning, match="copies"):
        thrice = calibrate(ensemble, [(images, labels)] * 3)
    alone, several = once.metadata.familiarity.settings, thrice.metadata.familiarity.settings
    assert several.samples % 3 == 0  # samples stay together with their copies
    assert several.threshold > 0.8 * alone.threshold


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
