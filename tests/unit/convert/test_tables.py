"""What the tables read from a model: variants, training settings, class names; and what has no table."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from convert_cases import alike, changed, refused, vit
from torch import nn

import hydra_ensembles as he
from architectures import VISION_VARIANTS, ArchitectureCase, images
from architectures_clip import TOWER_VARIANTS, open_clip_model
from architectures_transformers import DISTILBERT, TEXT, VARIANTS, VISION, token_batch, transformers_model

CASES = [*VISION_VARIANTS, *VARIANTS, *TOWER_VARIANTS]


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_variants_answer_like_the_originals_for_inputs_of_every_shape(case: ArchitectureCase) -> None:
    model = case.build()
    converted = he.convert(model)
    for inputs in (case.inputs(), *(make() for make in case.other_inputs)):
        alike(converted(inputs)[0], case.logits(model, inputs))


# --- transformers ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_bare_encoder_is_read_as_the_classifier_of_its_family(family: str) -> None:
    classifier = build(family)
    whole, bare = he.convert(classifier), he.convert(classifier.base_model, num_labels=5)
    assert bare.config == whole.config  # the same readout, dropout included
    readout = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith("readout.")}
    bare.load_state_dict({**bare.state_dict(), **readout})
    alike(bare(batch(family))[0], classifier(**batch(family)).logits)


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
    assert he.convert(model, labels=("a", "b", "c", "d", "e")).metadata.labels == ("a", "b", "c", "d", "e")
    assert he.convert(build("vit")).metadata.labels == ()  # LABEL_0, LABEL_1, …
    model.config.id2label = dict(enumerate(["crane", "dog", "crane", "", "ant"]))
    assert he.convert(model).metadata.labels == ("crane (0)", "dog", "crane (2)", "(3)", "ant")
    assert he.convert(model.base_model, num_labels=5).metadata.labels == ()  # a new classifier has no names


@pytest.mark.parametrize("make", [partial(build, "vit"), vit])
def test_what_is_frozen_stays_frozen_unless_all_is(make: Any) -> None:
    """A fused QKV weight is frozen only where all three are."""
    model = make().requires_grad_(False)
    assert all(parameter.requires_grad for parameter in he.convert(model).parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "q_proj" in name)
    trained = {name for name, parameter in he.convert(model).named_parameters() if parameter.requires_grad}
    assert all("norm" in name or (make is not vit and ".qkv" in name) for name in trained)
    assert {"encoder.layers.0.norm1.weight", "readout.norm.bias"} <= trained


# --- what cannot be converted ------------------------------------------------------------------------------------


def timm_tiny(name: str) -> Any:
    import timm

    with torch.device("meta"):
        return timm.create_model(name, num_classes=5)


def hf(model: str, settings: dict[str, Any], **changes: Any) -> Any:
    return transformers_model(model, {**settings, **changes})


def bert(**changes: Any) -> Any:
    return hf("BertForSequenceClassification", TEXT, **changes)


EXTRA = nn.Parameter(torch.zeros(3))
HALF = nn.Linear(32, 32).half()
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: 3, "live model, or the folder.*int"),
    (lambda: he.convert(vit()), "Ensemble already"),
    (lambda: timm_tiny("swin_tiny_patch4_window7_224"), r"no table for timm\.models\.swin.*stage.*docs/models\.md"),
    (lambda: hf("BertForMaskedLM", TEXT), "base_model.*num_labels"),
    (lambda: nn.LSTM(3, 4), r"no table.*he\.Declaration.*docs/models\.md.*calibrate"),
    (lambda: changed(vit(), "head", nn.Linear(32, 5).to(torch.float8_e4m3fn)), "float8_e4m3fn.*quantised"),
    (lambda: changed(vit(), "norm", nn.LayerNorm(32).bfloat16()), r"one type.*model\.float\(\)"),
    (lambda: changed(bert(), "bert.encoder.layer.0.attention.self.key", HALF), "one type"),  # joined with others
    (lambda: hf("GteModel", TEXT, rope_parameters=LINEAR_ROPE), "linear"),
    (lambda: bert(is_decoder=True), "answers.*differ by"),
    (lambda: hf("ViTForImageClassification", VISION, problem_type="regression"), "regression"),
    (lambda: open_clip_model({"layers": (1, 1, 1, 1)}), "no table.*ModifiedResNet"),
    (lambda: changed(open_clip_model(), "adapter", EXTRA), r"no canonical place: \['adapter'\]"),
]


@pytest.mark.parametrize(("build", "token"), REFUSED)
def test_what_cannot_be_converted_is_refused_with_what_works(build: Any, token: str) -> None:
    refused(build(), token)
