"""What cannot be converted is refused in a few lines: what it is, why, and the nearest way that works."""

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import timm_model
from architectures_transformers import TEXT, VISION, transformers_model
from hydra_ensembles.convert.convert import ARCHITECTURES, DUAL_ARCHITECTURES
from hydra_ensembles.convert.refusals import refusal
from hydra_ensembles.errors import ConversionError

VIT = "vit_tiny_patch16_224"
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}
_GPT = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 60, "pad_token_id": 0}
_T5 = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": 60}
_LLAMA = {**TEXT, "num_key_value_heads": 4, "pad_token_id": 0}


def timm_tiny(name: str) -> Any:
    import timm

    with torch.device("meta"):
        return timm.create_model(name, num_classes=5)


class Around(nn.Module):
    """A model around another, as training libraries have them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images)


def without(part: str, model: nn.Module) -> nn.Module:
    """As a release of the library could make it that does not have the part yet."""
    delattr(model, part)
    return model


def subclass_of(model: nn.Module) -> nn.Module:
    model.__class__ = type("Mine", (type(model),), {})
    return model


@pytest.mark.parametrize(
    ("build", "token"),
    [
        (lambda: timm_tiny("swin_tiny_patch4_window7_224"), "hierarchical"),
        (lambda: timm_tiny("convnext_tiny"), "convolutional"),
        (lambda: timm_tiny("resnet18"), "convolutional"),
        (lambda: timm_tiny("mixer_s32_224"), "MLP"),
        (lambda: transformers_model("SwinForImageClassification", "SwinConfig", _SWIN), "hierarchical"),
        (lambda: transformers_model("T5ForSequenceClassification", "T5Config", _T5), "decoder"),
        (lambda: transformers_model("GPT2ForSequenceClassification", "GPT2Config", _GPT), "decoder"),
        (lambda: transformers_model("LlamaForSequenceClassification", "LlamaConfig", _LLAMA), "decoder"),
        (lambda: transformers_model("BertForMaskedLM", "BertConfig", TEXT), "pre-training.*num_labels"),
        (lambda: transformers_model("ViTMAEForPreTraining", "ViTMAEConfig", VISION), "pre-training.*num_labels"),
        (lambda: transformers_model("BertForTokenClassification", "BertConfig", TEXT), "each token"),
        (lambda: transformers_model("DebertaV2ForSequenceClassification", "DebertaV2Config", TEXT), "disentangled"),
        (lambda: transformers_model("MPNetForSequenceClassification", "MPNetConfig", TEXT), "relative position bias"),
        (lambda: transformers_model("T5EncoderModel", "T5Config", _T5), "relative position bias"),
        (lambda: nn.LSTM(3, 4), r"docs/models\.md.*declaration=.*own_model"),
        (lambda: timm_tiny("vit_relpos_small_patch16_224"), "relative position bias"),
        (lambda: timm_tiny("naflexvit_base_patch16_gap"), "any shape"),
        (lambda: Around(timm_model(VIT)), r"he\.convert\(model\.net\)"),
        (lambda: nn.Sequential(timm_model(VIT)), r"model\.get_submodule\('0'\)"),
        (lambda: subclass_of(timm_model(VIT)), "subclass of VisionTransformer"),
        (
            lambda: without("fc_norm", timm_model("eva02_base_patch14_224")),
            r"fc_norm.*timm that is.*hydra-ensembles\[timm",
        ),
        (lambda: timm_model("eva02_base_patch14_224", rope_type="mixed"), "RotaryEmbeddingMixed.*without it"),
    ],
)
def test_it_is_said_what_it_is_why_and_what_works(build: Any, token: str) -> None:
    with pytest.raises(ConversionError, match=rf"(?s){token}") as caught:
        he.convert(build())
    assert 2 < len(str(caught.value).splitlines()) <= 5


def test_nothing_that_is_supported_has_a_row() -> None:
    names = [name for one in (*ARCHITECTURES, *DUAL_ARCHITECTURES) for name in one.classes]
    assert [name for name in names if refusal(name)] == []


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("swinv2_base_window8_256", "hierarchical"),
        ("efficientnetv2_s", "convolutional"),
        ("regnety_032.ra_in1k", "convolutional"),
        ("convnextv2", "convolutional"),
        ("qwen3", "decoder"),
        ("gpt_neox", "decoder"),
        ("vit_base_patch16_224", None),
        ("timm.models.gemma4_vit.Gemma4VitClassifier", "language model"),
        ("qwen3_vit_base", "language model"),
        ("timm.models.deepseek_vit.DeepseekVitClassifier", "language model"),
        ("transformers.models.dinov3_convnext.modeling_dinov3_convnext.DINOv3ConvNextModel", "convolutional"),
        ("transformers.models.data2vec.modeling_data2vec_vision.Data2VecVisionModel", "relative position bias"),
        ("transformers.models.data2vec.modeling_data2vec_audio.Data2VecAudioModel", "sound"),
        ("transformers.models.data2vec.modeling_data2vec_text.Data2VecTextModel", None),
        ("transformers.models.glm4.modeling_glm4.Glm4ForSequenceClassification", "decoder"),
        ("modernbert-decoder", "decoder"),
        ("transformers.models.layoutlmv3.modeling_layoutlmv3.LayoutLMv3ForSequenceClassification", "more than words"),
        ("transformers.models.timm_wrapper.modeling_timm_wrapper.TimmWrapperForImageClassification", "of timm"),
        ("transformers.models.bit.modeling_bit.BitForImageClassification", "convolutional"),
        ("optimal.Net", None),
    ],
)
def test_names_are_known_by_how_they_begin(name: str, token: str | None) -> None:
    row = refusal(name)
    assert row is None if token is None else row is not None and token in row.what
