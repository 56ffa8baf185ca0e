"""Calibration: the likeliest temperature, rows that fit apart from those that certify, promises that hold."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from checkpoint_models import labelled
from hydra_ensembles.calibrate import COLDEST, HOTTEST, calibrate, divided, drawn, fit_temperature, rule
from hydra_ensembles.errors import ConfigError, DataError, HydraWarning, TooFewSamplesError
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.familiarity import fit_familiarity, sample_digests
from hydra_ensembles.model.ensemble import Ensemble, weights_of
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.prediction import NEVER, Prediction
from random_ensembles import noisy, small


def tiny(members: int = 2, classes: int = 4) -> Ensemble:
    config = small("image", classes, members, width=8, layers=1, heads=2, head_dim=4, mlp_width=8)
    return noisy(config, noise=0.5, metadata=Metadata(history=("made",), metrics={"kept": 1.0}))


def own_answers(model: Ensemble, count: int, seed: int, wrong: float = 0.02) -> list[tuple[Tensor, Tensor]]:
    """Batches labelled by the model's own answers, but for a share of wrong labels among the less sure ones."""
    images = torch.cat([images for images, _ in labelled(model.config, count, seed=seed)])
    p = model.predict(images)
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    off = draws < 2 * wrong * (p.confidence < p.confidence.median())
    return list(zip(images.split(50), torch.where(off, (p.label + 1) % 4, p.label).split(50), strict=True))


def sample(members: int, count: int, classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Member logits with some signal, scaled by `scale`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    logits = torch.randn(members, count, classes, generator=generator) + F.one_hot(labels, classes)
    return logits * scale, labels


# --- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "scale"), [(20, 4.0), (200, 4.0)])
def test_the_temperature_is_the_likeliest_under_the_prior(count: int, scale: float) -> None:
    logits, labels = sample(3, count, 5, scale, seed=1)
    mean = torch.stack([one.double().log_softmax(-1) for one in logits]).logsumexp(0) - math.log(3)

    def cost(degrees: float) -> float:  # log temperatures are normal with mean 0, deviation 0.5
        return F.cross_entropy(mean / degrees, labels).item() + math.log(degrees) ** 2 / (2 * 0.5**2 * count)

    steps = torch.linspace(math.log(COLDEST), math.log(HOTTEST), 1001).exp().tolist()
    assert cost(fit_temperature(logits, labels)) <= min(map(cost, steps)) + 1e-9


@pytest.mark.filterwarnings("error")
def test_the_temperature_stays_exactly_one_where_none_is_better() -> None:
    assert fit_temperature(torch.zeros(2, 20, 3), torch.arange(20) % 3) == 1.0


def test_separable_data_stay_within_the_range_and_labels_that_do_not_fit_are_told_of() -> None:
    labels = torch.arange(3000) % 3
    logits = F.one_hot(labels, 3).float()[None]
    for separable, bound in ((logits / 10, COLDEST), (-5 * logits, HOTTEST)):
        with pytest.warns(UserWarning, match=f"temperature {bound:g}"):
            assert fit_temperature(separable, labels) == pytest.approx(bound, rel=1e-3)
    logits, labels = sample(2, 140, 7, 3.0, seed=6)
    with pytest.warns(UserWarning, match=r"1\.946 for a guess"):
        fit_temperature(logits, (labels + 1) % 7)


# --- which rows certify ----------------------------------------------------------------------------------------------


def test_rows_fall_alike_in_any_order_and_those_that_chose_certify_nothing() -> None:
    digests = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(1000)
    none = np.zeros(1000, bool)
    assert np.array_equal(drawn(digests)[order], drawn(digests[order]))
    fits, certifies = divided(digests, none)
    assert (fits.sum(), certifies.sum()) == (500, 500)
    assert not (fits & certifies).any()
    assert np.array_equal(divided(digests[order], none)[1], certifies[order])
    assert abs(drawn(torch.zeros(1000, dtype=torch.int64)).mean() - 0.5) < 0.04  # copies fall like other rows
    chose = drawn(digests) < 0.2  # as a cascade draws them
    assert np.array_equal(divided(digests, chose)[1], certifies)
    assert not (divided(digests, certifies)[1] & certifies).any()
    groups = [row // 4 for row in range(1000)]
    fits, certifies = divided(digests, none, groups)
    assert (fits.sum(), certifies.sum()) == (500, 125)  # whole groups fit, one row of each other group certifies
    assert not set(np.asarray(groups)[fits]) & set(np.asarray(groups)[certifies])


# --- the rule --------------------------------------------------------------------------------------------------------

LABELS = ("a", "b", "c")


def world(count: int, rng: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Certainty (tied), unfamiliarity, label, correctness: strange inputs are wrong more often, however certain."""
    strange, sure = rng.random(count), np.round(rng.random(count), 1)
    label = rng.integers(0, 3, count)
    wrong = rng.random(count) < 0.1 * (1 - sure) + 0.1 * (strange > 0.95) + 0.01 * label
    return torch.tensor(sure).float(), torch.tensor(strange).float(), torch.tensor(label), torch.tensor(~wrong)


@pytest.mark.parametrize("by_label", [False, True])
def test_the_joint_rule_keeps_both_promises(by_label: bool) -> None:
    rng = np.random.default_rng(0)
    new = world(100_000, rng)
    risk = {0: (0.08,), 1: (0.1,), 2: (1.0,)} if by_label else {None: (0.06,)}
    broken, strange, found = 0, [], 0
    for _ in range(200):
        try:
            one = rule(*world(1200, rng), LABELS, risk=risk)
        except TooFewSamplesError:
            continue
        found += 1
        accept = torch.from_numpy(one.accepts(*new[:3]))
        assert torch.equal(accept, Prediction.accept.func(answering(one, *new[:3])))  # the same comparison
        parts = {"": accept} if not by_label else {name: accept & (new[2] == i) for i, name in enumerate(LABELS[:2])}
        promises = {promise.label or "": promise.risk for promise in one.promises}
        broken += any((~new[3][part]).double().mean() > promises[name] for name, part in parts.items())
        strange.append((new[1] > one.unfamiliar).double().mean().item())
    assert found > 100
    assert broken <= binom.ppf(0.999, found, 0.05)
    assert np.mean(strange) == pytest.approx(0.05, abs=0.004)


def answering(one: Any, certainty: Tensor, strange: Tensor, label: Tensor) -> Any:
    """A prediction whose answers are given."""
    unfamiliarity = SimpleNamespace(threshold=one.unfamiliar, score_names=("knn",), score=lambda name: strange)
    known = {"threshold": one.threshold, "certainty": certainty, "label": label, "unfamiliarity": unfamiliarity}
    answer = SimpleNamespace(**known, forced=None)
    answer.passed = lambda: Prediction.passed(answer)
    answer.doubt = Prediction.doubt.func(answer)
    return answer


def test_a_share_is_accepted_by_both_reasons_together() -> None:
    rng = np.random.default_rng(1)
    new = world(50_000, rng)
    for scores in (1, 2):
        shares = []
        for _ in range(200):
            certainty, strange, label, correct = world(100, rng)
            certainty += 0.01 * torch.from_numpy(rng.random(100)).float()  # without ties the share is not exceeded much
            one = rule(certainty, strange if scores == 2 else None, label, correct, LABELS, share=0.9)
            shares.append(one.accepts(new[0] + 0.005, new[1] if scores == 2 else None, new[2]).mean())
        assert 0.89 < np.mean(shares) < 0.94
    with pytest.warns(HydraWarning, match="takes 19 rows"):
        assert rule(certainty[:18], None, label[:18], correct[:18], LABELS, share=0.95).threshold == -NEVER


# --- calibrate -------------------------------------------------------------------------------------------------------


def test_a_promise_is_kept_by_predict_saved_and_dropped_with_the_weights(tmp_path: Any) -> None:
    model = tiny(members=1)
    safe = calibrate(model, own_answers(model, 1600, seed=1), risk=[0.05, 0.1])
    promise = safe.promise
    assert (promise.risk, promise.confidence) == (0.05, 0.95)
    assert promise.rows <= 800
    new = own_answers(model, 2000, seed=2)
    p = safe.predict(torch.cat([images for images, _ in new]))
    right = p.label == torch.cat([labels for _, labels in new])
    known = (p.confidence >= promise.threshold) & (p.score("mahalanobis") <= p.unfamiliarity.threshold)
    assert torch.equal(p.accept, known)
    assert (~right[p.accept]).double().mean() <= 0.05
    assert p.accept.double().mean() == pytest.approx(0.95 * promise.accepted, abs=0.06)
    assert (p.reason == ["unfamiliar"] * len(p)) is False
    looser = safe.at(risk=0.1)
    assert (looser.promise.risk, looser.at(0.05).promise) == (0.1, promise)
    assert looser.metadata.calibration.identity != safe.metadata.calibration.identity == p[:3].calibration
    with pytest.raises(ConfigError, match=r"0\.02 was not certified"):
        safe.at(0.02)
    safe.save_pretrained(tmp_path / "safe")
    loaded = he.load(tmp_path / "safe")
    assert loaded.promise == promise
    assert loaded.metadata == safe.metadata
    assert str(promise) in (tmp_path / "safe" / "README.md").read_text()
    assert str(promise) in repr(loaded)
    assert torch.equal(loaded.predict(new[0][0]).accept, safe.predict(new[0][0]).accept)
    assert he.prune(safe, [(0, 0)]).promise is None
    with pytest.warns(HydraWarning, match="calibrate again"):
        assert fit_familiarity(safe, new, "knn").promise is None  # the promise was for another rule


def test_each_label_has_a_promise_of_its_own_and_others_are_declined() -> None:
    model = tiny(members=1)
    data = own_answers(model, 1500, seed=3)
    often = torch.cat([labels for _, labels in data]).bincount(minlength=4).argsort(descending=True).tolist()
    names = dict(zip(often, ("benign", "attack", "spam", "other"), strict=True))
    named = model.with_metadata(labels=tuple(names[one] for one in range(4)))
    safe = calibrate(named, data, risk={"benign": 0.1, often[1]: 1}, familiarity=None)
    assert {name: promise.risk for name, promise in safe.promise.items()} == {"benign": 0.1}  # 1 promises nothing
    p = safe.predict(own_answers(model, 200, seed=4)[0][0])
    limits = torch.full((4,), 2.0)
    limits[often[:2]] = torch.tensor([safe.promise["benign"].threshold, 0.0])
    assert torch.equal(p.accept, p.confidence >= limits[p.label])
    several = calibrate(named, data, risk={"benign": [0.1, 0.2]}, familiarity=None)
    looser = several.at({"benign": 0.2})
    assert several.promise == safe.promise
    assert looser.promise["benign"].risk == 0.2
    assert looser.promise["benign"].threshold == looser.metadata.calibration.threshold[often[0]]
    assert looser.at({"benign": 0.1}).metadata == several.metadata
    assert "certified by itself" in several.metadata.history[-1]
    with pytest.raises(ConfigError, match="eagle"):
        calibrate(named, ["not read"], risk={"eagle": 0.1})


def test_rows_that_fit_or_chose_do_not_certify() -> None:
    model, data = tiny(members=1), own_answers(tiny(members=1), 1200, seed=5)
    every = {"risk": 0.1, "confidence": None, "familiarity": None}
    assert calibrate(model, data, **every).promise.rows == 600
    assert calibrate(model, data, train=own_answers(model, 100, seed=6), **every).promise.rows == 1200
    assert calibrate(model, data, train=data[:4], **every).promise.rows == 1000
    digests = torch.cat([sample_digests(images) for images, _ in data])
    chosen = model.with_metadata(chosen=tuple(map(str, digests[:900].tolist())))
    safe = calibrate(chosen, data, **every)
    assert safe.promise.rows == 300
    assert "900 left out" in safe.metadata.history[-1]
    assert "on average" in repr(str(safe.promise))
    groups = [row // 3 for row in range(1200)]
    assert calibrate(model, data, groups=groups, **every).promise.rows == 200
    with pytest.raises(DataError, match="groups"):
        calibrate(model, data, groups=groups[1:], **every)


def test_too_few_rows_and_other_refusals() -> None:
    model = tiny(members=1)
    data = own_answers(model, 200, seed=7)
    with pytest.raises(TooFewSamplesError, match=r"can be promised.*200 held-out rows 100 certify.*train="):
        calibrate(model, data, familiarity=None, risk=0.01)
    with pytest.raises(ConfigError, match="one of them"):
        calibrate(model, data, risk=0.1, share=0.9)
    with pytest.raises(ConfigError, match="mutual_information"):  # one member cannot disagree
        calibrate(model, ["not read"], score="mutual_information")
    wrong = [(images, labels + 4) for images, labels in data]
    with pytest.raises(DataError, match="0 to 3"):
        calibrate(model, wrong)


def test_copies_and_classes_without_samples_are_said_once() -> None:
    model = tiny()
    images, labels = (torch.cat(parts) for parts in zip(*labelled(model.config, 200, seed=7), strict=True))
    images, labels = images[labels != 2], labels[labels != 2]
    for ensemble in (model, fit_familiarity(model, labelled(model.config, 200, seed=9))):
        with pytest.warns(HydraWarning) as said:
            calibrate(ensemble, [(images, labels), (images[:3], labels[:3])])
        assert sum("no samples of 2" in str(one.message) and "3 rows" in str(one.message) for one in said) == 1


def validation(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    return labelled(tiny().config, count, seed=7)


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


def test_calibrating_again_replaces_and_metrics_are_of_the_rows_that_certify() -> None:
    model, data = tiny(), validation(200)
    calibrated = calibrate(model, data, share=0.8, score="entropy", familiarity=None)
    calibration, metrics = calibrated.metadata.calibration, calibrated.metadata.metrics
    assert (calibration.score, calibration.share, calibrated.promise) == ("entropy", 0.8, None)
    assert calibrate(calibrated, data, share=0.8, score="entropy", familiarity=None).metadata.calibration == calibration
    assert (metrics["kept"], metrics["validation/accepted_share"]) == (1.0, 0.81)  # ⌈0.8 · 101⌉ of 100
    p = calibrated.predict(data[0][0])
    assert torch.equal(p.accept, -p.score("entropy") >= calibration.threshold)


def test_a_member_taken_out_does_not_keep_the_calibration_of_all():
    data = validation()
    calibrated = calibrate(tiny(), data)
    member = calibrated.member(1)
    assert (member.metadata.calibration, member.metadata.metrics) == (None, {})
    assert member.metadata.history == calibrated.metadata.history
    single = calibrate(tiny(members=1), data)
    assert single.member(0).metadata == single.metadata  # a single member keeps it


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
