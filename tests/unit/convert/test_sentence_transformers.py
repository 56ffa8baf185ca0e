"""sentence-transformers models are converted with their pooling, their tokenizer and a new classifier."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import near, refused
from torch import nn

import hydra_ensembles as he
from architectures_transformers import TEXT, save_tokenizer, sentence_model, transformers_model

SENTENCES = ["a b c", "d e f g h a b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    save_tokenizer(path)
    transformers_model("BertModel", TEXT).save_pretrained(path)
    return path


def embeds_alike(base: he.Ensemble, model: Any, prompt: str = "") -> None:
    found = base.features(base.prepare([prompt + sentence for sentence in SENTENCES]))[0]
    near(found, model.encode(SENTENCES, convert_to_tensor=True))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_features_are_its_embeddings_and_its_tokenizer_comes_along(folder: Path, pooling: str) -> None:
    model = sentence_model(folder, pooling)
    embeds_alike(he.convert(model), model)
    assert he.convert(model, num_labels=3).predict(SENTENCES).probs.shape == (3, 3)


def test_a_classifier_reads_features_before_they_are_scaled(folder: Path) -> None:
    scaled, plain = sentence_model(folder, "mean", "normalize"), sentence_model(folder, "mean")
    base = he.convert(scaled, num_labels=2)
    inputs = base.prepare(SENTENCES)
    assert torch.equal(base.features(inputs), he.convert(plain).features(inputs))
    refused(scaled, "num_labels")
    plain.truncate_dim = 8
    refused(plain, "cut to 8 numbers.*num_labels")


def test_a_prompt_before_every_text_is_refused(folder: Path) -> None:
    model = sentence_model(folder, "mean")
    model.prompts, model.default_prompt_name = {"query": "a b "}, "query"
    refused(model, "default_prompt_name")
    model.default_prompt_name = None
    base, model.default_prompt_name = he.convert(model), "query"
    embeds_alike(base, model, prompt="a b ")


def test_a_cross_encoder_keeps_its_tokenizer_and_its_classes(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    names = {"id2label": dict(enumerate("abcde")), "label2id": {name: at for at, name in enumerate("abcde")}}
    transformers_model("BertForSequenceClassification", {**TEXT, **names}).save_pretrained(tmp_path)
    model, pairs = library.CrossEncoder(str(tmp_path), device="cpu"), [("a b", "c d e"), ("f", "g h a b c")]
    base = he.convert(model)
    assert base.metadata.labels == tuple("abcde")
    near(base.predict(pairs).probs, model.predict(pairs, convert_to_tensor=True, apply_softmax=True))
    model.activation_fn = nn.Softmax(dim=-1)
    near(he.convert(model).predict(pairs).probs, base.predict(pairs).probs)
    model.activation_fn = nn.Sigmoid()  # several classes may be correct
    near(he.convert(model).predict(pairs).probs, model.predict(pairs, convert_to_tensor=True))
    model.activation_fn = nn.Tanh()
    refused(model, "Tanh")


def test_a_reranker_keeps_its_sigmoid(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    transformers_model("BertForSequenceClassification", {**TEXT, "num_labels": 1}).save_pretrained(tmp_path)
    model, pairs = library.CrossEncoder(str(tmp_path), device="cpu"), [("a b", "c d e"), ("f", "g h a b c")]
    base = he.convert(model, labels=["other", "relevant"])
    near(base.predict(pairs).probs[:, 1], model.predict(pairs, convert_to_tensor=True))
