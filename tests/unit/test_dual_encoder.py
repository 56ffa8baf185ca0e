"""Dual encoders: features, logits and gradients equal the originals'; stacked, put together, saved and loaded."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as he
from architectures import ArchitectureCase, images, perturbed
from architectures_clip import (
    DUAL_CASES,
    TOWER_CASES,
    DualCase,
    open_clip_model,
)
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.model.stem_readout import Projections

VARIED = (
    "transformers-quickgelu",
    "transformers-end-not-highest",
    "open_clip-mean",
    "open_clip-layer-scale",
    "open_clip-qk-norm",
    "open_clip-sincos",
    "open_clip-custom-siglip-text",
    "open_clip-timm-linear-bias",
    "open_clip-timm-siglip",
)
every_case = pytest.mark.parametrize("case", DUAL_CASES, ids=str)
varied_cases = pytest.mark.parametrize("case", [case for case in DUAL_CASES if case.name in VARIED], ids=str)
resizable_cases = pytest.mark.parametrize("case", [case for case in DUAL_CASES if case.other_sizes][:2], ids=str)
TWO_LIBRARIES = [case for case in DUAL_CASES if case.name in ("transformers-quickgelu", "open_clip-nonscalar")]
both_libraries = pytest.mark.parametrize("case", TWO_LIBRARIES, ids=str)
TRANSFORMERS, OPEN_CLIP = TWO_LIBRARIES


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def three(case: DualCase) -> list[DualEncoder]:
    """Three models that differ everywhere, scales included."""
    return [he.convert(perturbed(case.build(), seed)) for seed in (11, 12, 13)]


# --- converted == original -------------------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_features_and_logits_equal_the_originals(case: DualCase) -> None:
    model, pixels, texts = case.build(), case.pixels(), case.texts()
    dual = he.convert(model)
    assert isinstance(dual, DualEncoder)
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


@resizable_cases
@torch.no_grad()
def test_other_sizes_equal_the_originals(case: DualCase) -> None:
    model = case.build()
    dual = he.convert(model)
    for size in case.other_sizes:
        pixels = case.pixels(*size)
        assert relative_error(dual.encode_image(pixels, normalize=False)[0], case.image_features(model, pixels)) < 1e-5


@varied_cases
@torch.no_grad()
def test_bfloat16_stays_within_its_rounding(case: DualCase) -> None:
    model, pixels, texts = case.build(), case.pixels(), case.texts()
    half = copy.deepcopy(model).to(torch.bfloat16)
    dual = he.convert(half)
    assert {tensor.dtype for tensor in dual.state_dict().values()} == {torch.bfloat16}
    rounded = pixels.to(torch.bfloat16)
    for exact, original, converted in (
        (
            case.image_features(model, pixels),
            case.image_features(half, rounded),
            dual.encode_image(rounded, normalize=False)[0],
        ),
        (
            case.text_features(model, texts),
            case.text_features(half, texts),
            dual.encode_text(texts, normalize=False)[0],
        ),
    ):
        allowed = 2 * (original.float() - exact).abs().max() + exact.abs().max() * 2**-7
        assert (converted.float() - exact).abs().max() <= allowed


@varied_cases
def test_gradients_equal_the_originals(case: DualCase) -> None:
    model, pixels, texts = case.build(), case.pixels(), case.texts()
    dual = he.convert(model)
    case.logits(model, pixels, texts).square().sum().backward()
    dual(pixels, texts).square().sum().backward()
    holder = copy.deepcopy(model)  # its parameters are the gradients: converting lays them out as ours
    for mine, theirs in zip(holder.parameters(), model.parameters(), strict=True):
        mine.data = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
    expected = dict(he.convert(holder).named_parameters())
    scale = max(parameter.abs().max().item() for parameter in expected.values())
    for name, parameter in dual.named_parameters():
        assert parameter.grad is not None, name
        if "position" in name and "sincos" in case.name:
            continue  # the original does not train this one
        assert (parameter.grad - expected[name]).abs().max() <= 1e-4 * scale, name


@both_libraries
def test_the_original_is_not_touched(case: DualCase) -> None:
    model = case.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in he.convert(model).parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_one_mapping_with_both_inputs_serves_both_towers() -> None:
    model = TRANSFORMERS.build()
    batch = {"pixel_values": TRANSFORMERS.pixels(), **TRANSFORMERS.texts()}
    assert relative_error(he.convert(model)(batch, batch)[0], model(**batch).logits_per_image) < 1e-5


@pytest.mark.parametrize("case", TOWER_CASES, ids=str)
@torch.no_grad()
def test_a_tower_on_its_own_equals_the_original(case: ArchitectureCase) -> None:
    model = case.build()
    ensemble = he.convert(model)
    assert isinstance(ensemble, he.Ensemble)
    for make in (case.inputs, *case.other_inputs):
        assert relative_error(ensemble(make())[0], case.logits(model, make())) < 1e-5


@both_libraries
@torch.no_grad()
def test_it_compiles_and_exports_without_a_graph_break(case: DualCase) -> None:
    dual, pixels, texts = he.convert(case.build()), case.pixels(), case.texts()
    expected = dual(pixels, texts)
    compiled = torch.compile(dual, backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(pixels, texts), expected) < 1e-5
    exported = torch.export.export(dual, (pixels, texts)).module()
    assert relative_error(exported(pixels, texts), expected) < 1e-5


# --- members ---------------------------------------------------------------------------------------------


@both_libraries
@torch.no_grad()
def test_stacked_models_answer_like_the_models_in_turn(case: DualCase) -> None:
    members, pixels, texts = three(case), case.pixels(), case.texts()
    stacked = DualEncoder.stack(members)
    assert (stacked.num_members, stacked.logit_scale.shape) == (3, (3,))
    expected = torch.cat([member(pixels, texts) for member in members])
    assert relative_error(stacked(pixels, texts), expected) < 1e-5
    assert relative_error(expected[0], expected[1]) > 1e-2
    for index, member in enumerate(members):
        taken = stacked.member(index - 3)
        assert taken.config == member.config
        state = member.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in taken.state_dict().items())


@torch.no_grad()
def test_one_image_tower_serves_three_text_towers() -> None:
    members, pixels, texts = three(OPEN_CLIP), OPEN_CLIP.pixels(), OPEN_CLIP.texts()
    text = he.Ensemble.stack([member.text for member in members])
    projections = Projections(
        members[0].projections.image, Projections.stack([member.projections for member in members]).text
    )
    dual = DualEncoder(members[0].image, text, projections, members[0].logit_scale, members[0].logit_bias)
    assert dual.num_members == 3
    assert dual.encode_image(pixels).shape[0] == 3
    for index, member in enumerate(members):
        expected = dual.logits(members[0].encode_image(pixels), member.encode_text(texts))[0]
        assert relative_error(dual(pixels, texts)[index], expected) < 1e-5
        assert relative_error(dual.member(index)(pixels, texts)[0], expected) < 1e-5
    assert DualEncoder.stack([dual, members[1]]).num_members == 4


def test_members_that_do_not_fit_are_refused() -> None:
    members = three(OPEN_CLIP)
    with pytest.raises(ConfigError, match="at least one"):
        DualEncoder.stack([])
    with pytest.raises(ConfigError, match="member 3 does not exist"):
        DualEncoder.stack(members).member(3)
    with pytest.raises(ConfigError, match="1 of 2 members have a logit bias"):
        DualEncoder.stack([members[0], he.convert(open_clip_model())])
    two, rest = he.Ensemble.stack([one.image for one in members[:2]]), he.Ensemble.stack([one.text for one in members])
    with pytest.raises(ConfigError, match="2 members and the text tower 3"):
        DualEncoder(two, rest, members[0].projections)


# --- put together from two encoders ----------------------------------------------------------------------


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
    assert dual.embedding_width == 16
    assert dual.logit_scale.item() == pytest.approx(2.6593, abs=1e-4)
    pixels, ids = images(32, 32)["pixel_values"], torch.randint(0, 60, (5, 7))
    features = nn.functional.normalize(image(pixels) @ projections.image.weight.transpose(1, 2), dim=-1)  # type: ignore[union-attr]
    assert relative_error(dual.encode_image(pixels), features) < 1e-5
    dual(pixels, ids).sum().backward()
    assert all(parameter.grad is not None for parameter in dual.projections.parameters())
    assert dual.logit_scale.grad is not None


def test_widths_that_do_not_meet_are_named() -> None:
    image, text = separate_towers()
    with pytest.raises(
        ConfigError, match=r"image tower ends in an embedding of width 40.*text tower in one of width 32"
    ):
        DualEncoder(image, text)
    with pytest.raises(ConfigError, match="image projection takes features of width 32, the image tower gives 40"):
        DualEncoder(image, text, Projections.fresh(32, 32, 8))
    with pytest.raises(ConfigError, match="text and image"):
        DualEncoder(text, image)
    with pytest.raises(ConfigError, match="logit_scale has 1 numbers and logit_bias 2"):
        DualEncoder(image, text, Projections.fresh(40, 32, 8), logit_bias=torch.zeros(2))
    with pytest.raises(ConfigError, match="scale_copies is 2, it must be 1"):
        DualEncoder(image, text, Projections.fresh(40, 32, 8), logit_scale=torch.zeros(2))


def test_raw_inputs_need_saved_preprocessing() -> None:
    dual = he.convert(open_clip_model())
    with pytest.raises(DataError, match="got list, but this ensemble has no saved preprocessing"):
        dual.encode_text(["a photo"])


def test_it_describes_itself() -> None:
    dual = he.convert(open_clip_model())
    assert repr(dual).startswith("DualEncoder(members=1, embedding=24, image=Ensemble(image, members=1")
    described = dual.describe()
    assert described["image"].parameters == sum(parameter.numel() for parameter in dual.image.parameters())
    assert (dual.device.type, dual.dtype) == ("cpu", torch.float32)
