"""Saved dual encoders come back bit by bit, and damaged ones are refused."""

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
from hydra_ensembles.checkpoint import Contents, save_checkpoint
from hydra_ensembles.errors import CheckpointError, HydraError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.model.config import DualEncoderConfig
from hydra_ensembles.schema import from_plain, to_plain
from json_places import places

TWO_LIBRARIES = [case for case in DUAL_CASES if case.name in ("transformers-quickgelu", "open_clip-nonscalar")]


def assert_same_model(loaded: DualEncoder, saved: DualEncoder) -> None:
    assert loaded.config == saved.config
    assert (loaded.image.metadata, loaded.text.metadata) == (saved.image.metadata, saved.text.metadata)
    state = saved.state_dict()
    assert list(loaded.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("case", TWO_LIBRARIES, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_every_bit_comes_back(case: DualCase, members: int, tmp_path: Path) -> None:
    dual = DualEncoder.stack([he.convert(perturbed(case.build(), seed)) for seed in range(members)])
    dual.save_pretrained(tmp_path)
    loaded = DualEncoder.from_pretrained(tmp_path)
    assert_same_model(loaded, dual)
    with torch.no_grad():
        assert torch.equal(loaded(case.pixels(), case.texts()), dual(case.pixels(), case.texts()))
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    card = (tmp_path / "README.md").read_text()
    assert "DualEncoder.from_pretrained" in card
    assert "Heads kept, text tower" in card


def test_the_configuration_survives_as_plain_data() -> None:
    for case in TWO_LIBRARIES:
        config = he.convert(case.build()).config
        assert from_plain(DualEncoderConfig, json.loads(json.dumps(to_plain(config)))) == config


def test_a_dual_encoder_is_not_an_ensemble(tmp_path: Path) -> None:
    dual = he.convert(open_clip_model())
    dual.save_pretrained(tmp_path / "dual")
    dual.image.save_pretrained(tmp_path / "image")
    with pytest.raises(CheckpointError, match="kind 'dual_encoder', expected 'ensemble'"):
        he.Ensemble.from_pretrained(tmp_path / "dual")
    with pytest.raises(CheckpointError, match="kind 'ensemble', expected 'dual_encoder'"):
        DualEncoder.from_pretrained(tmp_path / "image")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["metadata"].pop("text"), r"metadata has the fields \['image'\]"),
        (lambda record: record["model"].update(text_projection=None), "width 24, the text tower in one of width 32"),
        (lambda record: record["model"].update(scale_copies=2), "scale_copies is 2"),
        (lambda record: record["model"].update(logit_bias=True), "lacks 'logit_bias'"),
        (lambda record: record["model"]["image_projection"].update(outputs=0), "outputs must be between"),
        (lambda record: record["model"]["image_projection"].update(copies=-1), "copies must be between"),
        (lambda record: record["model"].update(image=record["model"]["text"]), "towers for text and text"),
        (lambda record: record["model"].update(extra=1), r"unknown fields \['extra'\]"),
        (lambda record: record["metadata"]["image"].update(preprocessing=TEXT), "image tower: preprocessing is Text"),
        (lambda record: record["metadata"]["text"].update(labels=3), "labels must be a list"),
    ],
)
def test_damaged_configurations_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    he.convert(open_clip_model()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=message):
        DualEncoder.from_pretrained(tmp_path)


TEXT = {"kind": "text", "max_length": 5}
VALUES = st.sampled_from([None, True, -1, 0, 1, 2, 3, 24, 1 << 24, 1 << 63, 0.5, "", "text", "mean", [], [1], {}])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dual")
    he.convert(open_clip_model()).save_pretrained(folder)
    return folder


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_configurations_load_or_are_refused(saved: Path, data: st.DataObject) -> None:
    """A changed value is an error of ours, or it is in the configuration of the loaded model."""
    path = saved / "config.json"
    original = path.read_text()
    record = json.loads(original)
    container, key = data.draw(st.sampled_from(places({"model": record["model"], "metadata": record["metadata"]})[1:]))
    if data.draw(st.booleans()):
        container[key] = data.draw(VALUES)
    else:
        del container[key]
    path.write_text(json.dumps(record))
    try:
        loaded = DualEncoder.from_pretrained(saved)
    except HydraError:
        pass
    else:
        assert loaded.config == from_plain(DualEncoderConfig, record["model"])
        assert loaded(torch.zeros(1, 3, 32, 32), torch.ones(1, 12, dtype=torch.long)).shape == (1, 1, 1)
    finally:
        path.write_text(original)


def test_what_is_published_is_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(repo_id: str, contents: Contents, **_: Any) -> str:
        save_checkpoint(tmp_path, contents)
        return f"https://hub/{repo_id}"

    monkeypatch.setattr("hydra_ensembles.checkpoint.push_checkpoint", publish)
    dual = he.convert(open_clip_model())
    assert dual.push_to_hub("owner/clip") == "https://hub/owner/clip"
    assert_same_model(DualEncoder.from_pretrained(tmp_path), dual)
    assert "# owner/clip" in (tmp_path / "README.md").read_text()


WITHOUT_LIBRARIES = """
import sys
for name in ("timm", "transformers", "open_clip", "torchvision", "ftfy", "regex"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from PIL import Image
from hydra_ensembles.dual_encoder import DualEncoder
dual = DualEncoder.from_pretrained(sys.argv[1])
saved = torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
with torch.no_grad():
    assert torch.equal(dual.encode_text(saved["strings"]), saved["text"])
    assert torch.equal(dual.encode_image(Image.new("RGB", (70, 50), (200, 30, 90))), saved["image"])
print("equal")
"""


def test_a_loaded_model_reads_images_and_strings_without_the_libraries(tmp_path: Path) -> None:
    from PIL import Image

    model = open_clip_model(text={"vocab_size": 49408, "context_length": 20})
    dual = he.convert(model)
    strings = ["a photo of a cat", "Ein Bär &amp; zwei Hunde ☺", ""]
    with torch.no_grad():
        text = dual.encode_text(strings)
        image = dual.encode_image(Image.new("RGB", (70, 50), (200, 30, 90)))
    dual.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    torch.save({"strings": strings, "text": text, "image": image}, tmp_path / "expected.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "equal"
