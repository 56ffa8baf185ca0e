"""ViLU: network and loss are as published, and the score is stored with the model."""

import pytest
import torch
from baseline_cases import assert_resumes
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.vilu import ViLU, ViLULearner, mistake_weights, vilu
from hydra_ensembles.metrics.distance import log_odds
from hydra_ensembles.training import loop
from hydra_ensembles.training.recipe import Recipe
from unit.training.training_cases import NAMES, pair_samples, tiny_dual

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, epochs=2)
SMALL = ViLU(hidden=(8, 4), batch_size=8)


def dual_of(members=1):
    duals = [tiny_dual(seed) for seed in range(members)]
    return duals[0] if members == 1 else he.fuse(duals, stem="separate", mlp="separate")


def zero_shot(members=1):
    return he.zero_shot(dual_of(members), NAMES)


def data(count=24, size=8, seed=1):
    images, labels = pair_samples(count, seed)
    return list(zip(images.split(size), labels.split(size), strict=True))


def fitted(ensemble, recipe=RECIPE, settings=SMALL, **options):
    return vilu(ensemble, data(), recipe, settings, progress=False, **options)


def by_hand(found, images, member):
    """The published network's log odds that a member is wrong, layer by layer."""
    state = {key.removeprefix("vilu."): one[member] for key, one in found.metadata.familiarity.state.items()}
    alone = found.member(member)
    v = alone.readout.embedding(alone.features(images))[0]  # [B, e]
    rows = alone.readout.class_embeddings.weight[0]
    t, scale = F.normalize(rows, dim=-1), rows.norm(dim=-1).mean()
    probs = (scale * v @ t.T).softmax(-1)
    # image, classes by their probabilities, predicted class
    x = torch.cat([v, probs @ t, t[probs.argmax(-1)]], dim=1)
    for layer in range(3):
        x = F.linear(x if layer == 0 else x.relu(), state[f"weight{layer}"], state[f"bias{layer}"])
    return -x[:, 0]


def test_the_score_is_what_the_published_network_computes_and_travels_with_the_model(tmp_path):
    ensemble, images = zero_shot(members=2), pair_samples(5, seed=3)[0]
    found = fitted(ensemble)
    prediction = found.predict(images)
    for member in range(2):
        expected = by_hand(found, images, member)
        torch.testing.assert_close(prediction.unfamiliarity.member_scores[0, member], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(prediction.member_logits, ensemble.predict(images).member_logits)  # unchanged
    score = prediction.score("vilu")
    found.save_pretrained(tmp_path / "saved")
    again = he.Ensemble.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.predict(images).score("vilu"), score)
    torch.testing.assert_close(found.optimize(compile=False).predict(images).score("vilu"), score, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_published_one():
    right = torch.tensor([[True, True, True, False], [True, False, False, False], [True, True, True, True]])
    weight = mistake_weights(right)
    assert weight[0].tolist() == pytest.approx([1, 1, 1, torch.tensor(1 + 3.0).log().item()])
    assert weight[1].tolist() == pytest.approx([1, *[torch.tensor(1 + 1 / 3).log().item()] * 3])
    assert weight[2].tolist() == [1, 1, 1, 1]
    rows = torch.randn(3, 6, 5)
    learner = ViLULearner(rows, SMALL, RECIPE, torch.device("cpu"))
    embedded = F.normalize(torch.randn(4, 3, 5), dim=-1)
    loss = learner.backward([(embedded, right.T)], seed=0)
    odds = log_odds(
        {"texts": F.normalize(rows, dim=-1), **learner.model},
        *(embedded.transpose(0, 1), (embedded.transpose(0, 1) @ rows.mT).softmax(-1)),
    )
    parts = [F.binary_cross_entropy_with_logits(odds[m], right[m].float(), weight[m]) for m in range(3)]
    torch.testing.assert_close(loss, sum(parts).detach())


def test_the_best_network_is_that_of_the_lowest_nll_on_held_out_samples(tmp_path):
    """Not the highest accuracy: a network that memorised its images is confident in its errors."""
    ensemble, held = zero_shot(), data(40, seed=2)
    recipe = Recipe.preset("vilu", epochs=40, optimizer="adamw")
    found = fitted(ensemble, recipe, ViLU(hidden=(32, 16), batch_size=8), validation=held, output=tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    measured = loop._read_state(file)[0].evaluations
    lowest = min(one.nll for one in measured)
    assert max(measured, key=lambda one: one.accuracy).nll > lowest + 0.01  # the two choices differ here
    images, labels = (torch.cat(side) for side in zip(*held, strict=True))
    said = found.predict(images)
    right = (said.label == labels).float()
    assert F.binary_cross_entropy_with_logits(-said.score("vilu"), right).item() == pytest.approx(lowest, rel=1e-4)


def test_scores_of_before_stay_the_new_one_decides_and_features_are_fitted_anew():
    images = pair_samples(5, seed=3)[0]
    first = he.fit_familiarity(zero_shot(members=2), data(48), "knn")
    both = fitted(first)
    assert both.metadata.familiarity.settings.scores == ("vilu", "knn")
    torch.testing.assert_close(both.predict(images).score("knn"), first.predict(images).score("knn"))
    again = he.calibrate(both, data(64, seed=5), share=0.8, familiarity="mahalanobis")
    assert again.metadata.familiarity.settings.scores == ("mahalanobis", "vilu")  # replaces knn
    torch.testing.assert_close(again.predict(images).score("vilu"), both.predict(images).score("vilu"))


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    scores, images = [], pair_samples(5, seed=3)[0]

    def make(**options):
        found = fitted(zero_shot(), **options)
        scores.append(found.predict(images).score("vilu"))
        return found

    assert_resumes(make, tmp_path, monkeypatch)
    assert all(torch.equal(one, scores[0]) for one in scores)
