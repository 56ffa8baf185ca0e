"""Evaluating models: every number by its definition, what is accepted and refused, intervals, resuming and files."""

import json
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader, IterableDataset

from hydra_ensembles import metrics
from hydra_ensembles.calibrate import calibrate
from hydra_ensembles.errors import CheckpointError, DataError, HydraError, HydraWarning
from hydra_ensembles.evaluation import evaluate as evaluating
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.familiarity import fit_familiarity
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.preprocessing import ImagePreprocessing
from hydra_ensembles.promise import certify
from processes import count_calls
from random_ensembles import noisy, small
from sample_evaluations import evaluated

# --- numbers, from logits ------------------------------------------------------------------------------------------

CLASSES = 5
TARGETS = torch.randint(CLASSES, (200,), generator=torch.Generator().manual_seed(0))


def noise(samples: int = 150, scale: float = 1.0, seed: int = 2, members: int = 3) -> Tensor:
    return scale * torch.randn(members, samples, CLASSES, generator=torch.Generator().manual_seed(seed))


GOOD = noise(200, seed=1) + 3 * one_hot(TARGETS, CLASSES)  # [M, B, C]
FOG = noise(200, seed=9) + 1.5 * one_hot(TARGETS, CLASSES)
FAR = {"textures": noise(100, seed=4), "digits": noise(120, scale=0.6, seed=5)}
SUITE = {"near": {"close": noise(scale=1.6, seed=3)}, "far": FAR}
SCORES = ("energy", "mutual_information")


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluated(GOOD, TARGETS, SUITE, {"fog": (FOG, TARGETS)}, scores=SCORES)


def test_every_number_is_that_of_the_metric_functions(evaluation):
    prediction = Prediction.from_logits(GOOD)
    probs, wrong, unsure = prediction.probs, prediction.label != TARGETS, 1 - prediction.confidence
    expected = {
        "accuracy": metrics.accuracy(probs, TARGETS),
        "brier": metrics.brier(probs, TARGETS),
        "nll": pytest.approx(metrics.nll(probs, TARGETS), rel=1e-6),
        "ece": metrics.ece(probs, TARGETS),
        "aece": metrics.adaptive_ece(probs, TARGETS),
        "mutual_information": prediction.epistemic.double().mean().item(),
        "disagreement": prediction.disagreement.double().mean().item(),
        "aurc": metrics.aurc(unsure, wrong),
    }
    numbers = evaluation.numbers()
    assert {key: numbers[key] for key in expected} == expected
    assert numbers["shift.fog.accuracy"] == metrics.accuracy(Prediction.from_logits(FOG).probs, TARGETS)
    assert "accuracy" in str(evaluation)


def test_detection_per_set_per_score_and_unweighted_means(evaluation):
    prediction = Prediction.from_logits(GOOD)
    sets = {name: Prediction.from_logits(logits) for group in SUITE.values() for name, logits in group.items()}
    numbers = evaluation.numbers()
    for score in ("msp", "energy", "mutual_information"):
        start = "" if score == "msp" else f"{score}:"
        for name, answer in sets.items():
            scores = prediction.score(score), answer.score(score)
            for key, metric in (("auroc", metrics.auroc), ("fpr95", metrics.fpr95), ("aupr", metrics.aupr)):
                assert numbers[f"{start}ood.{name}.{key}"] == metric(*scores)
        near, *far = (numbers[f"{start}ood.{name}.auroc"] for name in ("close", "textures", "digits"))
        assert numbers[f"{start}near.auroc"] == near
        assert numbers[f"{start}far.auroc"] == pytest.approx(sum(far) / 2, abs=1e-15)
        assert numbers[f"{start}all.auroc"] == pytest.approx((sum(far) + near) / 3, abs=1e-15)
    assert numbers["ood.digits.disagreement"] == sets["digits"].disagreement.double().mean().item()


def test_flat_sets_give_the_mean_over_all_only_and_apart_is_in_no_mean(evaluation):
    numbers, flat = evaluation.numbers(), evaluated(GOOD, TARGETS, FAR).numbers()
    assert [name for name in ("near", "far", "all") if f"{name}.auroc" in flat] == ["all"]
    grouped = evaluated(GOOD, TARGETS, {**SUITE, "apart": {"twin": noise(seed=8)}}, scores=SCORES).numbers()
    assert "ood.twin.auroc" in grouped
    assert grouped.items() - numbers.items() == {(k, v) for k, v in grouped.items() if "ood.twin." in k}
    theirs = evaluated(GOOD, TARGETS, SUITE, convention="openood").numbers()
    assert numbers["all.auroc"] == theirs["all.auroc"]
    assert numbers["all.aupr"] != theirs["all.aupr"]


def test_temperature_and_threshold_of_the_calibration_are_applied():
    calibration = Calibration(temperature=2.0, threshold=0.4)
    found, prediction = evaluated(GOOD, TARGETS, SUITE, calibration=calibration), calibration.prediction(GOOD)
    numbers = found.numbers()
    assert numbers["ece"] == metrics.ece(prediction.probs, TARGETS)
    assert numbers["selective.accepted"] == pytest.approx(prediction.accept.float().mean().item(), abs=1e-6)
    wrong = (prediction.label != TARGETS)[prediction.accept]
    assert numbers["selective.risk"] == pytest.approx(wrong.float().mean().item(), abs=1e-6)
    refused = ~calibration.prediction(FAR["digits"]).accept
    assert numbers["ood.digits.abstained"] == pytest.approx(refused.float().mean().item(), abs=1e-6)
    plain = evaluated(GOOD, TARGETS, SUITE).numbers()
    assert not {"selective.accepted", "ood.digits.abstained"} & plain.keys()
    assert plain["far.fpr95"] == numbers["far.fpr95"]  # scores are not calibrated


def test_an_evaluation_says_whether_the_promise_was_kept_with_and_without_foreign_rows():
    prediction = Prediction.from_logits(GOOD)
    promise = certify(prediction.confidence, prediction.label == TARGETS, risk=0.2)
    calibration = Calibration(threshold=promise.threshold, promises=(promise,))
    found = evaluated(GOOD, TARGETS, SUITE, {"fog": (FOG, TARGETS)}, calibration=calibration)
    accept = prediction.confidence >= promise.threshold
    (inside,), (mixed,), (fog,) = (found.promises[name] for name in (found.id_name, "mixed", "shift.fog"))
    wrong = accept & (prediction.label != TARGETS)
    assert (inside.rows, inside.accepted, inside.errors) == (200, int(accept.sum()), int(wrong.sum()))
    assert (inside.accepted, inside.errors) == (promise.accepted_rows, promise.errors)
    foreign = [*SUITE["near"].values(), *SUITE["far"].values()]
    taken = sum(int((Prediction.from_logits(one).confidence >= promise.threshold).sum()) for one in foreign)
    assert (mixed.accepted, mixed.errors) == (inside.accepted + taken, inside.errors + taken)
    assert inside.verdict != "broken" == mixed.verdict
    assert fog.rows == 200
    assert found.numbers()["promise.errors"] == inside.rate
    assert found.numbers()["answerable@0.02"] == found.answerable(0.02) <= found.answerable(0.2) == inside.share
    assert "promise" in str(found)


def test_intervals_hold_the_numbers(evaluation):
    found = evaluated(GOOD, TARGETS, SUITE, {"fog": (FOG, TARGETS)}, calibration=Calibration(threshold=0.4))
    numbers = found.numbers()
    names = ("accuracy", "nll", "ece", "aece", "aurc", "near.auroc", "far.fpr95", "all.aupr", "ood.close.auroc")
    for key in (*names, "shift.fog.nll", "far.abstained", "selective.accepted"):
        interval = found.interval(key, resamples=60)
        assert interval.value == pytest.approx(numbers[key], rel=1e-6, abs=1e-7), key
        assert interval.low <= interval.value <= interval.high
    assert found.interval("risk@0.80") is None
    assert evaluation.interval("near.abstained") is None  # it has no threshold


def test_differences_are_paired_over_the_same_samples(evaluation):
    """30 of 2,000 errors repaired and none made: the accuracies alone would not tell."""
    labels = torch.arange(2000) % 5
    answers = one_hot(torch.where(torch.arange(2000) < 200, (labels + 1) % 5, labels), 5)[None] * 9.0
    repaired = answers.clone()
    repaired[0, :30] = one_hot(labels[:30], 5) * 9.0
    one, two = evaluated(answers, labels, name="A"), evaluated(repaired, labels, name="B")
    gain = two.interval("accuracy", minus=one)
    assert gain.value == pytest.approx(0.015)
    assert gain.low > 0
    assert two.interval("accuracy", minus=evaluation) is None  # other samples


def test_what_was_saved_comes_back(evaluation, tmp_path):
    path = tmp_path / "run.json"
    evaluation.save(path)
    found = Evaluation.load(path)
    assert (found.numbers(), found.model, found.samples) == (evaluation.numbers(), evaluation.model, evaluation.samples)
    assert list(found.sets) == list(evaluation.sets)
    written = json.loads(path.read_text())
    for name in written.keys() - {"numbers", "samples", "name", "id_name"}:
        path.write_text(json.dumps({**written, name: "other"}))
        with pytest.raises(HydraError, match=r"run\."):
            Evaluation.load(path)
    path.write_text(json.dumps(written))
    other = evaluated(GOOD.flip(1), TARGETS, SUITE)
    other.save(tmp_path / "other.json")
    (tmp_path / "other.safetensors").rename(tmp_path / "run.safetensors")
    with pytest.raises(DataError, match="another evaluation"):
        Evaluation.load(path)
    (tmp_path / "run.safetensors").unlink()
    with pytest.raises(DataError, match="belongs to run"):
        Evaluation.load(path)
    path.write_text('{"format": "hydra_ensembles.evaluation", "version": 1}')
    with pytest.raises(DataError, match="evaluate again"):
        Evaluation.load(path)


# --- models --------------------------------------------------------------------------------------------------------

HEADS = (((0, 1), (1, 2)), ((0, 2), (0, 1, 2)), ((1,), (2,)))  # [member][layer]
NAMES = ("ant", "bee", "cat <b>", "dog & fox")


def tiny_ensemble(kind="image"):
    blocks = {"width": 12, "heads": 3, "head_dim": 4, "mlp_width": 16}
    config = small(kind, 4, sharing=Sharing(stem=True, mlp=True), text={"vocabulary": 30}, **blocks)
    preprocessing = None if kind == "text" else ImagePreprocessing((8, 8))
    metadata = Metadata("made here", NAMES, preprocessing, history=("made", "tested"))
    return noisy(replace(config, heads=HEADS), noise=0.5, metadata=metadata)


def image_batches(sizes=(8, 8, 8, 3), seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    pixels = [scale * torch.randn(size, 3, 8, 8, generator=draw) for size in sizes]
    return [(some, torch.randint(4, (len(some),), generator=draw)) for some in pixels]


def text_batches(sizes=(6, 5), seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(30, (size, 7), generator=draw) for size in sizes]
    masks = [(torch.arange(7)[None] < torch.randint(3, 8, (size, 1), generator=draw)).long() for size in sizes]
    labels = [torch.randint(4, (size,), generator=draw) for size in sizes]
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, batch, strict=True)) for batch in zip(ids, masks, labels, strict=True)]


OOD = {"near": {"close": image_batches((5, 6), seed=5)}, "far": {"noise": image_batches((7,), seed=6, scale=5.0)}}
CALIBRATION = Calibration(temperature=2.0, threshold=0.3)


def whole(data):
    return [torch.cat(parts) for parts in zip(*data, strict=True)]


@torch.no_grad()
def logits_and_labels(model, data):
    return torch.cat([model(x) for x, _ in data], dim=1), whole(data)[1]


class Named(nn.Sequential):
    """A model called like those of transformers, by keywords; a plain tensor is the first argument."""

    def forward(self, pixel_values=None, labels=None):
        return SimpleNamespace(logits=self[0](pixel_values.clone()))


def test_a_model_is_evaluated_as_its_logits_are():
    model, data = tiny_ensemble(), image_batches()
    shift = {"blur": image_batches((9,), seed=8)}
    found = evaluate(model, data, OOD, shift, progress=False, scores=("entropy",))
    expected = evaluated(
        *logits_and_labels(model, data),
        {group: {name: logits_and_labels(model, one)[0] for name, one in sets.items()} for group, sets in OOD.items()},
        {"blur": logits_and_labels(model, shift["blur"])},
        scores=("entropy",),
    )
    assert found.numbers() == expected.numbers()
    assert found.samples == {"id": 27, "ood.close": 11, "ood.noise": 7, "shift.blur": 9}
    plain = evaluate(model, data, OOD, shift, progress=False).numbers()
    by_name = [{"pixel_values": inputs, "labels": labels} for inputs, labels in data]
    for around in (Named(model), nn.DataParallel(Named(model))):
        assert evaluate(around, by_name, OOD, shift, progress=False).numbers() == plain
    assert (found.model.heads, found.model.class_names) == ("1.8x3", NAMES)
    assert found.model.parameters == model.describe().parameters


def test_an_interrupted_evaluation_goes_on_and_new_settings_use_the_same_answers(tmp_path, monkeypatch):
    model, data, calls = tiny_ensemble(), image_batches((2,) * 20), []
    other = {"score": "energy", "calibration": CALIBRATION, "progress": False}
    expected, by_energy = (evaluate(model, data, OOD, **about).numbers() for about in ({"progress": False}, other))
    count_calls(monkeypatch, evaluating, "answered", lambda: calls.append(1), lambda: len(calls) == 12)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, data, OOD, output=tmp_path, progress=False)
    assert evaluate(model, data, OOD, output=tmp_path, progress=False).numbers() == expected
    assert len(calls) == 20 + 3 + 1  # the batch in which it was interrupted is asked twice
    calls.clear()
    assert evaluate(model, data, OOD, output=tmp_path, **other).numbers() == by_energy
    assert not calls
    evaluate(model, image_batches(seed=1), OOD, output=tmp_path, progress=False)
    assert len(calls) == 4  # new data are run, known data are not
    with pytest.raises(CheckpointError, match="another"):
        evaluate(noisy(model.config), data, OOD, output=tmp_path, progress=False)


def test_both_thresholds_are_told_apart():
    """Accepted samples pass both thresholds; each is reported by name, with the share that passes it alone."""
    data = image_batches((40,), seed=4)
    known = fit_familiarity(tiny_ensemble(), image_batches((60,), seed=2), ("knn", "mahalanobis"))
    known = calibrate(known, image_batches((60,), seed=3), share=0.7)
    found = evaluate(known, data, OOD, progress=False)
    p, foreign = known.predict(data[0][0]), known.predict(OOD["far"]["noise"][0][0])
    sure, familiar = p.confidence >= p.threshold, p.score("knn") <= p.unfamiliarity.threshold
    numbers = found.numbers()
    for share, passed in (("sure", sure), ("familiar", familiar), ("accepted", sure & familiar)):
        assert numbers[f"selective.{share}"] == pytest.approx(passed.double().mean().item(), abs=1e-6)
    unsure, unfamiliar = foreign.confidence < p.threshold, foreign.score("knn") > p.unfamiliarity.threshold
    for share, declined in (("unsure", unsure), ("unfamiliar", unfamiliar), ("abstained", ~foreign.accept)):
        assert (
            numbers[f"far.{share}"]
            == numbers[f"ood.noise.{share}"]
            == pytest.approx(declined.double().mean().item(), abs=1e-6)
        )
    assert numbers["all.unfamiliar"] == (numbers["near.unfamiliar"] + numbers["far.unfamiliar"]) / 2
    assert {"knn:far.auroc", "mahalanobis:far.auroc"} < numbers.keys()  # fitted scores are reported by default


def test_an_optimized_ensemble_is_evaluated_as_the_one_it_was_made_from():
    calibrated, data = tiny_ensemble().with_metadata(calibration=CALIBRATION), image_batches()
    fast = calibrated.optimize()
    found, expected = evaluate(fast, data, progress=False), evaluate(calibrated, data, progress=False)
    assert found.numbers().keys() == expected.numbers().keys()
    for name, number in expected.numbers().items():
        assert found.numbers()[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name
    assert found.model == expected.model


@pytest.mark.parametrize("around", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_what_lies_around_an_ensemble_takes_nothing_from_it(around):
    data = image_batches()
    calibrated = fit_familiarity(tiny_ensemble(), data, "knn").with_metadata(calibration=CALIBRATION)
    expected = evaluate(calibrated, data, OOD, scores=("knn",), progress=False)
    found = evaluate(around(calibrated), data, OOD, scores=("knn",), progress=False)
    assert (found.numbers(), found.model) == (expected.numbers(), expected.model)


def test_any_callable_with_two_axes_counts_as_one_member():
    linear = nn.Linear(3 * 8 * 8, 4)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear).train()
    found = evaluate(model, image_batches(), OOD, progress=False)
    assert (found.model.kind, found.model.members, found.model.parameters) == ("callable", 1, 3 * 64 * 4 + 4)
    assert all(module.training for module in model.modules())  # training mode is restored
    flat = evaluate(lambda x: linear(x.flatten(1)), image_batches(), OOD, progress=False)
    assert flat.numbers() == found.numbers()


def test_texts_come_as_mappings_and_streams_are_read_once():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(text_batches())

    stream, gone = DataLoader(Stream(), batch_size=None), iter(text_batches((4,), seed=3))
    found = evaluate(tiny_ensemble("text"), stream, {"gone": gone}, progress=False)
    assert (found.model.kind, found.samples) == ("text", {"id": 11, "ood.gone": 4})


def test_samples_in_two_places_are_refused_or_said():
    """One of many does not matter; data that set the thresholds do."""
    model, data = tiny_ensemble(), image_batches((40, 40))
    with pytest.raises(DataError, match="in-distribution set"):
        evaluate(model, data, {"far": {"copy": [data[0][0].clone()]}}, progress=False)
    calibrated = calibrate(model, data[:1], familiarity=None)
    with pytest.warns(HydraWarning, match="fitted the calibration"):
        evaluate(calibrated, data, progress=False)
    with warnings.catch_warnings(action="error"):
        evaluate(calibrated, [data[1], tuple(one[:1] for one in data[0])], progress=False)
