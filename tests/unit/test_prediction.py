"""`Prediction`: uncertainty identities for any logits, scores, abstention, indexing and concatenation."""

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.metrics.conformal import Reference
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.prediction import Prediction, ScoreName, Unfamiliarity

T = torch.tensor
SCORES = ScoreName.__args__
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DERIVED = [name for name, one in vars(Prediction).items() if isinstance(one, property | functools.cached_property)]
OTHERS = ("members", "classes", "reason", "familiarity")  # not tensors, or not from logits alone
TENSORS = ["member_logits", *(name for name in DERIVED if name[0] != "_" and name not in OTHERS)]


def random_logits(members=3, samples=6, classes=4, seed=0):
    return 3 * torch.randn(members, samples, classes, generator=torch.Generator().manual_seed(seed))


def random_prediction(samples=6, members=3, classes=4, **settings):
    return Prediction.from_logits(random_logits(members, samples, classes), **settings)


@settings(max_examples=40, deadline=None)
@given(
    members=st.integers(1, 8),
    classes=st.sampled_from([2, 3, 10, 1000]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 10.0, 100.0, 1e4, 65504.0]),  # the largest number of float16
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_uncertainty_identities(members, classes, dtype, scale, ties, seed):
    logits = random_logits(members, 3, classes, seed)
    logits = ((logits.sign() if ties else logits) * scale).clamp(-65504, 65504).to(dtype)
    p = Prediction.from_logits(logits)
    for name in TENSORS:
        value = getattr(p, name)
        assert value is None or value.isfinite().all(), name
    assert all(p.score(name).isfinite().all() for name in SCORES)
    assert p.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones_like(p.confidence), atol=1e-5, rtol=0)
    torch.testing.assert_close(p.aleatoric + p.epistemic, p.entropy, atol=1e-6, rtol=1e-6)
    expected = torch.special.entr(p.probs.double()).sum(-1)
    torch.testing.assert_close(p.entropy.double(), expected, atol=1e-4, rtol=1e-4)
    assert ((p.aleatoric >= 0) & (p.epistemic >= 0) & (p.epistemic <= math.log(members) + 1e-4)).all()
    assert ((p.disagreement >= 0) & (p.disagreement <= 1)).all()
    equal = Prediction.from_logits(logits[:1].expand_as(logits))
    torch.testing.assert_close(equal.probs, Prediction.from_logits(logits[:1]).probs)
    assert (equal.epistemic <= 1e-4).all()
    assert not equal.disagreement.any()


def test_by_hand():
    logits = T([[[0.4, 0.6]], [[0.2, 0.8]]]).log()
    p = Prediction.from_logits(logits, class_names=["cat", "dog"])
    assert p.probs[0].tolist() == pytest.approx([0.3, 0.7])
    assert p.log_probs.exp()[0].tolist() == pytest.approx([0.3, 0.7])
    assert (p.label.item(), p.names()) == (1, ["dog"])
    assert p.confidence.item() == pytest.approx(0.7)
    assert p.entropy.item() == pytest.approx(-0.3 * math.log(0.3) - 0.7 * math.log(0.7))
    assert p.score().item() == p.score("msp").item() == pytest.approx(0.3)
    mean_logits = logits.mean(0)[0]
    assert p.score("max_logit").item() == pytest.approx(-mean_logits[1].item())
    assert p.score("energy").item() == pytest.approx(-math.log(mean_logits.exp().sum().item()), abs=1e-6)
    assert p.score("mutual_information") is p.epistemic
    assert p.score("entropy") is p.entropy
    opposite = Prediction.from_logits(T([[[9e4, 0.0]], [[0.0, 9e4]]]))
    assert (opposite.aleatoric.item(), opposite.epistemic.item()) == pytest.approx((0, math.log(2)))
    kept = p.label.clone()
    logits.neg_()  # the caller's buffer
    assert torch.equal(p[:].label, kept)


def test_gen_is_the_generalised_entropy_and_msp_tells_nearly_certain_samples_apart():
    p = random_prediction(samples=5, classes=300)
    largest = p.probs.double().sort(dim=-1, descending=True).values[:, :100]
    torch.testing.assert_close(p.score("gen").double(), (largest * (1 - largest)).pow(0.1).sum(-1), rtol=1e-4, atol=0)
    logits = torch.zeros(1, 3, 4)
    logits[0, :, 0] = T([20.0, 30.0, 40.0])  # 1 - p is 0 in float32 for the last two
    expected = 3 * torch.exp(-logits[0, :, 0])
    assert torch.allclose(Prediction.from_logits(logits).score(), expected, rtol=1e-5, atol=0)


def test_a_temperature_of_probabilities_leaves_all_else_as_it_is():
    logits = random_logits(samples=50).double()
    plain = Prediction.from_logits(logits)
    p = Calibration(0.3).prediction(logits)
    expected = plain.probs.log().div(0.3).softmax(-1)
    assert torch.equal(p.label, plain.label)
    torch.testing.assert_close(p.probs, expected)
    torch.testing.assert_close(p.log_probs.exp(), expected)
    torch.testing.assert_close(p.confidence, expected.gather(1, p.label[:, None])[:, 0])
    torch.testing.assert_close(p.entropy, torch.special.entr(expected).sum(-1))
    for name in ("member_probs", "mean_probs", "aleatoric", "epistemic", "disagreement"):
        assert torch.equal(getattr(p, name), getattr(plain, name)), name
    for name in SCORES:
        assert torch.equal(p.score(name), plain.score(name)), name


@pytest.mark.parametrize("name", SCORES)
def test_accept_is_a_certainty_at_or_above_the_threshold_and_p_values_are_of_held_out_scores(name):
    free = random_prediction(samples=50, score=name)
    assert free.accept is None
    assert torch.equal(free.certainty, free.confidence if name == "msp" else -free.score(name))
    p = replace(free, threshold=free.certainty.sort().values[25].item())
    assert p.accept.sum() == 25  # the threshold itself is accepted
    each = replace(free, threshold=(p.threshold, 2.0**100, p.threshold, p.threshold))  # one for each label
    assert torch.equal(each.accept, p.accept & (p.label != 1))
    forced = replace(p, forced=torch.arange(50) % 4, stage=torch.arange(50))
    assert forced[1:4].reason == ["unsure", "unfamiliar", "alarm"]
    assert torch.equal(Prediction.concat([forced[:7], forced[7:]]).doubt, forced.doubt)
    assert forced[[5]].to_dict()["stage"] == [5]
    assert p[p.accept].accept.all()
    reference = Reference.of(p.score() - 0.1)
    assert torch.equal(replace(p, reference=reference)[:2].p_value(), reference.p_values(p.score()[:2]))


def test_picking_samples():
    p = random_prediction(samples=6, threshold=0.4, class_names=tuple("abcd"))
    for index, rows in [(-1, [5]), (slice(None, None, 2), [0, 2, 4]), (T([1, 1]), [1, 1]), ([False] * 5 + [True], [5])]:
        part = p[index]
        assert torch.equal(part.member_logits, p.member_logits[:, rows])
        assert torch.equal(part.accept, p.accept[rows])
        assert part.names() == [p.names()[row] for row in rows]
    assert [part.label.item() for part in p] == p.label.tolist()


def test_what_is_neither_a_place_nor_a_mask_picks_no_samples():
    p = random_prediction(samples=4)
    for index in (4, T([1.0, 0.0, 1.0, 1.0]), T([True])):
        with pytest.raises(IndexError):
            p[index]


def test_joining_batches():
    known = {"threshold": 0.4, "class_names": tuple("abcd")}
    p = random_prediction(**known)
    whole = Prediction.concat([p[:2], p[2:3], p[3:]])
    assert torch.equal(whole.member_logits, p.member_logits)
    assert (whole.threshold, whole.class_names) == (p.threshold, p.class_names)
    for changes in ({"members": 2}, {"threshold": 0.5}, {"score": "entropy"}):
        with pytest.raises(DataError, match="one model"):
            Prediction.concat([p, random_prediction(**{**known, **changes})])
    known = random_prediction(unfamiliarity=UNFAMILIAR)
    assert torch.equal(Prediction.concat([known[:2], known[2:]]).accept, known.accept)
    with pytest.raises(DataError, match="one model"):
        Prediction.concat([known, replace(known, unfamiliarity=replace(UNFAMILIAR, threshold=0.6))])


UNFAMILIAR = Unfamiliarity(("knn",), torch.rand(1, 3, 6), 0.5, Reference((0.1, 0.2), 2))


@pytest.mark.parametrize(
    ("logits", "settings", "token"),
    [
        (T([[[0.0, 1.0], [math.nan, 1.0]], [[0.0, -math.inf], [0.0, 1.0]]]), {}, r"2 of 8 .* \(0, 1, 0\)"),
        (torch.zeros(3, 4), {}, "unsqueeze"),
    ],
)
def test_bad_logits_and_temperatures(logits, settings, token):
    with pytest.raises(HydraError, match=token):
        Prediction.from_logits(logits, **settings)


def test_plain_lists_say_what_the_tensors_say():
    full = random_prediction(threshold=0.3, class_names=list("abcd"), unfamiliarity=UNFAMILIAR)
    known = json.loads(json.dumps(full.to_dict()))
    for name in ("confidence", "entropy", "aleatoric", "epistemic", "disagreement", "accept", "familiarity"):
        assert known[name] == getattr(full, name).tolist()
    assert (known["label"], known["score"], known["reason"]) == (full.names(), full.score().tolist(), full.reason)
    bare = random_prediction()
    plain = bare.to_dict()
    assert plain["label"] == bare.label.tolist()
    assert [plain[name] for name in ("familiarity", "accept", "reason")] == [[None] * 6] * 3
