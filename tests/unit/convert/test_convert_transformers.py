"""Variants of transformers models beyond the contract tests: bare encoders, dropout, labels, and refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from convert_cases import alike, refused
from torch import nn

import hydra_ensembles as he
from architectures import images
from architectures_clip import transformers_clip
from architectures_transformers import DISTILBERT, TEXT, VISION, token_batch, transformers_model

RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
TEXT_RATES = {**TEXT, **RATES, "classifier_dropout": 0.3}
DISTILBERT_RATES = {**DISTILBERT, "dropout": 0.1, "attention_dropout": 0.2, "seq_classif_dropout": 0.3}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {**VISION, **RATES}),
    "dinov2": ("Dinov2", {**VISION, **RATES, "drop_path_rate": 0.3}),
    **{name.lower(): (name, TEXT_RATES) for name in ("Bert", "Roberta", "Electra")},
    "distilbert": ("DistilBert", DISTILBERT_RATES),
}


def build(family: str, **changes: Any) -> Any:
    name, settings = FAMILIES[family]
    task = "Image" if "patch_size" in settings else "Sequence"
    return transformers_model(f"{name}For{task}Classification", {**settings, **changes}).eval()


def batch(family: str) -> dict[str, torch.Tensor]:
    if "patch_size" in FAMILIES[family][1]:
        return images(32, 32)
    return token_batch(pad=1 if family == "roberta" else 0, segments=family != "distilbert")


def assert_same_logits(model: Any, inputs: dict[str, torch.Tensor]) -> he.Ensemble:
    ensemble: he.Ensemble = he.convert(model)
    with torch.no_grad():
        alike(ensemble(inputs)[0], model(**inputs).logits)
    return ensemble


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_bare_encoder_is_read_as_the_classifier_of_its_family(family: str) -> None:
    classifier = build(family)
    whole, bare = he.convert(classifier), he.convert(classifier.base_model, num_labels=5)
    assert bare.config == whole.config  # the same readout, dropout included
    readout = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith("readout.")}
    bare.load_state_dict({**bare.state_dict(), **readout})
    alike(bare(batch(family))[0], classifier(**batch(family)).logits)


@torch.no_grad()
def test_vit_reads_its_pooler_for_features_only() -> None:
    model, inputs = transformers_model("ViTModel", VISION), images(32, 32)
    token = model(**inputs).last_hidden_state[:, 0]
    assert torch.allclose(he.convert(model, num_labels=3).features(inputs)[0], token, atol=1e-5)
    unpooled = transformers_model("ViTModel", VISION, add_pooling_layer=False)
    assert torch.allclose(he.convert(unpooled)(inputs)[0], unpooled(**inputs).last_hidden_state[:, 0], atol=1e-5)
    other = transformers_model("ViTModel", {**VISION, "pooler_act": "sigmoid"})
    refused(other, "sigmoid")
    assert he.convert(other, num_labels=3).num_classes == 3  # the family's classifier does not use it


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("vit", {"projection": 0.1, "output": 0.1}),
        ("dinov2", {"drop_path": (0.3, 0.3)}),
        ("bert", {"projection": 0.1, "output": 0.1, "after_hidden": 0.3}),
        ("roberta", {"projection": 0.1, "output": 0.1, "first_token": 0.1, "after_hidden": 0.1}),
        ("electra", {"projection": 0.1, "output": 0.1, "first_token": 0.3, "after_hidden": 0.3}),
        ("distilbert", {"output": 0.1, "after_hidden": 0.3}),
    ],
)
def test_dropout_is_where_the_library_has_it(family: str, expected: dict[str, Any]) -> None:
    changes = {"classifier_dropout": None} if family == "roberta" else {}  # falls back to the hidden dropout
    config = he.convert(build(family, **changes)).config
    found = {
        "stem": config.stem.dropout,
        "attention": config.encoder.attention_dropout,
        "projection": config.encoder.projection_dropout,
        "activation": config.encoder.activation_dropout,
        "output": config.encoder.output_dropout,
        "drop_path": config.encoder.drop_path if any(config.encoder.drop_path) else 0.0,
        "first_token": config.readout.dropout,
        "after_hidden": config.readout.hidden_dropout,
    }
    assert {place: rate for place, rate in found.items() if rate} == {"stem": 0.1, "attention": 0.2, **expected}


def test_labels_are_taken_when_they_are_names() -> None:
    names = ["cat", "dog", "bird", "fish", "ant"]
    model = build("vit", id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    assert he.convert(model).metadata.labels == tuple(names)
    assert he.convert(build("vit")).metadata.labels == ()  # LABEL_0, LABEL_1, …
    model.config.id2label = dict(enumerate(["crane", "dog", "crane", "", "ant"]))
    assert he.convert(model).metadata.labels == ("crane (0)", "dog", "crane (2)", "(3)", "ant")
    for odd in ({name: at for at, name in enumerate(names)}, {2 * at: name for at, name in enumerate(names)}):
        model.config.id2label = odd  # label2id by mistake, and ids with gaps: the order of classes is unknown
        assert he.convert(model).metadata.labels == ()
    assert he.convert(model.base_model, num_labels=5).metadata.labels == ()  # a new classifier has no names


@pytest.mark.parametrize("make", [partial(transformers_clip, {}, {}), partial(build, "bert")])
def test_outputs_are_named_whatever_the_configuration_says(make: Any) -> None:
    expected, model = he.convert(make()).state_dict(), make(return_dict=False)
    found = he.convert(model).state_dict()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert model.config.return_dict is False


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu", "quick_gelu"])
def test_every_activation_of_bert_keeps_its_logits(activation: str) -> None:
    assert_same_logits(build("bert", hidden_act=activation), batch("bert"))


def test_tables_and_classifiers_count_not_the_configuration() -> None:
    resized, inputs = build("bert"), batch("bert")
    resized.resize_token_embeddings(64, mean_resizing=False)
    inputs["input_ids"][0, 2] = 63
    assert_same_logits(resized, inputs)
    replaced = build("vit", image_size=(24, 40))
    replaced.classifier = nn.Linear(32, 7, bias=False)
    assert assert_same_logits(replaced, images(24, 40)).num_classes == 7
