"""The head atlas: its numbers equal those of masked and pruned ensembles; saving, loading, and the page."""

from dataclasses import replace

import pytest
import torch

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from hydra_ensembles.errors import CheckpointError, ConfigError
from hydra_ensembles.evaluation.atlas import Atlas, Sweep, atlas
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.report.html import write_atlas
from processes import count_calls
from random_ensembles import random_batches, random_ensemble
from zero_shot_models import NAMES, dual_of

KEPT = (
    ((0, 1, 2, 3), (0, 2), (1, 2, 3)),
    ((0, 1, 2, 3), (1, 2), (0, 3)),
    ((0, 1, 2, 3), (2,), (0, 1, 2)),
)  # [member][layer]: layer 0 is a trunk, no member has head 3 of layer 1


def hydra(shape: str = "image-cls") -> he.Ensemble:
    """Three members with a shared trunk and MLPs, and different numbers of heads."""
    return random_ensemble(shape, KEPT, Sharing(stem=True, mlp=True), trunk=1)


def sets(model: he.Ensemble) -> tuple[list, dict]:
    return random_batches(model, (9, 6)), {
        name: random_batches(model, (7, 4), seed) for name, seed in (("a", 1), ("b", 2))
    }


def test_an_interrupted_atlas_goes_on_and_is_the_same(of_images, tmp_path, monkeypatch) -> None:
    model, calls = hydra(), []
    count_calls(monkeypatch, Sweep, "answers", lambda: calls.append(1), lambda: len(calls) == 4)
    options = {"name": "three", "inputs": 3, "progress": False, "output": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        atlas(model, *sets(model), **options)
    assert replace(atlas(model, *sets(model), **options), provenance=of_images.provenance) == of_images
    assert len(calls) == 4 + 3  # six batches, three of them saved before
    with pytest.raises(CheckpointError, match="another run"):
        atlas(model, *sets(model), **options, score="entropy")


@pytest.fixture(scope="module")
def of_images() -> Atlas:
    model = hydra()
    return atlas(model, *sets(model), name="three", inputs=3, progress=False)


@pytest.mark.parametrize("shape", ["image-cls", "text-post-norm", "image-map-rms"])
def test_the_numbers_are_those_of_the_masked_ensemble(shape):
    model = hydra(shape)
    data, ood = sets(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = atlas(model, data, ood, score="entropy", progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    counts = model.config.head_counts  # attention pooling is layer 3, with two heads
    places = [(layer, head) for layer, count in enumerate(counts) for head in range(count) if (layer, head) != (1, 3)]
    assert [(one.layer, one.head) for one in found.heads] == places
    for one in found.heads[::3]:  # some of every layer
        with he.masked(model, [(one.layer, one.head)]):
            same = he.evaluate(model, data, ood, score="entropy", progress=False).numbers()
        assert one.without.accuracy == same["accuracy"]
        assert one.without.log_likelihood == pytest.approx(-same["nll"], rel=1e-12)
        assert one.without.auroc == {name: same[f"ood.{name}.auroc"] for name in ood}
        assert found.cost(one)["auroc"] == pytest.approx(found.whole.numbers["auroc"] - same["all.auroc"], abs=1e-15)
    whole = he.evaluate(model, data, ood, score="entropy", progress=False).numbers()
    assert found.whole.accuracy == whole["accuracy"]
    assert found.whole.log_likelihood == pytest.approx(-whole["nll"], rel=1e-12)
    assert any(found.cost(one)["log_likelihood"] < 0 for one in found.heads)  # some heads are harmful here


def test_it_says_who_keeps_a_head_and_whose_answers_change(of_images):
    model = hydra()
    data, _ = sets(model)
    heads = {(one.layer, one.head): one for one in of_images.heads}
    assert (heads[0, 3].members, heads[0, 3].shared) == ((0, 1, 2), True)
    assert (heads[1, 1].members, heads[1, 1].shared) == ((1,), False)
    images, labels = (torch.cat(part) for part in zip(*data, strict=True))
    for (layer, head), one in heads.items():
        whole = model.predict(images)
        with he.masked(model, [(layer, head)]):
            left = model.predict(images)
        right, still = whole.label == labels, left.label == labels
        assert (one.lost, one.gained) == (int((right & ~still).sum()), int((~right & still).sum()))
        moved = (whole.probs - left.probs).abs().sum(-1) / 2
        own = [each for each in one.changed if of_images.inputs[each.input].label is not None]
        assert [of_images.inputs[each.input].index for each in own] == moved.argsort(descending=True)[:3].tolist()
        for each in own:
            place = of_images.inputs[each.input]
            assert (place.predicted, place.label) == (whole.label[place.index], labels[place.index])
            assert each.predicted == left.label[place.index]
            assert each.confidence == pytest.approx(float(left.confidence[place.index]))
            assert place.content.startswith("data:image/jpeg;base64,")


def test_zero_shot_classifiers_have_one_too_dual_encoders_have_none():
    dual = dual_of(DUAL_CASES[0])
    model = he.zero_shot(dual, NAMES)
    pixels = DUAL_CASES[0].pixels()
    data = [(pixels, torch.arange(len(pixels)) % len(NAMES))]
    found = atlas(model, data, layers=[model.num_layers - 1], progress=False)
    assert found.model.class_names == NAMES
    with he.masked(model, [(found.heads[0].layer, found.heads[0].head)]):
        assert found.heads[0].without.log_likelihood == -he.evaluate(model, data, progress=False).id.nll
    with pytest.raises(ConfigError, match="zero_shot"):
        atlas(dual, data)  # type: ignore[arg-type]


def test_its_page_is_whole_and_escaped(of_images, tmp_path):
    evil = '<script>alert("x")</script>'
    strange = tuple(
        replace(one, content="data:image/png;base64,AA==);} body{display:none") for one in of_images.inputs[:1]
    )
    found = replace(of_images, name=evil, inputs=(*strange, *of_images.inputs[1:]),
                    model=replace(of_images.model, class_names=(evil, "a", "b", "c")))  # fmt: skip
    text = write_atlas(tmp_path / "new" / "atlas.html", found).read_text()
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert" in text
    style = text[text.index("<style>") : text.index("</style>")]
    assert "display:none" not in style  # items other than pictures are shown as text
    assert style.count("url(data:image/jpeg;base64,") == len(of_images.inputs) - 1
    for one in of_images.heads:
        place = f"head-{one.layer}-{one.head}"
        assert text.count(f'href="#{place}"') == text.count(f'id="{place}"') == 1
    assert text.count('class="gone"') == 1  # head 3 of layer 1
