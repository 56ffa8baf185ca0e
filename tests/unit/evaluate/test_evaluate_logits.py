"""The core of evaluation: numbers from member logits, errors that name the set, JSON and stored logits."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import one_hot

from hydra_ensembles import metrics
from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.evaluation.evaluation import Evaluation, Selective
from hydra_ensembles.evaluation.logits import MemberLogits
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.prediction import Prediction

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
    return evaluate_logits(GOOD, TARGETS, SUITE, {"fog": (FOG, TARGETS)}, scores=SCORES, keep_logits=True)


def test_every_number_is_that_of_the_metric_functions(evaluation):
    targets, prediction = TARGETS, Prediction.from_logits(GOOD)
    probs, wrong, unsure = prediction.probs, prediction.label != targets, 1 - prediction.confidence
    expected = {
        "accuracy": metrics.accuracy(probs, targets),
        "brier": metrics.brier(probs, targets),
        "nll": pytest.approx(metrics.nll(probs, targets), rel=1e-6),
        "ece": metrics.ece(probs, targets),
        "aece": metrics.adaptive_ece(probs, targets),
        "mutual_information": metrics.mutual_information(prediction.member_probs),
        "disagreement": metrics.disagreement(prediction.member_probs),
        "aurc": metrics.aurc(unsure, wrong),
    }
    numbers = evaluation.numbers()
    assert {key: numbers[key] for key in expected} == expected
    shifted = Prediction.from_logits(FOG)
    assert numbers["shift.fog.accuracy"] == metrics.accuracy(shifted.probs, targets)
    assert numbers["energy:far.fpr95"] == evaluation.means["far"]["energy"].fpr95
    assert numbers["ood.digits.aupr"] == evaluation.ood["digits"].detection["msp"].aupr


def test_detection_per_set_per_score_and_unweighted_means(evaluation):
    prediction = Prediction.from_logits(GOOD)
    sets = {name: Prediction.from_logits(logits) for group in SUITE.values() for name, logits in group.items()}
    for score in ("msp", "energy", "mutual_information"):
        for name, answer in sets.items():
            found, scores = evaluation.ood[name].detection[score], (prediction.score(score), answer.score(score))
            assert (found.auroc, found.fpr95) == (metrics.auroc(*scores), metrics.fpr95(*scores))
            assert found.aupr == metrics.aupr(*scores)
        near, *far = (evaluation.ood[name].detection[score].auroc for name in ("close", "textures", "digits"))
        assert evaluation.means["near"][score].auroc == near
        assert evaluation.means["far"][score].auroc == pytest.approx(sum(far) / 2, abs=1e-15)
        assert evaluation.means["all"][score].auroc == pytest.approx((sum(far) + near) / 3, abs=1e-15)
    assert evaluation.ood["digits"].disagreement == metrics.disagreement(sets["digits"].member_probs)


def test_flat_sets_give_the_mean_over_all_only_and_apart_is_in_no_mean(evaluation):
    assert set(evaluate_logits(GOOD, TARGETS, FAR).means) == {"all"}
    grouped = evaluate_logits(GOOD, TARGETS, {**SUITE, "apart": {"twin": noise(seed=8)}}, scores=SCORES)
    assert grouped.ood["twin"].group == "apart"
    assert grouped.figures.agreement_ood == evaluation.figures.agreement_ood
    assert grouped.means == evaluation.means
    ours, theirs = evaluation, evaluate_logits(GOOD, TARGETS, SUITE, convention="openood")
    assert ours.means["all"]["msp"].auroc == theirs.means["all"]["msp"].auroc
    assert ours.means["all"]["msp"].aupr != theirs.means["all"]["msp"].aupr


def test_temperature_and_threshold_of_the_calibration_are_applied():
    found = evaluate_logits(GOOD, TARGETS, SUITE, calibration=Calibration(temperature=(2.0,), threshold=0.4))
    plain = evaluate_logits(GOOD / 2, TARGETS, {g: {n: x / 2 for n, x in s.items()} for g, s in SUITE.items()})
    assert (found.id, found.means) == (plain.id, plain.means)
    prediction = Prediction.from_logits(GOOD, temperature=2.0, threshold=0.4)
    assert found.selective.accepted == pytest.approx(prediction.accept.float().mean().item(), abs=1e-6)
    wrong = (prediction.label != TARGETS)[prediction.accept]
    assert found.selective.risk == pytest.approx(wrong.float().mean().item(), abs=1e-6)
    refused = ~Prediction.from_logits(FAR["digits"], temperature=2.0, threshold=0.4).accept
    assert found.ood["digits"].abstained == pytest.approx(refused.float().mean().item(), abs=1e-6)
    assert plain.selective is plain.ood["digits"].abstained is None


def test_json_round_trip_is_exact_and_stored_logits_rebuild_the_evaluation(evaluation, tmp_path):
    path = tmp_path / "run.json"
    evaluation.save(path)
    assert Evaluation.load(path) == evaluation
    dataclasses.replace(Evaluation.load(path), name="renamed").save(path)  # loaded without logits: the file keeps them
    found = Evaluation.load(path, with_logits=True)
    assert (found.name, found.logits is None) == ("renamed", False)
    evaluation.logits.save(tmp_path / "exact.safetensors", dtype=torch.float32)
    kept = MemberLogits.load(tmp_path / "exact.safetensors")
    exact = evaluate_logits(*kept.id, kept.ood, kept.shift, scores=SCORES)
    assert dataclasses.replace(exact, model=evaluation.model) == evaluation
    assert list(exact.ood) == list(evaluation.ood)


def test_files_of_the_first_version_stay_readable(evaluation):
    """The fields of version 1; fields with defaults may be added, none removed."""
    written = {
        "": "format version name id_name score convention id ood means shift selective model provenance figures "
        "intervals gallery",
        "id": "samples accuracy brier nll ece aece mutual_information disagreement aurc risk_at_coverage",
        "model": "kind members classes class_names parameters multiply_adds tokens heads heads_per_layer source "
        "history calibration",
        "provenance": "versions hardware dtype processes",
        "figures": "reliability risk_coverage score_edges id_scores ood_scores roc agreement_id agreement_ood",
    }
    plain = json.loads(json.dumps(evaluation.to_dict()))
    old = {key: plain[key] for key in written[""].split()}
    for part in ("id", "model", "provenance", "figures"):
        old[part] = {key: plain[part][key] for key in written[part].split()}
    set_keys = ("group", "samples", "detection", "mutual_information", "disagreement", "abstained")
    old["ood"] = {name: {key: one[key] for key in set_keys} for name, one in plain["ood"].items()}
    before = dataclasses.replace(evaluation.id, commonest=None)
    assert Evaluation.from_dict(old) == dataclasses.replace(evaluation, id=before)
    old["selective"] = {"score": "msp", "threshold": 0.3, "accepted": 0.9, "risk": 0.1}
    assert Evaluation.from_dict(old).selective == Selective(
        "msp", 0.3, accepted=0.9, risk=0.1, sure=None, familiar=None
    )
    with pytest.raises(DataError, match="99"):
        Evaluation.from_dict({**old, "version": 99})


MIXED = GOOD.permute(2, 1, 0).contiguous().permute(2, 1, 0)  # [M, B, C], members last in memory


@pytest.mark.parametrize(
    ("logits", "other", "dtype"),
    [
        (MIXED, noise()[:, ::2], torch.float16),
        (MIXED * 1e5, noise() * 1e5, torch.float32),  # too large for half precision
    ],
)
def test_stored_logits_come_back(tmp_path, logits, other, dtype):
    shift = {"fog/heavy": (other[:, :50], TARGETS[:100:2])}  # names may hold slashes
    kept = evaluate_logits(logits, TARGETS, {"far": {"a/b": other}}, shift, keep_logits=True).logits
    kept.save(tmp_path / "kept.safetensors")
    loaded = MemberLogits.load(tmp_path / "kept.safetensors")
    for found, given in ((loaded.id.logits, logits), (loaded.ood["far"]["a/b"], other)):
        assert torch.equal(found, given.to(dtype).float())
    assert torch.equal(loaded.shift["fog/heavy"].labels, TARGETS[:100:2])


def test_one_member_has_two_axes_and_no_diversity_and_half_precision_is_raised():
    logits, other = GOOD[:1].half(), {"noise": noise(members=1)}
    found = evaluate_logits(logits[0], TARGETS, other)
    assert found.provenance.dtype == "float16"
    assert found.numbers() == evaluate_logits(logits.float(), TARGETS, other).numbers()
    assert found.id.mutual_information == found.id.disagreement == 0
    assert found.figures.agreement_id == ((1.0,),)


def test_bootstrap_intervals_hold_the_numbers():
    found = evaluate_logits(GOOD, TARGETS, SUITE, bootstrap=60)
    numbers = found.numbers()
    wanted = {"accuracy", "brier", "nll", "ece", "aece", "aurc", "near.auroc", "far.fpr95", "all.aupr"}
    assert wanted <= set(found.intervals)
    for key, interval in found.intervals.items():
        assert interval.value == pytest.approx(numbers[key], rel=1e-6, abs=1e-7), key
        assert interval.low <= interval.high
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_intervals_of_ece_hold_that_of_calibrated_models():
    """Percentile intervals never contain it, and mirrored ones hardly half the time: replicates add their own noise."""
    held = list[bool]()
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        confidence = 0.5 + torch.rand(300, generator=g, dtype=torch.float64) / 2
        wrong = torch.rand(300, generator=g, dtype=torch.float64) > confidence
        found = evaluate_logits(torch.stack([confidence, 1 - confidence], dim=1).log(), wrong.long(), bootstrap=60)
        for key in ("ece", "aece"):
            interval = found.intervals[key]
            assert 0 <= interval.low <= interval.value <= interval.high
            held.append(0 in interval)
    assert sum(held) >= 11  # of 12 intervals


def test_figures_describe_the_same_numbers(evaluation):
    figures = evaluation.figures
    assert (sum(figures.reliability.count), sum(figures.ood_scores["digits"])) == (200, 120)
    curve = figures.roc["digits"]
    area = torch.trapezoid(torch.tensor(curve.y).double(), torch.tensor(curve.x).double()).item()
    assert area == pytest.approx(evaluation.ood["digits"].detection["msp"].auroc, abs=0.01)
    assert figures.risk_coverage.y[-1] == pytest.approx(1 - evaluation.id.accuracy, abs=1e-5)
    off_diagonal = [figures.agreement_id[i][j] for i in range(3) for j in range(i)]
    assert 1 - sum(off_diagonal) / 3 == pytest.approx(evaluation.id.disagreement, abs=1e-4)


def test_logits_are_those_that_the_evaluation_was_saved_with(tmp_path, evaluation):
    path, place = tmp_path / "run.json", tmp_path / "run.logits.safetensors"
    evaluation.save(path)
    written = place.read_bytes()
    place.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    with pytest.raises(DataError, match=r"run\.logits\.safetensors"):
        Evaluation.load(path, with_logits=True)
    evaluate_logits(GOOD.flip(1), TARGETS, SUITE, keep_logits=True).logits.save(place)  # valid, from another
    MemberLogits.load(place)
    with pytest.raises(DataError, match="another evaluation"):
        Evaluation.load(path, with_logits=True)
    place.write_bytes(written)
    dataclasses.replace(evaluation, logits=None).save(path)  # saved without logits
    with pytest.raises(DataError, match="another evaluation"):
        Evaluation.load(path, with_logits=True)


def test_files_from_before_there_were_digests_are_read(tmp_path, evaluation):
    path, place = tmp_path / "run.json", tmp_path / "run.logits.safetensors"
    evaluation.save(path)
    kept = Evaluation.load(path, with_logits=True).logits
    old = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in old.items() if key not in ("digest", "logits_digest")}))
    with safe_open(place, framework="pt") as file:
        tensors, order = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()["order"]  # noqa: SIM118
    save_file(tensors, place, metadata={"order": order})
    found = Evaluation.load(path, with_logits=True)
    assert found == evaluation
    assert torch.equal(found.logits.id.logits, kept.id.logits)
