"""Dual encoders: features, logits and gradients equal the originals'; members, and duals made of two encoders."""

import copy

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import images, relative_error
from architectures_clip import DUAL_CASES, DualCase
from checkpoint_models import same_state
from hydra_ensembles.model.dual_encoder import DualEncoder
from hydra_ensembles.model.stem_readout import Projections
from zero_shot_models import three

VARIED = (
    "transformers-end-not-highest",
    "open_clip-mean",
    "open_clip-qk-norm",
    "open_clip-sincos",
    "open_clip-custom-siglip-text",
    "open_clip-timm-linear-bias",
    "open_clip-timm-siglip",
)
every_case = pytest.mark.parametrize("case", DUAL_CASES, ids=str)
varied_cases = pytest.mark.parametrize("case", [case for case in DUAL_CASES if case.name in VARIED], ids=str)
BY_NAME = {case.name: case for case in DUAL_CASES}
TRANSFORMERS, OPEN_CLIP = BY_NAME["transformers-quickgelu"], BY_NAME["open_clip-nonscalar"]


@every_case
@torch.no_grad()
def test_features_and_logits_equal_the_originals(case: DualCase) -> None:
    model, pixels, texts = case.build(), case.pixels(), case.texts()
    dual = he.convert(model)
    assert (dual.num_members, dual.image.num_classes, dual.text.num_classes) == (1, 0, 0)

    image, text = case.image_features(model, pixels), case.text_features(model, texts)
    assert dual.encode_image(pixels).shape == (1, *image.shape)
    assert relative_error(dual.encode_image(pixels, normalize=False)[0], image) < 1e-5
    assert relative_error(dual.encode_text(texts, normalize=False)[0], text) < 1e-5
    unit = dual.encode_image(pixels).norm(dim=-1), dual.encode_text(texts).norm(dim=-1)
    assert all(torch.allclose(length, torch.ones_like(length), atol=1e-5) for length in unit)
    logits = dual(pixels, texts)
    assert logits.shape == (1, len(pixels), len(text))
    assert relative_error(logits[0], case.logits(model, pixels, texts)) < 1e-5
    for size in case.other_sizes:
        pixels = case.pixels(*size)
        assert relative_error(dual.encode_image(pixels, normalize=False)[0], case.image_features(model, pixels)) < 1e-5


@varied_cases
def test_gradients_equal_the_originals(case: DualCase) -> None:
    model, pixels, texts = case.build(), case.pixels(), case.texts()
    dual = he.convert(model)
    case.logits(model, pixels, texts).square().sum().backward()
    dual(pixels, texts).square().sum().backward()
    holder = copy.deepcopy(model)  # holds gradients as parameters: converting it rearranges them like weights
    for mine, theirs in zip(holder.parameters(), model.parameters(), strict=True):
        mine.data = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
    expected = dict(he.convert(holder, probe=False).named_parameters())
    scale = max(parameter.abs().max().item() for parameter in expected.values())
    for name, parameter in dual.named_parameters():
        assert parameter.grad is not None, name
        if "position" in name and "sincos" in case.name:
            continue  # frozen in the original
        assert (parameter.grad - expected[name]).abs().max() <= 1e-4 * scale, name


@torch.no_grad()
@pytest.mark.slow
def test_it_compiles_and_exports_without_a_graph_break() -> None:
    model = TRANSFORMERS.build()
    dual, batch = he.convert(model), {"pixel_values": TRANSFORMERS.pixels(), **TRANSFORMERS.texts()}
    expected = model(**batch).logits_per_image  # both towers may get the same mapping with both inputs
    compiled = torch.compile(dual, backend="eager", fullgraph=True)
    assert relative_error(compiled(batch, batch)[0], expected) < 1e-5
    exported = torch.export.export(dual, (batch, batch)).module()
    assert relative_error(exported(batch, batch)[0], expected) < 1e-5


def fused(members: list[DualEncoder]) -> DualEncoder:
    return he.fuse(members, stem="separate", mlp="separate")


@torch.no_grad()
def test_a_member_taken_out_is_the_member_put_in_also_where_one_image_tower_serves_all() -> None:
    members, pixels, texts = three(OPEN_CLIP), OPEN_CLIP.pixels(), OPEN_CLIP.texts()
    whole = fused(members)
    assert (whole.num_members, whole.logit_scale.shape) == (3, (3,))
    for index, member in enumerate(members):
        taken = whole.member(index - 3)
        assert taken.config == member.config
        assert same_state(taken, member)
    projections = Projections(members[0].projections.image, whole.projections.text)
    dual = DualEncoder(members[0].image, whole.text, projections, members[0].logit_scale, members[0].logit_bias)
    assert (dual.num_members, dual.encode_image(pixels).shape[0]) == (3, 3)
    for index, member in enumerate(members):
        expected = dual.logits(members[0].encode_image(pixels), member.encode_text(texts))[0]
        assert relative_error(dual(pixels, texts)[index], expected) < 1e-5
        assert relative_error(dual.member(index)(pixels, texts)[0], expected) < 1e-5
    assert fused([dual, members[1]]).num_members == 4


def separate_towers() -> tuple[he.Ensemble, he.Ensemble]:
    """A timm image encoder of width 40 and a BERT of width 32."""
    import timm
    import transformers

    image = timm.create_model(
        "vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=40, depth=2, num_heads=4, num_classes=0
    )
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = transformers.BertModel(transformers.BertConfig(vocab_size=60, **settings))
    return he.convert(image), he.convert(text)


def test_two_encoders_make_a_dual_encoder() -> None:
    image, text = separate_towers()
    projections = Projections.fresh(40, 32, 16)
    dual = DualEncoder(image, text, projections)
    assert (dual.embedding_width, dual.logit_scale.item()) == (16, pytest.approx(2.6593, abs=1e-4))
    pixels, ids = images(32, 32)["pixel_values"], torch.randint(0, 60, (5, 7))
    features = nn.functional.normalize(image(pixels) @ projections.image.weight.transpose(1, 2), dim=-1)  # type: ignore[union-attr]
    assert relative_error(dual.encode_image(pixels), features) < 1e-5
    dual(pixels, ids).sum().backward()
    assert all(parameter.grad is not None for parameter in dual.projections.parameters())
    assert dual.logit_scale.grad is not None
