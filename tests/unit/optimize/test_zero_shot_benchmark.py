"""Zero-shot rows of the inference benchmark, on a CLIP that takes no time."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import inference  # noqa: E402
import inference_modes  # noqa: E402
import zero_shot_contenders  # noqa: E402
from model_shapes import SHAPES  # noqa: E402

sys.path.remove(str(BENCHMARKS))

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.model.cost import multiply_adds  # noqa: E402
from hydra_ensembles.model.layers import Block  # noqa: E402
from hydra_ensembles.model.stem_readout import PatchStem, TextStem  # noqa: E402

BATCH, CLASSES = 3, 5


@pytest.fixture(scope="module")
def workshop() -> Any:
    return zero_shot_contenders.ZeroShotWorkshop(SHAPES["tiny-clip"], torch.float32, "cpu", seed=0)


@pytest.fixture(scope="module")
def inputs() -> Any:
    return SHAPES["tiny-clip"].inputs(BATCH, torch.Generator().manual_seed(0))


def members_of(name: str) -> int:
    return 1 if name in inference.ONE_MEMBER else 3


@pytest.mark.parametrize("name", zero_shot_contenders.ZERO_SHOT_NAMES)
def test_every_contender_answers_for_all_members(name: str, workshop: Any, inputs: Any) -> None:
    members = members_of(name)
    made = workshop.make(name, members, inputs)
    modes = inference_modes.Modes(made, inputs, workshop.answer(name, members, inputs))
    assert modes.error("eager") < 1e-5
    with torch.no_grad():
        logits = made.run(*inputs.values())
    foreign = name in ("single", "single-texts")
    assert logits.shape == ((BATCH, CLASSES) if foreign else (members, BATCH, CLASSES))
    if members > 1:
        assert min((logits[0] - one).abs().max() for one in logits[1:]) > 0
    assert made.multiply_adds > 0


@torch.no_grad()
def test_the_same_model_answers_alike_however_it_is_run(workshop: Any, inputs: Any) -> None:
    single = workshop.make("single", 1, inputs).run(*inputs.values())
    for name in ("ours", "single-texts"):
        logits = workshop.make(name, 1, inputs).run(*inputs.values()).reshape(BATCH, CLASSES)
        torch.testing.assert_close(logits, single, rtol=1e-4, atol=1e-4)
    joint, texts = (workshop.make(name, 3, inputs).run(*inputs.values()) for name in ("hydra-joint", "hydra-texts"))
    torch.testing.assert_close(joint, texts, rtol=1e-4, atol=1e-4)
    clip = workshop.model(pixel_values=inputs["pixel_values"], input_ids=workshop.ids)
    torch.testing.assert_close(single, clip.logits_per_image, rtol=1e-4, atol=1e-4)


def test_members_lose_a_tenth_of_the_heads_of_both_towers_at_places_of_their_own(workshop: Any) -> None:
    drawn = [workshop._jointly(member) for member in range(3)]
    assert all(len(set(heads)) == 4 for heads in drawn)  # of 24 + 16
    assert len({frozenset(heads) for heads in drawn}) == 3
    assert {head.tower for heads in drawn for head in heads} == {"image", "text"}
    assert drawn[0] == workshop._jointly(0)
    fused = workshop._circuits(3)
    kept = [
        sum(len(layer) for tower in (fused.image, fused.text) for layer in tower.heads[index]) for index in range(3)
    ]
    assert kept == [36, 36, 36]


def test_a_prediction_is_one_pass_over_the_image_tower_and_none_over_text_towers(
    workshop: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ensemble as it is, and of the one that is timed."""
    hydra = he.zero_shot(workshop._circuits(3), workshop.names, zero_shot_contenders.TEMPLATE)
    assert hydra.metadata.text_side is not None  # kept, so that it could run
    fast, timed = hydra.optimize(plans=["loop"]), workshop.make("hydra-joint", 3, inputs).run
    ran: dict[str, int] = {"blocks": 0, "images": 0, "texts": 0}

    def counting(kind: type, name: str) -> None:
        forward = kind.forward  # type: ignore[attr-defined]

        def counted(self: Any, *arguments: Any) -> Any:
            ran[name] += 1
            return forward(self, *arguments)

        monkeypatch.setattr(kind, "forward", counted)

    for kind, name in ((Block, "blocks"), (PatchStem, "images"), (TextStem, "texts")):
        counting(kind, name)
    hydra.predict(inputs)
    assert ran == {"blocks": hydra.num_layers, "images": 1, "texts": 0}
    for run in (fast.module("loop"), timed):  # their stem for images is another class
        before = dict(ran)
        with torch.no_grad():
            run(inputs["pixel_values"])
        assert (ran["blocks"] - before["blocks"], ran["texts"]) == (hydra.num_layers, 0)
    with torch.no_grad():
        workshop.make("hydra-texts", 3, inputs).run(*inputs.values())
    assert ran["texts"] > 0


def test_arithmetic_of_texts_is_shared_out_among_the_images(workshop: Any, inputs: Any) -> None:
    single, texts = (workshop.make(name, 1, inputs) for name in ("single", "single-texts"))
    tower = workshop.dual.text
    prompt = multiply_adds(tower.config, 12) + tower.config.encoder.width * 20
    assert texts.multiply_adds == single.multiply_adds + CLASSES * prompt // BATCH
    assert single.multiply_adds == workshop.single_multiply_adds
    joint = workshop.make("hydra-joint", 3, inputs)
    assert single.multiply_adds < joint.multiply_adds < 3 * single.multiply_adds
    assert workshop.make("deep-in-turn", 3, inputs).multiply_adds == 3 * single.multiply_adds
    assert workshop.make("hydra-texts", 3, inputs).multiply_adds > joint.multiply_adds


def test_heads_computed_once_are_counted_once(workshop: Any) -> None:
    config = workshop._kept("hydra-joint", 3).config
    assert config.trunk == 0
    first = [member[0] for member in config.heads]
    spared = sum(len(heads) for heads in first) - len(set().union(*first))
    assert spared > 0
    assert zero_shot_contenders.done_once(config, 5) == spared * (3 * 5 * 24 * 4 + 2 * 5 * 5 * 4)


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inference.json"
    arguments = ["--shape", "tiny-clip", "--dtype", "float32", "--device", "cpu", "--modes", "eager", "--repeats", "2"]
    inference.main([*arguments, "--batches", "2", "--output", str(path)])
    report = json.loads(path.read_text())
    assert report["failures"] == {}
    found = {row["contender"]: row for row in report["rows"]}
    assert set(found) == set(zero_shot_contenders.ZERO_SHOT_NAMES)
    assert found["hydra-joint"]["ratio_to_deep"] is not None
    assert found["single-texts"]["members"] == 1
    assert found["hydra-texts"]["limit"] > found["hydra-joint"]["limit"]
    assert "hydra-joint" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        inference.read_options([*arguments, "--contenders", "hydra-k8"])
    assert "has no contenders ['hydra-k8']" in capsys.readouterr().err
    growth = inference.read_options([*arguments, "--members", "1", "2"])
    assert growth.contenders == ["single", "hydra-joint", "deep-in-turn"]
