"""What is saved comes back: every bit, every dtype, both kinds of model, with torch and safetensors alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from architectures import perturbed
from architectures_clip import DUAL_CASES, DualCase, open_clip_model
from checkpoint_models import (
    CONFIGS,
    TOKENIZER,
    ensemble,
    hydra,
    inputs_for,
    ragged,
    same_bits,
    same_state,
    single,
    text,
)
from hydra_ensembles.errors import CheckpointError, ConfigError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.preprocessing import TextPreprocessing

TWO_LIBRARIES = [case for case in DUAL_CASES if case.name in ("transformers-quickgelu", "open_clip-nonscalar")]


def assert_same_model(loaded: Ensemble | DualEncoder, saved: Ensemble | DualEncoder) -> None:
    assert loaded.config == saved.config
    assert same_state(loaded, saved)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = ensemble(CONFIGS[name](), dtype)
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.metadata == model.metadata
    if dtype != torch.float16:  # several operators have no half-precision CPU kernel
        inputs = inputs_for(model.config, dtype)
        with torch.no_grad():
            assert same_bits(loaded(inputs), model(inputs))


@pytest.mark.parametrize("case", TWO_LIBRARIES, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_every_bit_of_a_dual_encoder_comes_back(case: DualCase, members: int, tmp_path: Path) -> None:
    parts = [he.convert(perturbed(case.build(), seed)) for seed in range(members)]
    dual = he.fuse(parts, stem="separate", mlp="separate")
    dual.save_pretrained(tmp_path)
    loaded = DualEncoder.from_pretrained(tmp_path)
    assert_same_model(loaded, dual)
    assert (loaded.image.metadata, loaded.text.metadata) == (dual.image.metadata, dual.text.metadata)
    with torch.no_grad():
        assert torch.equal(loaded(case.pixels(), case.texts()), dual(case.pixels(), case.texts()))


def test_odd_values_views_ties_and_mixed_dtypes_come_back(tmp_path: Path) -> None:
    model = ensemble(ragged())
    first, second = model.encoder.layers[0].norm1, model.encoder.layers[0].norm2  # type: ignore[union-attr]
    second.weight = first.weight
    first.bias = torch.nn.Parameter(torch.randn(8, 3).t())
    model.stem.double()
    model.readout.bfloat16()
    with torch.no_grad():
        model.stem.patch.flatten()[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # parameters no longer lie in the file
    assert_same_model(loaded, model)


def test_the_same_model_gives_the_same_files_with_the_usual_permissions(tmp_path: Path) -> None:
    for folder in ("a/model", "b/model"):
        ensemble(hydra()).save_pretrained(tmp_path / folder)
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a/model").iterdir()) == names
    for name in names:
        assert (tmp_path / "a/model" / name).read_bytes() == (tmp_path / "b/model" / name).read_bytes()
    (tmp_path / "a/model/usual").touch()
    assert len({path.stat().st_mode for path in (tmp_path / "a/model").iterdir()}) == 1


def test_dtype_and_device_are_converted_on_request(tmp_path: Path) -> None:
    model = ensemble(single(), torch.float64)
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(str(tmp_path), dtype=torch.bfloat16, device="cpu")
    assert_same_model(loaded, model.to(torch.bfloat16))
    with pytest.raises(ConfigError, match="int8"):
        Ensemble.from_pretrained(tmp_path, dtype=torch.int8)
    with pytest.raises(ConfigError, match="gpu"):
        Ensemble.from_pretrained(tmp_path, device="gpu")


def test_the_tokenizer_is_a_file_of_its_own(tmp_path: Path) -> None:
    ensemble(text()).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER.encode()
    assert "tokenizer" not in json.loads((tmp_path / "config.json").read_text())["metadata"]["preprocessing"]
    preprocessing = Ensemble.from_pretrained(tmp_path).metadata.preprocessing
    assert isinstance(preprocessing, TextPreprocessing)
    assert preprocessing("hello wörld")["input_ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"metrics": {"auroc": float("nan")}}, "auroc"),
        ({"labels": ("a", "b")}, "2 labels"),
        ({"labels": ("a", "b", "\ud800")}, "config.json"),
        ({"preprocessing": TextPreprocessing(max_length=4)}, "TextPreprocessing"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(changes: dict[str, object], token: str, tmp_path: Path) -> None:
    good = ensemble(single())
    good.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=token):
        good.with_metadata(**changes).save_pretrained(tmp_path)
    assert Ensemble.from_pretrained(tmp_path).metadata == good.metadata
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("tokenizer", ["{", "[]", '{"a": "\ud800"}'])
def test_a_broken_tokenizer_is_not_saved(tokenizer: str, tmp_path: Path) -> None:
    broken = TextPreprocessing(max_length=9, tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ensemble(text(), metadata=Metadata(preprocessing=broken)).save_pretrained(tmp_path)


def test_parameters_and_folders_that_cannot_be_saved(tmp_path: Path) -> None:
    for unsaved, token in ((torch.float8_e4m3fn, "float8"), ("meta", "meta")):
        with pytest.raises(CheckpointError, match=token):
            ensemble(single()).to(unsaved).save_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        ensemble(single()).save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("content", ['{"model_type": "vit"}', '["format"]', "{", ""])
def test_a_folder_of_another_library_is_left_alone(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "README.md"):
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ensemble(single()).save_pretrained(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == [content] * 2
    (tmp_path / "config.json").unlink()
    for _ in range(2):  # into a folder without one, then over an earlier save
        ensemble(single()).save_pretrained(tmp_path)
    assert Ensemble.from_pretrained(tmp_path).num_members == 1


@pytest.mark.parametrize("survived", range(4))
def test_an_interrupted_save_leaves_whole_files(survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ensemble(single()), ensemble(text())
    names = ("model.safetensors", "tokenizer.json", "README.md", "config.json")
    contents = []
    for index, model in enumerate((old, new)):
        folder = tmp_path / f"{index}/model"
        model.save_pretrained(folder)
        contents.append({name: (folder / name).read_bytes() for name in names if (folder / name).exists()})
    target, calls, rename = tmp_path / "0/model", [], os.replace

    def replace_then_stop(source: Path, destination: Path) -> None:
        if len(calls) == survived:
            raise KeyboardInterrupt
        calls.append(destination)
        rename(source, destination)

    monkeypatch.setattr("hydra_ensembles.checkpoint.os.replace", replace_then_stop)
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(target)
    monkeypatch.undo()
    for index, name in enumerate(names):
        expected = contents[1] if index < survived else contents[0]
        assert (target / name).exists() == (name in expected)
        assert not (target / name).exists() or (target / name).read_bytes() == expected[name]
    if survived == 0:
        assert_same_model(Ensemble.from_pretrained(target), old)
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Ensemble.from_pretrained(target)


KILLED = """
import os, sys, torch
from hydra_ensembles import Ensemble
model = Ensemble.from_pretrained(sys.argv[1])
with torch.no_grad():
    model.stem.patch.add_(1.0)
rename = os.replace
def replace(source, destination):
    if str(destination).endswith("config.json"):
        os._exit(9)
    rename(source, destination)
os.replace = replace
model.save_pretrained(sys.argv[1])
"""


def test_a_killed_save_is_noticed_and_can_be_repeated(tmp_path: Path) -> None:
    model = ensemble(single())
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=600).returncode == 9
    assert (tmp_path / "config.json").read_bytes() == config
    with pytest.raises(CheckpointError, match="SHA-256"):
        Ensemble.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), model)


WITHOUT_LIBRARIES = """
import sys
for name in ("timm", "transformers", "open_clip", "torchvision", "ftfy", "regex", "sklearn", "torchmetrics", "jinja2"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
import hydra_ensembles as he
for folder in sys.argv[2:]:
    saved = torch.load(folder + "/expected.pt", weights_only=True)
    assert "PIL" not in sys.modules and "tokenizers" not in sys.modules
    with torch.no_grad():
        assert torch.equal(he.Ensemble.from_pretrained(folder)(saved["inputs"]), saved["logits"])
from PIL import Image
dual = he.DualEncoder.from_pretrained(sys.argv[1])
saved = torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
with torch.no_grad():
    assert torch.equal(dual.encode_text(saved["strings"]), saved["text"])
    assert torch.equal(dual.encode_image(Image.new("RGB", (70, 50), (200, 30, 90))), saved["image"])
print("equal")
"""


def test_loading_needs_no_model_library(tmp_path: Path) -> None:
    from PIL import Image

    dual = he.convert(open_clip_model(text={"vocab_size": 49408, "context_length": 20}))
    strings = ["a photo of a cat", "Ein Bär &amp; zwei Hunde ☺", ""]
    dual.save_pretrained(tmp_path / "dual")
    with torch.no_grad():
        answers = dual.encode_text(strings), dual.encode_image(Image.new("RGB", (70, 50), (200, 30, 90)))
        torch.save({"strings": strings, "text": answers[0], "image": answers[1]}, tmp_path / "dual/expected.pt")
        for name, config in CONFIGS.items():
            model, inputs = ensemble(config()), inputs_for(config())
            model.save_pretrained(tmp_path / name)
            torch.save({"inputs": inputs, "logits": model(inputs)}, tmp_path / name / "expected.pt")
    folders = [str(tmp_path / name) for name in ("dual", *CONFIGS)]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_LIBRARIES, *folders]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n"
