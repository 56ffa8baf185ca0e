"""Many threads may query one model in training mode; each gets the answers of eval mode."""

from dataclasses import replace

import pytest
import torch

import hydra_ensembles as he
from attack import threads
from hydra_ensembles.model.layers import dropping
from random_ensembles import random_batches, random_ensemble


def dropping_model(shape: str = "text-post-norm") -> he.Ensemble:
    """Two members with a rate of 0.5 for every kind of dropout."""
    plain = random_ensemble(shape, dtype=torch.float32)
    rates = dict.fromkeys(("attention_dropout", "projection_dropout", "activation_dropout", "output_dropout"), 0.5)
    encoder = replace(plain.config.encoder, drop_path=(0.0, 0.5, 0.5), **rates)
    readout = replace(plain.config.readout, dropout=0.5, hidden_dropout=0.5)
    config = replace(plain.config, encoder=encoder, readout=readout, stem=replace(plain.config.stem, dropout=0.5))
    other = random_ensemble(shape, dtype=torch.float32, seed=1)
    members = [he.Ensemble.from_state(config, one.state_dict()) for one in (plain, other)]
    return he.Ensemble.stack(members)


@pytest.mark.parametrize("name", ["a hydra", "an optimized model of texts", "MC dropout", "evaluate", "measure_costs"])
def test_threads_get_the_answers_of_evaluation_mode_and_no_flag_changes(name: str, monkeypatch) -> None:
    monkeypatch.setattr(threads, "ASKED", 4)  # per thread, of eight; the attack suite asks more often
    assert threads.check((name, "training", 0)) == "same"


@pytest.mark.slow
def test_a_model_compiled_in_place_drops_nothing_in_predict_and_goes_on_dropping_in_training() -> None:
    model = dropping_model("image-cls")
    batch, _ = random_batches(model, (5,))[0]
    expected = model.eval().predict(batch).member_logits
    torch.compiler.reset()
    model.train().compile(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            assert not torch.allclose(model(batch.float()), expected, atol=1e-3)
            torch.testing.assert_close(model.predict(batch).member_logits, expected)
    torch.compiler.reset()


def test_predict_drops_nothing_in_training_mode_and_training_goes_on_after_an_error() -> None:
    model = dropping_model()
    batch, _ = random_batches(model, (5,))[0]
    expected = model.predict(batch).member_logits
    for run in (model.train(), model.optimize(plans=["batched"])):
        assert torch.allclose(run.predict(batch).member_logits, expected, rtol=1e-4, atol=1e-5)
    with dropping(False):
        assert torch.allclose(model(batch), expected)
    with pytest.raises(RuntimeError, match="stop"), dropping(False):
        raise RuntimeError("stop")
    assert not torch.allclose(model(batch), expected, atol=1e-3)
