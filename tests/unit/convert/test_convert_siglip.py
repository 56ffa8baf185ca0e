"""SigLIP and MetaCLIP 2 of transformers: towers, classifiers, zero-shot classification, and models that do not fit."""

from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures import ArchitectureCase
from architectures_clip import (
    END,
    SIGLIP_IMAGE,
    SIGLIP_TEXT,
    TOWER_VARIANTS,
    DualCase,
    open_clip_from_timm,
    texts,
    transformers_metaclip,
    transformers_siglip,
)
from architectures_transformers import transformers_model
from hydra_ensembles.errors import ConversionError
from zero_shot_models import NAMES, word_tokenizer


@pytest.mark.parametrize("case", TOWER_VARIANTS, ids=str)
@torch.no_grad()
def test_towers_answer_like_the_originals(case: ArchitectureCase) -> None:
    model = case.build()
    converted = he.convert(model)
    for inputs in (case.inputs(), *(make() for make in case.other_inputs)):
        expected = case.logits(model, inputs)
        assert (converted(inputs)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_metaclip_is_a_clip() -> None:
    model, pixels, given = transformers_metaclip(), DualCase.pixels(), texts(END, 1, mask=True)
    expected = model(pixel_values=pixels, **given).logits_per_image
    found = he.convert(model)(pixels, given)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_zero_shot_logits_have_the_scale_and_the_bias_of_the_sigmoid() -> None:
    model, pixels = transformers_siglip(), DualCase.pixels()
    dual = he.convert(model, processor=word_tokenizer(mask=True))
    classifier = he.zero_shot(dual, NAMES)
    prompts = [f"A photo of a {name}." for name in NAMES]
    ids = word_tokenizer()(prompts)["input_ids"]  # padded to one length, without a mask: as SigLIP was trained
    expected = model(pixel_values=pixels, input_ids=ids).logits_per_image
    found = classifier(pixels)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.allclose(found.sigmoid(), expected.sigmoid(), atol=1e-5)
    assert dual.config.logit_bias


def test_texts_are_padded_to_the_length_that_is_read_at_the_end() -> None:
    import transformers
    from tokenizers import Tokenizer

    core = Tokenizer.from_str(word_tokenizer().tokenizer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[END]", model_max_length=64)
    for model in (transformers_siglip(), transformers_model("SiglipTextModel", "SiglipTextConfig", SIGLIP_TEXT)):
        converted = he.convert(model, processor=tokenizer)
        preprocessing = getattr(converted, "text", converted).metadata.preprocessing
        assert (preprocessing.pad_to_max, preprocessing.attention_mask) == (True, False)
        assert {name: list(one.shape) for name, one in preprocessing(["a cat"]).items()} == {"input_ids": [1, 12]}


@torch.no_grad()
def test_an_eva_inside_a_tower_of_open_clip_is_read() -> None:
    model: Any = open_clip_from_timm("vit_pe_core_tiny_patch16_384", "map", "none", heads=2)
    dual, pixels = he.convert(model), DualCase.pixels()
    expected = model.encode_image(pixels)
    found = dual.encode_image(pixels, normalize=False)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("model", "config", "settings", "token"),
    [
        ("SiglipVisionModel", "SiglipVisionConfig", {**SIGLIP_IMAGE, "vision_use_head": False}, "vision_use_head"),
        ("Siglip2VisionModel", "Siglip2VisionConfig", {**SIGLIP_IMAGE, "num_patches": 16}, "NaFlex"),
    ],
)
def test_what_does_not_fit_is_refused(model: str, config: str, settings: dict[str, Any], token: str) -> None:
    with pytest.raises(ConversionError, match=token):
        he.convert(transformers_model(model, config, settings))
