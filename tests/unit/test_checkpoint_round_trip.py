"""What is saved comes back: every bit, every dtype, every kind of ensemble, with torch and safetensors alone."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint_models import CONFIGS, TOKENIZER, ensemble, hydra, inputs_for, ragged, same_bits, single, text
from hydra_ensembles.errors import CheckpointError, ConfigError
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.preprocessing import TextPreprocessing

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def assert_same_model(loaded: Ensemble, saved: Ensemble) -> None:
    assert loaded.config == saved.config
    first, second = loaded.state_dict(), saved.state_dict()
    assert list(first) == list(second)
    assert all(same_bits(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = ensemble(CONFIGS[name](), dtype)
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.metadata == model.metadata
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    if dtype != torch.float16:  # several operators have no half-precision CPU kernel
        inputs = inputs_for(model.config, dtype)
        with torch.no_grad():
            assert same_bits(loaded(inputs), model(inputs))


def test_special_values_come_back(tmp_path: Path) -> None:
    model = ensemble(single())
    with torch.no_grad():
        model.stem.patch.flatten()[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    model.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), model)


def test_mixed_dtypes_come_back(tmp_path: Path) -> None:
    model = ensemble(ragged(), torch.bfloat16)
    model.readout.float()
    model.stem.double()
    model.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), model)


def test_views_and_tied_parameters_are_saved_by_value(tmp_path: Path) -> None:
    model = ensemble(ragged())
    first, second = model.encoder.layers[0].norm1, model.encoder.layers[0].norm2  # type: ignore[union-attr]
    second.weight = first.weight
    first.bias = torch.nn.Parameter(torch.randn(8, 3).t())
    model.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), model)


def test_loaded_parameters_do_not_depend_on_the_file(tmp_path: Path) -> None:
    model = ensemble(single())
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert_same_model(loaded, model)


def test_the_same_model_gives_the_same_files(tmp_path: Path) -> None:
    for folder in ("a/model", "b/model"):
        ensemble(hydra()).save_pretrained(tmp_path / folder)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "a/model" / name).read_bytes() == (tmp_path / "b/model" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a/model").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_all_files_have_the_usual_permissions(tmp_path: Path) -> None:
    ensemble(text()).save_pretrained(tmp_path)
    (tmp_path / "usual").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_dtype_and_device_are_converted_on_request(tmp_path: Path) -> None:
    model = ensemble(single(), torch.float64)
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(str(tmp_path), dtype=torch.bfloat16, device="cpu")
    assert_same_model(loaded, model.to(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"int8.*accepted are float64"):
        Ensemble.from_pretrained(tmp_path, dtype=torch.int8)


def test_the_tokenizer_is_a_file_of_its_own(tmp_path: Path) -> None:
    model = ensemble(text())
    model.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER.encode()
    assert "tokenizer" not in json.loads((tmp_path / "config.json").read_text())["metadata"]["preprocessing"]
    preprocessing = Ensemble.from_pretrained(tmp_path).metadata.preprocessing
    assert isinstance(preprocessing, TextPreprocessing)
    assert preprocessing("hello wörld")["input_ids"].tolist() == [[1, 2]]


def test_saving_over_another_model_replaces_it(tmp_path: Path) -> None:
    ensemble(text()).save_pretrained(tmp_path)
    model = ensemble(hydra())
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.metadata == model.metadata  # the old tokenizer.json is not listed, so it is not read


def test_config_tells_what_it_should(tmp_path: Path) -> None:
    ensemble(hydra()).save_pretrained(tmp_path)
    content = (tmp_path / "config.json").read_text(encoding="utf-8")
    config = json.loads(content)
    assert config["format_version"] == 1
    assert config["kind"] == "ensemble"
    assert config["model"]["heads"] == [[[0, 1], [], [3]], [[0, 1], [1, 2, 3], []], [[0, 1], [], [0, 1, 2, 3]]]
    assert config["model"]["sharing"]["mlp"] is True
    assert config["model"]["trunk"] == 1
    assert config["metadata"]["preprocessing"]["interpolation"] == "bilinear"
    assert config["metadata"]["labels"][0] == "class 0 “ü”"
    assert "[[0, 1], [], [3]]" in content  # head lists stay readable


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    metadata = Metadata(metrics={"auroc": np.float32(0.5), "heads": np.int64(3)})
    ensemble(single(), metadata=metadata).save_pretrained(tmp_path)
    assert Ensemble.from_pretrained(tmp_path).metadata.metrics == {"auroc": 0.5, "heads": 3.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"auroc": float("nan")}}, "metrics.auroc must be a finite number"),
        ({"labels": ("a", "b")}, "2 labels for 3 classes"),
        ({"labels": ("a", "b", "\ud800")}, "not valid Unicode|cannot be written"),
        ({"preprocessing": TextPreprocessing(max_length=4)}, "TextPreprocessing for a model of images"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    good = ensemble(single())
    good.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        good.with_metadata(**changes).save_pretrained(tmp_path)
    assert Ensemble.from_pretrained(tmp_path).metadata == good.metadata
    assert not list(tmp_path.glob(".*"))


def test_a_broken_tokenizer_is_not_saved(tmp_path: Path) -> None:
    model = ensemble(text())
    broken = replace(model.metadata.preprocessing, tokenizer="{")  # type: ignore[type-var]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not valid JSON"):
        model.with_metadata(preprocessing=broken).save_pretrained(tmp_path)


def test_parameters_without_values_or_of_other_dtypes_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="float8_e4m3fn; a checkpoint holds float64"):
        ensemble(single()).to(torch.float8_e4m3fn).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="meta device"):
        ensemble(single()).to("meta").save_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="it is a file"):
        ensemble(single()).save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("survived", range(4))
def test_an_interrupted_save_leaves_whole_files(survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ensemble(single()), ensemble(text())
    names = ("model.safetensors", "tokenizer.json", "README.md", "config.json")
    contents = []
    for index, model in enumerate((old, new)):
        model.save_pretrained(tmp_path / f"{index}/model")
        folder = tmp_path / f"{index}/model"
        contents.append({name: (folder / name).read_bytes() for name in names if (folder / name).exists()})
    target = tmp_path / "0/model"
    calls: list[str] = []
    rename = os.replace

    def replace_then_stop(source: Path, destination: Path) -> None:
        if len(calls) == survived:
            raise KeyboardInterrupt
        calls.append(Path(destination).name)
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
from hydra_ensembles.ensemble import Ensemble
model = Ensemble.from_pretrained(sys.argv[1])
with torch.no_grad():
    model.stem.patch.add_(1.0)
rename = os.replace
def replace(source, destination):
    if str(destination).endswith(sys.argv[2]):
        os._exit(9)
    rename(source, destination)
os.replace = replace
model.save_pretrained(sys.argv[1])
"""


def test_a_killed_save_is_noticed_and_can_be_repeated(tmp_path: Path) -> None:
    model = ensemble(single())
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "config.json"], check=False)
    assert result.returncode == 9
    assert (tmp_path / "config.json").read_bytes() == config
    with pytest.raises(CheckpointError, match="a save was interrupted"):
        Ensemble.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), model)


WITHOUT_LIBRARIES = """
import sys
for name in ("timm", "transformers", "open_clip", "torchvision", "tokenizers", "PIL", "sklearn", "torchmetrics"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from hydra_ensembles.ensemble import Ensemble
for folder in sys.argv[1:]:
    model = Ensemble.from_pretrained(folder)
    saved = torch.load(folder + "/expected.pt", weights_only=True)
    with torch.no_grad():
        assert torch.equal(model(saved["inputs"]), saved["logits"])
    assert all(torch.equal(tensor, saved["state"][name]) for name, tensor in model.state_dict().items())
    assert len(saved["state"]) == len(model.state_dict())
print("equal")
"""


def test_loading_needs_no_model_library(tmp_path: Path) -> None:
    folders = []
    for name, config in CONFIGS.items():
        model, inputs = ensemble(config()), inputs_for(config())
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            expected = {"inputs": inputs, "logits": model(inputs), "state": dict(model.state_dict())}
        torch.save(expected, tmp_path / name / "expected.pt")
        folders.append(str(tmp_path / name))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_LIBRARIES, *folders], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n"


@pytest.mark.parametrize("content", ['{"model_type": "vit"}', '["format"]', "{", ""])
def test_a_folder_of_another_library_is_left_alone(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "README.md"):
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"its config\.json is not of this library.* name another folder"):
        ensemble(single()).save_pretrained(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.json": content,
        "README.md": content,
    }
    (tmp_path / "config.json").unlink()
    for _ in range(2):  # into a folder without one, then over an earlier save
        ensemble(single()).save_pretrained(tmp_path)
    assert Ensemble.from_pretrained(tmp_path).num_members == ensemble(single()).num_members
