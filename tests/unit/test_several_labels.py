"""Sigmoid outputs: classifiers with one output, and with several right labels."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures_decoders import GROUPED
from architectures_transformers import transformers_model
from hydra_ensembles.errors import ConfigError, DataError, TooFewSamplesError

NAMES = ("toxic", "insult", "threat")


def reranker() -> Any:
    model: Any = transformers_model("Qwen2ForSequenceClassification", {**GROUPED, "num_labels": 1})
    model.score.weight.data *= 8
    return model


def tagger() -> Any:
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    several = {"num_labels": 3, "problem_type": "multi_label_classification", **labels}
    model: Any = transformers_model("BertForSequenceClassification", {**_BERT, **several})
    model.classifier.weight.data *= 30
    return model


_BERT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 60, (rows, 7), generator=torch.Generator().manual_seed(seed))


def batches_of(model: he.Ensemble, rows: int = 400, seed: int = 0) -> list[Any]:
    """Inputs with labels that the model's own probabilities were drawn for."""
    inputs = ids(rows, seed)
    odds = model(inputs)[0].detach()
    truth = (torch.rand(odds.shape, generator=torch.Generator().manual_seed(seed)) < odds.sigmoid()).long()
    return [(inputs, truth[:, 0] if truth.shape[1] == 1 else truth)]


@torch.no_grad()
def test_one_output_answers_what_transformers_answers_and_is_a_classifier_of_two_classes(tmp_path: Path) -> None:
    model = reranker()
    base = he.convert(model, labels=["no", "yes"])
    logits = model(input_ids=ids(5)).logits
    assert base(ids(5)).shape == (1, 5, 1)
    assert torch.allclose(base(ids(5))[0], logits, atol=1e-5)
    assert torch.allclose(base.optimize()(ids(5))[0], logits, atol=1e-5)
    answer = base.predict(ids(5))
    assert torch.allclose(answer.probs, torch.cat([1 - logits.sigmoid(), logits.sigmoid()], dim=1), atol=1e-5)
    assert answer.names() == [["no", "yes"][int(one > 0)] for one in logits]
    deep = he.Ensemble.stack(
        [base, he.finetune(base, batches_of(base, 8), he.Recipe(learning_rate=1e-3, steps=1), progress=False)]
    )
    assert deep(ids(5)).shape == (2, 5, 1)
    safe = he.calibrate(deep, batches_of(base), share=0.9)
    assert safe.predict(ids(5)).familiarity is not None
    safe.save_pretrained(tmp_path)
    assert torch.equal(he.load(tmp_path).predict(ids(5)).probs, safe.predict(ids(5)).probs)
    assert 0.5 < he.evaluate(safe, batches_of(base, 50, 1), progress=False).numbers()["accuracy"] <= 1


@torch.no_grad()
def test_several_right_labels_have_a_sigmoid_and_a_promise_each(tmp_path: Path) -> None:
    model = tagger()
    base = he.convert(model)
    logits = model(input_ids=ids(6)).logits
    assert torch.allclose(base(ids(6))[0], logits, atol=1e-5)
    answer = base.predict(ids(6))
    assert torch.allclose(answer.probs, logits.sigmoid(), atol=1e-5)
    assert answer.accept is None
    assert len(answer[:2]) == 2
    assert answer.score("entropy").shape == (6, 3)
    safe = he.calibrate(base, batches_of(base, 1500), risk=0.3)
    assert list(safe.promise) == list(NAMES)
    safe.save_pretrained(tmp_path)
    loaded = he.load(tmp_path).predict(ids(200, 2))
    calibrated = safe.predict(ids(200, 2))
    assert torch.equal(loaded.accept, calibrated.accept)
    assert calibrated.accept.shape == (200, 3)
    assert torch.equal(calibrated.of("insult").accept, calibrated.accept[:, 1])
    assert torch.equal(calibrated.of(1).confidence, calibrated.confidence[:, 1])
    inputs, truth = batches_of(base, 1500, 3)[0]
    new = safe.predict(inputs)
    for label, promise in enumerate(safe.promise.values()):
        accepted = new.accept[:, label]
        assert accepted.float().mean() > 0.1
        assert promise.risk == 0.3
        assert (new.label != truth)[:, label][accepted].float().mean() <= 0.3
    looser = he.calibrate(base, batches_of(base, 1500), risk=[0.3, 0.5]).at(dict.fromkeys(NAMES, 0.5))
    assert {promise.risk for promise in looser.promise.values()} == {0.5}
    some = he.calibrate(base, batches_of(base, 1500), risk={"threat": 0.3}).predict(ids(50))
    assert not some.accept[:, :2].any()
    shared = he.calibrate(base, batches_of(base, 1500), share=0.8).predict(inputs).accept.float().mean(0)
    assert ((shared - 0.8).abs() < 0.05).all()


def test_what_several_right_labels_do_not_have_is_one_clear_error() -> None:
    base = he.convert(tagger())
    single = [(ids(8), torch.arange(8) % 3)]
    for call in (
        lambda: he.evaluate(base, single, progress=False),
        lambda: he.fit_familiarity(base, single),
        lambda: he.finetune(base, single, he.Recipe(learning_rate=1e-3, steps=1), progress=False),
        lambda: he.taylor(base, single, budget=1),
        lambda: he.extract_circuit(base, single, score="acc", budget=1, progress=False),
        lambda: he.export(base, "never.onnx"),
        lambda: he.cascade([base, base], single),
    ):
        with pytest.raises(ConfigError, match="one right class"):
            call()
    for labels in (torch.arange(8) % 3, torch.full((8, 3), 0.5)):
        with pytest.raises(DataError, match="0 and 1"):
            he.calibrate(base, [(ids(8), labels)])
    with pytest.raises(ConfigError, match="familiarity"):
        he.calibrate(base, batches_of(base), familiarity="knn")
    with pytest.raises(TooFewSamplesError, match="toxic"):
        he.calibrate(base, batches_of(base, 20), risk=0.01)
    with pytest.raises(ConfigError, match="one right class"):
        he.Monitor(he.calibrate(base, batches_of(base, 100), share=0.5))
    assert he.prune(base, [(0, 0)]).predict(ids(2)).probs.shape == (2, 3)
