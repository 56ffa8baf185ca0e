"""Zero-shot ensembles: logits as the original libraries', members, and everything that an ensemble can do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import perturbed
from architectures_clip import DUAL_CASES, DualCase
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.config import ReadoutConfig
from hydra_ensembles.model.layers import Block
from hydra_ensembles.model.metadata import TextSide
from hydra_ensembles.model.stem_readout import Projections
from hydra_ensembles.schema import to_plain
from zero_shot_models import NAMES, TEMPLATES, WORDS, dual_of, relative_error, tokenizer_for

CASES = {case.name: case for case in DUAL_CASES}
OPEN_CLIP = CASES["open_clip-nonscalar"]  # with a logit bias
every_case = pytest.mark.parametrize("case", DUAL_CASES, ids=str)


def three(case: DualCase = OPEN_CLIP) -> list[he.DualEncoder]:
    """Three dual encoders that differ everywhere, scales included."""
    return [dual_of(case, perturbed(case.build(), seed)) for seed in (11, 12, 13)]


# --- the originals' logits ---------------------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_logits_are_the_originals_also_after_loading(case: DualCase, tmp_path: Path) -> None:
    model, pixels = case.build(), case.pixels()
    ensemble = he.zero_shot(dual_of(case, model), NAMES)
    tokens = tokenizer_for(case)([f"A photo of a {name}." for name in NAMES])
    expected = case.logits(model, pixels, tokens)
    assert relative_error(ensemble(pixels)[0], expected) < 1e-5
    assert (ensemble.num_classes, ensemble.metadata.labels, ensemble.kind) == (len(NAMES), NAMES, "image")
    ensemble.save_pretrained(tmp_path)
    loaded = he.Ensemble.from_pretrained(tmp_path)
    assert torch.equal(loaded(pixels), ensemble(pixels))
    assert loaded.metadata == ensemble.metadata


@every_case
@torch.no_grad()
def test_templates_are_normalised_averaged_and_normalised_again(case: DualCase) -> None:
    model, pixels, tokenizer = case.build(), case.pixels(), tokenizer_for(case)
    ensemble = he.zero_shot(dual_of(case, model), NAMES, TEMPLATES)
    normalize = nn.functional.normalize
    texts = [
        normalize(case.text_features(model, tokenizer([one.replace("{label}", name) for name in NAMES])), dim=-1)
        for one in TEMPLATES
    ]
    classes = normalize(torch.stack(texts).mean(0), dim=-1)
    cosines = normalize(case.image_features(model, pixels), dim=-1) @ classes.T
    bias = getattr(model, "logit_bias", None)
    expected = cosines * model.logit_scale.exp() + (0.0 if bias is None else bias)  # type: ignore[operator,union-attr]
    assert relative_error(ensemble(pixels)[0], expected) < 1e-5


@torch.no_grad()
def test_a_tower_that_projects_by_itself_keeps_its_projection() -> None:
    case = CASES["transformers-quickgelu"]
    dual = dual_of(case)
    assert dual.projections.image is not None
    state = {
        **dual.image.state_dict(),
        "readout.classifier.weight": dual.projections.image.weight,
        "readout.classifier.bias": torch.full((1, 24), 0.3),
    }
    config = dual.image.config
    readout = ReadoutConfig(**{**vars(config.readout), "num_classes": 24})
    image = he.Ensemble.from_state(type(config)(config.stem, config.encoder, readout, config.heads), state)
    pixels, tokens = case.pixels(), [f"A photo of a {name}." for name in NAMES]
    for outer in (None, Projections.fresh(24, 32, 24, bias=True).image):
        wrapped = he.DualEncoder(image, dual.text, Projections(outer, dual.projections.text), dual.logit_scale)
        assert relative_error(he.zero_shot(wrapped, NAMES)(pixels), wrapped(pixels, tokens)) < 1e-5
    with pytest.raises(ConfigError, match="must end in one feature vector"):
        he.zero_shot(he.DualEncoder(_as_image_tower(dual), dual.text, dual.projections), NAMES)


def _as_image_tower(dual: he.DualEncoder) -> he.Ensemble:
    """A zero-shot ensemble whose number of classes happens to be the width that the projection takes."""
    names = [f"{first} {second}" for first in WORDS[6:] for second in WORDS[6:]]
    return he.zero_shot(dual, names[: dual.image.config.encoder.width])


# --- members -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_each_member_has_the_class_embeddings_of_its_own_text_tower() -> None:
    duals, pixels = three(), OPEN_CLIP.pixels()
    expected = torch.cat([he.zero_shot(dual, NAMES)(pixels) for dual in duals])
    assert relative_error(expected[0], expected[1]) > 1e-2
    stacked = he.zero_shot(he.DualEncoder.stack(duals), NAMES)
    assert relative_error(stacked(pixels), expected) < 1e-5
    joined = he.Ensemble.stack([he.zero_shot(dual, NAMES) for dual in duals])
    assert relative_error(joined(pixels), expected) < 1e-5
    assert isinstance(joined.metadata.text_side, TextSide)
    for index in range(3):
        assert relative_error(stacked.member(index)(pixels)[0], expected[index]) < 1e-5
        for whole in (stacked, joined):
            again = he.retarget(whole.member(index), NAMES)
            assert relative_error(again(pixels)[0], expected[index]) < 1e-5


@pytest.mark.parametrize("many", ["image", "text"])
@torch.no_grad()
def test_one_tower_may_serve_all_members(many: str) -> None:
    duals, pixels = three(), OPEN_CLIP.pixels()
    towers = {"image": duals[0].image, "text": duals[0].text}
    towers[many] = he.Ensemble.stack([getattr(dual, many) for dual in duals])
    dual = he.DualEncoder(**towers, projections=duals[0].projections, logit_scale=duals[0].logit_scale)
    ensemble = he.zero_shot(dual, NAMES)
    assert ensemble.num_members == 3
    expected = dual(pixels, [f"A photo of a {name}." for name in NAMES])
    assert relative_error(ensemble(pixels), expected) < 1e-5
    assert relative_error(he.retarget(ensemble, NAMES)(pixels), expected) < 1e-5
    assert ensemble.metadata.text_side is not None
    assert ensemble.metadata.text_side.settings.members == (3 if many == "text" else 1)


@torch.no_grad()
def test_three_members_take_one_pass_over_the_image_tower_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    dual = dual_of(OPEN_CLIP)
    ensemble = he.zero_shot(he.fuse([he.prune(dual, [(1, head, "image")]) for head in range(3)]), NAMES)
    assert ensemble.config.trunk == 1
    ran: list[tuple[bool, int]] = []
    forward = Block.forward

    def counting(block: Block, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ran.append((block.attention.causal, x.shape[0]))
        return forward(block, x, *arguments)

    monkeypatch.setattr(Block, "forward", counting)
    assert ensemble(OPEN_CLIP.pixels()).shape == (3, len(OPEN_CLIP.pixels()), len(NAMES))
    assert ran == [(False, 1), (False, 1)]  # two blocks, both entered once for all members, none of a text tower


# --- like any other ensemble -------------------------------------------------------------------------------


def labelled(count: int = 48) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 3, 32, 32, generator=generator), torch.randint(0, len(NAMES), (16,), generator=generator))
        for _ in range(count // 16)
    ]


def test_it_is_pruned_fused_optimised_calibrated_evaluated_and_saved(tmp_path: Path) -> None:
    from PIL import Image

    ensemble, pixels = he.zero_shot(dual_of(OPEN_CLIP), NAMES), OPEN_CLIP.pixels()
    members = [he.prune(ensemble, heads) for heads in ([(0, 1)], [(1, 2)], [(0, 3), (1, 0)])]
    fused = he.fuse(members)
    assert fused.metadata.text_side is not None
    assert fused.metadata.text_side.settings.members == 1  # the same for all, so it is kept once
    with torch.no_grad():
        expected = torch.cat([member(pixels) for member in members])
        assert relative_error(fused(pixels), expected) < 1e-5
        assert relative_error(fused.optimize()(pixels), expected) < 1e-5
    calibrated = he.calibrate(fused, labelled())
    calibrated.save_pretrained(tmp_path)
    loaded = he.Ensemble.from_pretrained(tmp_path)
    prediction = loaded.predict([Image.new("RGB", (40, 30), (200, 30, 90))])
    assert prediction.names()[0] in NAMES
    assert prediction.accept is not None
    evaluation = he.evaluate(loaded, labelled(), {"noise": labelled()}, progress=False)
    assert 0.0 <= evaluation.id.accuracy <= 1.0
    card = (tmp_path / "README.md").read_text()
    assert "he.retarget" in card


@torch.no_grad()
def test_it_compiles_exports_and_runs_in_bfloat16() -> None:
    pixels = OPEN_CLIP.pixels()
    ensemble = he.zero_shot(he.fuse([he.prune(dual_of(OPEN_CLIP), [(1, head, "image")]) for head in range(2)]), NAMES)
    expected = ensemble(pixels)
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(pixels), expected) < 1e-5
    assert relative_error(torch.export.export(ensemble, (pixels,)).module()(pixels), expected) < 1e-5
    half = ensemble.to(torch.bfloat16)
    assert relative_error(half(pixels.bfloat16()).float(), expected) < 0.05
    assert he.retarget(half, NAMES).dtype == torch.bfloat16  # by text towers that are still in float32


def test_taylor_ranks_the_image_tower_only() -> None:
    dual = dual_of(OPEN_CLIP)
    ranking = he.taylor(he.zero_shot(dual, NAMES), labelled(), budget=2)
    assert {head.layer for head in ranking.heads} == {0, 1}
    with pytest.raises(ConfigError, match="lie on different scales"):
        he.taylor(dual, labelled(), budget=2)  # type: ignore[arg-type]


def test_an_ordinary_readout_is_written_as_before() -> None:
    assert "cosine" not in to_plain(ReadoutConfig())


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        ([], "{label}", "has 0 names"),
        (["cat"], "{label}", "has 1 names"),
        (["cat", "dog", "cat"], "{label}", r"lists \['cat'\] twice"),
        (["cat", " "], "{label}", r"class_names\[1\] is ' '"),
        ("cat", "{label}", "give a list of names"),
        (NAMES, [], "templates is empty"),
        (NAMES, ["a photo"], r"templates\[0\] is 'a photo'; it must have {label}"),
        (NAMES, ["{label}", "{label}"], "lists a sentence twice"),
    ],
)
def test_names_and_templates_are_checked(names: Any, templates: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        he.zero_shot(dual_of(OPEN_CLIP), names, templates)


def test_classes_that_become_the_same_tokens_are_refused() -> None:
    alike = ["cat", "green okapi", "dog", "green quokka"]  # words that the tokenizer does not know
    for make in (he.zero_shot, lambda dual, names: he.retarget(he.zero_shot(dual, NAMES), names)):
        with pytest.raises(DataError, match="classes 'green okapi' and 'green quokka' have the same embedding"):
            make(dual_of(OPEN_CLIP), alike)


def test_strings_need_a_tokenizer() -> None:
    with pytest.raises(DataError, match="no saved preprocessing"):
        he.zero_shot(he.convert(OPEN_CLIP.build()), NAMES)
    with pytest.raises(ConfigError, match="cosine needs classes and one feature vector"):
        ReadoutConfig(cosine=he.zero_shot(dual_of(OPEN_CLIP), NAMES).config.readout.cosine)
