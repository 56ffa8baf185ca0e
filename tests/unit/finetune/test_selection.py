"""Validation decides: best weights, early stopping, the learning rate."""

import dataclasses
import json

import pytest
import torch
from finetune_cases import batches, same, shuffled, tiny

from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.finetune import finetune as learner
from hydra_ensembles.training.loop import Evaluation, Patience
from hydra_ensembles.training.recipe import Recipe

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, epochs=4, schedule="constant")


def journal(folder, rate="0.05", member=0):
    return json.loads((folder / f"member-{member}" / f"rate-{rate}" / "checkpoint.json").read_text())


def scripted(monkeypatch, results):
    """Replace measuring on validation by a list of (accuracy, NLL)."""
    waiting = iter(results)
    monkeypatch.setattr(learner, "measure", lambda *arguments: next(waiting))


def test_the_best_weights_are_returned(monkeypatch):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.8, 0.9), (0.8, 0.95), (0.6, 0.5)])
    chosen = finetune(tiny(), data, RECIPE, data, progress=False)
    two_epochs = finetune(tiny(), data, dataclasses.replace(RECIPE, epochs=2), progress=False)
    assert same(chosen, two_epochs)
    assert chosen.metadata.metrics == {"validation/accuracy": 0.8, "validation/nll": 0.9}
    assert "validation accuracy 0.8000 at step 12" in chosen.metadata.history[-1]


def test_equal_accuracy_is_decided_by_nll_then_by_time():
    first = Evaluation(1, 0, 0.5, 1.0)
    assert first.better_than(None)
    assert Evaluation(2, 0, 0.5, 0.9).better_than(first)
    assert not Evaluation(2, 0, 0.5, 1.0).better_than(first)
    assert not Evaluation(2, 0, 0.4, 0.1).better_than(first)


def test_patience_needs_more_than_delta():
    patience = Patience()
    for accuracy, waited in [(0.5, 0), (0.5004, 1), (0.5006, 0), (0.5006, 1), (0.4, 2)]:
        patience = patience.after(accuracy, 5e-4)
        assert patience.waited == waited
    assert patience.reference == 0.5006


def test_training_stops_when_patience_runs_out(monkeypatch, tmp_path):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.6, 1.0), (0.6, 1.0), (0.6002, 1.0), (0.9, 1.0)])
    recipe = dataclasses.replace(RECIPE, epochs=10, patience=2, min_delta=5e-4)
    trained = finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert [one["step"] for one in journal(tmp_path)["evaluations"]] == [6, 12, 18, 24]
    assert trained.metadata.metrics["validation/accuracy"] == 0.6002  # the best, though no improvement by delta


def test_evaluations_come_every_so_many_steps_and_at_the_end(tmp_path):
    data = batches()
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=10, evaluate_every=4)
    finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert [(one["step"], one["epoch"]) for one in journal(tmp_path)["evaluations"]] == [(4, 0), (8, 1), (10, 1)]


def test_evaluating_more_often_does_not_change_the_training():
    data = shuffled()
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=9, dropout=0.1)
    plain = finetune(tiny(), data, recipe, progress=False)
    watched = []
    for every in (1, 3):
        # accuracy that only rises: the last weights are the best
        rising = iter(range(100))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                learner,
                "measure",
                lambda model, validation, *rest, rising=rising: (len(list(validation)) and next(rising) / 100, 1.0),
            )
            asked = dataclasses.replace(recipe, evaluate_every=every)
            watched.append(finetune(tiny(), data, asked, shuffled(seed=3), progress=False))
    assert same(plain, watched[0])
    assert same(plain, watched[1])


def test_the_measure_is_accuracy_and_nll_of_the_mean_probabilities():
    member, data = tiny(members=3), batches(20)
    trained = finetune(member, data, dataclasses.replace(RECIPE, epochs=1), data, progress=False)
    images, labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    probs = trained(images).double().softmax(-1).mean(0)
    metrics = trained.metadata.metrics
    assert metrics["validation/accuracy"] == pytest.approx((probs.argmax(1) == labels).double().mean().item())
    assert metrics["validation/nll"] == pytest.approx(
        torch.nn.functional.nll_loss(probs.log(), labels).item(), rel=1e-6
    )


def test_the_grid_is_decided_on_validation(monkeypatch, tmp_path):
    data = batches()
    recipe = Recipe(optimizer="sgd", grid=(0.1, 0.001, 0.01), epochs=1, schedule="constant")
    # rates are tried from the smallest: equal accuracy goes to the lower NLL, then to the smaller rate
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.8)])
    chosen = finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert "learning rate 0.01, chosen of 3" in chosen.metadata.history[-1]
    alone = finetune(tiny(), data, dataclasses.replace(recipe, grid=(), learning_rate=0.01), progress=False)
    assert same(chosen, alone)
    folders = {path.name for path in (tmp_path / "member-0").iterdir()}
    assert folders == {"rate-0.1", "rate-0.001", "rate-0.01"}
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.7)])
    better = finetune(tiny(), data, recipe, data, progress=False)
    assert "learning rate 0.1, chosen of 3" in better.metadata.history[-1]


def test_a_real_grid_prefers_a_rate_that_learns():
    data = batches(96)
    recipe = Recipe(optimizer="adamw", grid=(1e-7, 1e-2), epochs=4, schedule="constant")
    chosen = finetune(tiny(), data, recipe, data, progress=False)
    assert "learning rate 0.01, chosen of 2" in chosen.metadata.history[-1]
