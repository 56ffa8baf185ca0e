"""Zero-shot ensembles: the originals' logits, members, and all that ensembles can do."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import hydra_ensembles as he
from architectures import relative_error
from architectures_clip import DUAL_CASES, DualCase
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.config import ReadoutConfig
from hydra_ensembles.model.stem_readout import Projections
from zero_shot_models import NAMES, TEMPLATES, dual_of, three, tokenizer_for

CASES = {case.name: case for case in DUAL_CASES}
OPEN_CLIP = CASES["open_clip-nonscalar"]  # with a logit bias
VARIED = (  # test_dual_encoder.py compares the towers of all cases
    "transformers-quickgelu",
    "open_clip-nonscalar",
    "open_clip-custom-siglip-text",
    "open_clip-no-text-projection",
    "open_clip-timm-linear-bias",
)


@cache
def one_dual(case: DualCase = OPEN_CLIP) -> he.DualEncoder:
    """Cached, like the next ones; tests must not modify them."""
    return dual_of(case)


@pytest.mark.parametrize("case", [CASES[name] for name in VARIED], ids=str)
@torch.no_grad()
def test_logits_are_the_originals_also_after_loading(case: DualCase, tmp_path: Path) -> None:
    model, pixels, tokenizer, normalize = case.build(), case.pixels(), tokenizer_for(case), nn.functional.normalize
    dual = dual_of(case, model)
    ensemble = he.zero_shot(dual, NAMES)
    expected = case.logits(model, pixels, tokenizer([f"A photo of a {name}." for name in NAMES]))
    assert relative_error(ensemble(pixels)[0], expected) < 1e-5
    assert (ensemble.num_classes, ensemble.metadata.labels, ensemble.kind) == (len(NAMES), NAMES, "image")
    ensemble.save_pretrained(tmp_path)
    loaded = he.Ensemble.from_pretrained(tmp_path)
    assert torch.equal(loaded(pixels), ensemble(pixels))
    assert loaded.metadata == ensemble.metadata
    # several templates: embeddings are normalised, averaged, and normalised again
    texts = [tokenizer([one.replace("{label}", name) for name in NAMES]) for one in TEMPLATES]
    embedded = torch.stack([normalize(case.text_features(model, one), dim=-1) for one in texts])
    cosines = normalize(case.image_features(model, pixels), dim=-1) @ normalize(embedded.mean(0), dim=-1).T
    bias = getattr(model, "logit_bias", None)
    expected = cosines * model.logit_scale.exp() + (0.0 if bias is None else bias)  # type: ignore[operator,union-attr]
    assert relative_error(he.zero_shot(dual, NAMES, TEMPLATES)(pixels)[0], expected) < 1e-5


@torch.no_grad()
def test_a_tower_that_projects_by_itself_keeps_its_projection() -> None:
    case = CASES["transformers-quickgelu"]
    dual = one_dual(case)
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


@torch.no_grad()
def test_each_member_has_the_class_embeddings_of_its_own_text_tower() -> None:
    duals, pixels = three(OPEN_CLIP), OPEN_CLIP.pixels()
    members = [he.zero_shot(dual, NAMES) for dual in duals]
    expected = torch.cat([member(pixels) for member in members])
    assert relative_error(expected[0], expected[1]) > 1e-2
    fused = he.zero_shot(he.fuse(duals, stem="separate", mlp="separate"), NAMES)
    joined = he.Ensemble.stack(members)
    for whole in (fused, joined):
        assert relative_error(whole(pixels), expected) < 1e-5
        assert relative_error(whole.member(2)(pixels)[0], expected[2]) < 1e-5


@pytest.mark.parametrize("many", ["image", "text"])
@torch.no_grad()
def test_one_tower_may_serve_all_members(many: str) -> None:
    duals, pixels = three(OPEN_CLIP), OPEN_CLIP.pixels()
    towers = {"image": duals[0].image, "text": duals[0].text}
    towers[many] = he.Ensemble.stack([getattr(dual, many) for dual in duals])
    dual = he.DualEncoder(**towers, projections=duals[0].projections, logit_scale=duals[0].logit_scale)
    ensemble = he.zero_shot(dual, NAMES)
    assert ensemble.num_members == 3
    expected = dual(pixels, [f"A photo of a {name}." for name in NAMES])
    assert relative_error(ensemble(pixels), expected) < 1e-5


def test_it_is_pruned_fused_optimised_saved_and_asked_with_pictures(tmp_path: Path) -> None:
    ensemble, pixels = he.zero_shot(one_dual(), NAMES), OPEN_CLIP.pixels()
    members = [he.prune(ensemble, heads) for heads in ([(0, 1)], [(1, 2)], [(0, 3), (1, 0)])]
    fused = he.fuse(members)
    with torch.no_grad():
        expected = torch.cat([member(pixels) for member in members])
        assert relative_error(fused(pixels), expected) < 1e-5
        fast = fused.optimize(plans=["loop"])
        assert relative_error(fast(pixels), expected) < 1e-5
    fused.save_pretrained(tmp_path)
    picture = Image.new("RGB", (40, 30), (200, 30, 90))
    assert he.Ensemble.from_pretrained(tmp_path).predict([picture]).names()[0] in NAMES


@pytest.mark.parametrize(
    ("names", "templates", "token"),
    [
        (["cat"], "{label}", "two names"),
        (["cat", "dog", "cat"], "{label}", "twice"),
        (NAMES, ["a photo"], "templates"),
        (["cat", "green okapi", "dog", "green quokka"], "{label}", "same tokens"),  # unknown words
    ],
)
def test_names_and_templates_are_checked(names: Any, templates: Any, token: str) -> None:
    with pytest.raises(DataError, match=token):
        he.zero_shot(one_dual(), names, templates)
