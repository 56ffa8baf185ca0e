"""Zero-shot ensembles set to other classes by the text towers they kept, and what is stored of these."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hydra_ensembles as he
from architectures import perturbed
from architectures_clip import DUAL_CASES, DualCase, open_clip_model
from hydra_ensembles.errors import CheckpointError, ConfigError, HydraError
from hydra_ensembles.model.metadata import join_text_sides
from json_places import places
from zero_shot_models import NAMES, OTHER_NAMES, TEMPLATES, dual_of, relative_error

CASES = {case.name: case for case in DUAL_CASES}
OPEN_CLIP = CASES["open_clip-nonscalar"]
PRUNED = ([(0, 1, "image"), (1, 2, "text")], [(1, 0, "text")], [(0, 3, "image"), (0, 0, "text"), (1, 3, "text")])


def hydra(case: DualCase) -> he.DualEncoder:
    """Three members that lost heads of both towers, fused."""
    dual = dual_of(case)
    return he.fuse([he.prune(dual, heads) for heads in PRUNED])


@pytest.mark.parametrize("name", ["transformers-quickgelu", "open_clip-nonscalar", "open_clip-no-text-projection"])
@torch.no_grad()
def test_it_answers_as_if_it_had_been_made_for_the_new_classes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    dual, pixels = hydra(case), case.pixels()
    ensemble = he.calibrate(he.zero_shot(dual, NAMES), [(pixels, torch.zeros(len(pixels), dtype=torch.long))])
    ensemble.save_pretrained(tmp_path)
    expected = he.zero_shot(dual, OTHER_NAMES, TEMPLATES)
    for one in (ensemble, he.Ensemble.from_pretrained(tmp_path)):
        again = he.retarget(one, OTHER_NAMES, TEMPLATES)
        assert torch.equal(again(pixels), expected(pixels))
        assert (again.metadata.labels, again.metadata.calibration) == (OTHER_NAMES, None)
        back = he.retarget(he.retarget(again, NAMES, "A photo of a {label}."), NAMES)
        assert torch.equal(back(pixels), he.zero_shot(dual, NAMES)(pixels))


@torch.no_grad()
def test_members_made_one_by_one_keep_what_is_equal_once() -> None:
    dual, pixels = dual_of(OPEN_CLIP), OPEN_CLIP.pixels()
    members = [he.zero_shot(he.prune(dual, heads), NAMES) for heads in PRUNED]
    fused = he.fuse(members)
    expected = torch.cat([he.retarget(member, OTHER_NAMES)(pixels) for member in members])
    assert relative_error(he.retarget(fused, OTHER_NAMES)(pixels), expected) < 1e-5
    side = fused.metadata.text_side
    assert side is not None
    tower = side.settings.tower
    assert (tower.members, tower.sharing.mlp, tower.sharing.stem, side.settings.projection.copies) == (3, True, True, 1)  # type: ignore[union-attr]
    for index, heads in enumerate(PRUNED):
        one = side.member(index)
        single = members[index].metadata.text_side
        assert one == single
        assert sum(map(len, one.settings.tower.heads[0])) == 8 - sum(head[2] == "text" for head in heads)
    assert side != side.member(0)


@torch.no_grad()
def test_a_shared_readout_stays_shared() -> None:
    pixels = OPEN_CLIP.pixels()
    duals = [dual_of(OPEN_CLIP, perturbed(OPEN_CLIP.build(), seed)) for seed in (1, 2)]
    members = [he.zero_shot(dual, NAMES) for dual in duals]
    fused = he.fuse(members, stem="separate", mlp="separate", readout="mean")
    assert fused.readout.class_embeddings.weight.shape[0] == 1  # type: ignore[union-attr]
    assert relative_error(he.retarget(fused, NAMES)(pixels), fused(pixels)) < 1e-5


def test_text_sides_that_do_not_belong_together_are_dropped() -> None:
    dual = dual_of(OPEN_CLIP)
    one, other = he.zero_shot(dual, NAMES), he.zero_shot(dual, NAMES, "the {label}")
    without = he.zero_shot(dual, NAMES, keep_text=False)
    for second in (other, without):
        assert he.Ensemble.stack([one, second]).metadata.text_side is None
    assert join_text_sides([]) is None


def test_without_text_towers_it_is_smaller_and_says_so(tmp_path: Path) -> None:
    dual = dual_of(OPEN_CLIP)
    he.zero_shot(dual, NAMES).save_pretrained(tmp_path / "with")
    bare = he.zero_shot(dual, NAMES, keep_text=False)
    bare.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("with", "without")]
    assert sizes[0] > 1.4 * sizes[1]
    with pytest.raises(ConfigError, match="kept no text towers"):
        he.retarget(he.Ensemble.from_pretrained(tmp_path / "without"), OTHER_NAMES)


# --- without the libraries ---------------------------------------------------------------------------------

WITHOUT_LIBRARIES = """
import sys
for name in ("timm", "transformers", "open_clip", "torchvision", "ftfy", "regex"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from PIL import Image
import hydra_ensembles as he
saved = torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
ensemble = he.Ensemble.from_pretrained(sys.argv[1])
picture = ensemble.prepare([Image.new("RGB", (70, 50), (200, 30, 90))])
with torch.no_grad():
    assert torch.equal(ensemble(picture), saved["before"])
    assert torch.equal(he.retarget(ensemble, saved["names"], "a drawing of a {label}")(picture), saved["after"])
print("equal")
"""


def test_a_loaded_ensemble_is_re_targeted_without_the_libraries(tmp_path: Path) -> None:
    from PIL import Image

    dual = he.convert(open_clip_model(text={"vocab_size": 49408, "context_length": 20}))
    members = [he.prune(dual, heads) for heads in PRUNED]
    ensemble = he.zero_shot(he.fuse(members), ["cat", "Bär", "fire engine"])
    names = ["violin", "piano"]
    picture = ensemble.prepare([Image.new("RGB", (70, 50), (200, 30, 90))])
    with torch.no_grad():
        before = ensemble(picture)
        after = he.zero_shot(he.fuse(members), names, "a drawing of a {label}")(picture)
    ensemble.save_pretrained(tmp_path)
    torch.save({"names": names, "before": before, "after": after}, tmp_path / "expected.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "equal"


# --- damaged files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero-shot")
    he.zero_shot(hydra(OPEN_CLIP), NAMES).save_pretrained(folder)
    return folder


def side_of(record: Any) -> Any:
    return record["metadata"]["text_side"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["metadata"].pop("text_side"), "lists a tokenizer"),
        (lambda record: record["metadata"].update(text_side=None), "lists a tokenizer"),
        (lambda record: record["files"].pop("tokenizer.json"), "tokenizer"),
        (lambda record: side_of(record)["preprocessing"].update(tokenizer="x"), "unknown field 'tokenizer'"),
        (lambda record: side_of(record).pop("templates"), r"lacks the fields \['templates'\]"),
        (lambda record: side_of(record)["tower"]["encoder"].pop("causal"), r"lacks the fields \['causal'\]"),
        (lambda record: side_of(record).update(projection=None), "width 32, the images in one of 24"),
        (lambda record: side_of(record)["projection"].update(outputs=23), "width 23, the images in one of 24"),
        (lambda record: side_of(record).update(logit_scale=[1.0, 2.0]), "once or once per member"),
        (lambda record: record["model"]["readout"].pop("cosine"), "does not classify by class embeddings"),
        (lambda record: record["model"]["readout"]["cosine"].update(width=None, bias=False), "does not fit"),
    ],
)
def test_damaged_text_sides_are_refused(change: Any, message: str, saved: Path) -> None:
    path = saved / "config.json"
    original = path.read_text()
    record = json.loads(original)
    change(record)
    path.write_text(json.dumps(record))
    try:
        with pytest.raises(CheckpointError, match=message):
            he.Ensemble.from_pretrained(saved)
    finally:
        path.write_text(original)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_text_sides_load_or_are_refused(saved: Path, data: st.DataObject) -> None:
    """A changed value is an error of ours, or the loaded ensemble still runs and can still be re-targeted."""
    path = saved / "config.json"
    original = path.read_text()
    record = json.loads(original)
    container, key = data.draw(st.sampled_from(places({"text_side": side_of(record)})[1:]))
    if data.draw(st.booleans()):
        container[key] = data.draw(st.sampled_from([None, True, -1, 0, 1, 2, 24, 1 << 24, 1 << 63, 0.5, "", [], {}]))
    else:
        del container[key]
    path.write_text(json.dumps(record))
    try:
        loaded = he.Ensemble.from_pretrained(saved)
        assert loaded(torch.zeros(1, 3, 32, 32)).shape == (3, 1, len(NAMES))
        he.retarget(loaded, OTHER_NAMES, "a {label}")
    except HydraError:
        pass
    finally:
        path.write_text(original)
