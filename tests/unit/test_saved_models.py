"""Saved models load unchanged: every bit, every dtype, both kinds of model, also with torch and safetensors alone."""

import contextlib
import os
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
import hydra_ensembles.checkpoint as checkpoint
from architectures import perturbed
from architectures_clip import DUAL_CASES, DualCase, open_clip_model
from checkpoint_models import (
    CONFIGS,
    TOKENIZER,
    ensemble,
    inputs_for,
    labelled,
    ragged,
    same_bits,
    same_state,
    single,
    text,
)
from hydra_ensembles.errors import CheckpointError, StorageError
from hydra_ensembles.model.dual_encoder import DualEncoder
from hydra_ensembles.model.ensemble import Ensemble, weights_of
from hydra_ensembles.model.metadata import Metadata
from processes import in_a_child

TWO_LIBRARIES = [case for case in DUAL_CASES if case.name in ("transformers-quickgelu", "open_clip-nonscalar")]
OTHER_TYPES = [("hydra", torch.float16), ("hydra", torch.bfloat16), ("text", torch.float64)]


def assert_same_model(loaded: Ensemble | DualEncoder, saved: Ensemble | DualEncoder) -> None:
    assert loaded.config == saved.config
    assert same_state(loaded, saved)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), *OTHER_TYPES])
def test_every_bit_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = ensemble(CONFIGS[name](), dtype)
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.metadata == model.metadata
    if name == "text":  # its tokenizer is a separate file
        assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER.encode()
    if dtype != torch.float16:  # several operators have no half-precision CPU kernel
        inputs = inputs_for(model.config, dtype)
        with torch.no_grad():
            assert same_bits(loaded(inputs), model(inputs))


@pytest.mark.parametrize(("case", "members"), [*zip(TWO_LIBRARIES, (1, 3), strict=True)])
def test_every_bit_of_a_dual_encoder_comes_back(case: DualCase, members: int, tmp_path: Path) -> None:
    parts = [he.convert(perturbed(case.build(), seed)) for seed in range(members)]
    dual = he.fuse(parts, stem="separate", mlp="separate")
    dual.save_pretrained(tmp_path)
    loaded = DualEncoder.from_pretrained(tmp_path)
    assert_same_model(loaded, dual)
    assert (loaded.image.metadata, loaded.text.metadata) == (dual.image.metadata, dual.text.metadata)
    with torch.no_grad():
        assert torch.equal(loaded(case.pixels(), case.texts()), dual(case.pixels(), case.texts()))


def test_odd_values_views_and_ties_come_back(tmp_path: Path) -> None:
    model = ensemble(ragged())
    first, second = model.encoder.layers[0].norm1, model.encoder.layers[0].norm2  # type: ignore[union-attr]
    second.weight = first.weight
    first.bias = torch.nn.Parameter(torch.randn(8, 3).t())
    with torch.no_grad():
        model.stem.patch.flatten()[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    model.save_pretrained(tmp_path)
    loaded = Ensemble.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # parameters are not mapped to the file
    assert_same_model(loaded, model)


def test_large_models_are_saved_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a smaller one in the same folder leaves none of them."""
    model, size = ensemble(CONFIGS["hydra"]()), checkpoint.SHARD_SIZE
    for limit, several in ((3_000, True), (size, False), (4_000, True)):
        monkeypatch.setattr(checkpoint, "SHARD_SIZE", limit)
        model.save_pretrained(tmp_path)
        parts = {path.name for path in tmp_path.glob("*.safetensors")}
        assert len(parts) > 1 if several else parts == {"model.safetensors"}
        assert same_state(he.load(tmp_path), model)
    part = next(tmp_path.glob("model-00002-*"))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model-00002.*SHA-256"):
        he.load(tmp_path)
    part.unlink()
    with pytest.raises(CheckpointError, match="there is no model-00002"):
        he.load(tmp_path)


def test_the_same_model_gives_the_same_files(tmp_path: Path) -> None:
    written = []
    for folder in (tmp_path / "a/model", tmp_path / "b/model"):
        ensemble(CONFIGS["hydra"]()).save_pretrained(folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert set(written[0]) == {"README.md", "config.json", "model.safetensors"}


def test_a_folder_of_another_library_is_left_alone(tmp_path: Path) -> None:
    content = '{"model_type": "vit"}'
    for name in ("config.json", "README.md"):
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ensemble(single()).save_pretrained(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == [content] * 2
    (tmp_path / "config.json").rename(tmp_path / "model.safetensors")  # somebody's weights, without a configuration
    with pytest.raises(CheckpointError, match=r"model\.safetensors, README\.md"):
        ensemble(single()).save_pretrained(tmp_path)


@pytest.mark.parametrize("step", range(13))  # of the calls below: 4 fsyncs and the commit, 4 moves and their fsyncs
@pytest.mark.parametrize("ending", [OSError(28, "No space left on device"), "killed"])
def test_a_save_cut_short_anywhere_leaves_one_model_whole_and_the_next_one_tidies_up(
    step: int, ending: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = ensemble(single()), ensemble(text())  # the new model has one more file
    old.save_pretrained(tmp_path)
    left, acts = step, {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def act(name: str, *arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == -1 and ending == "killed":
            os._exit(9)
        if left == -1:
            raise ending
        return acts[name](*arguments)

    for name in acts:
        monkeypatch.setattr(os, name, partial(act, name))
    if ending == "killed":
        assert in_a_child(lambda: new.save_pretrained(tmp_path)) in (0, 9)
    else:
        with contextlib.suppress(StorageError):  # a folder that cannot be flushed is no error
            new.save_pretrained(tmp_path)
    monkeypatch.undo()
    found = Ensemble.from_pretrained(tmp_path)
    assert_same_model(found, new if found.kind == "text" else old)
    assert found.kind == "text" or left < 0 or ending == "killed"
    new.save_pretrained(tmp_path)
    assert_same_model(Ensemble.from_pretrained(tmp_path), new)
    assert ending == "killed" or not list(tmp_path.glob(".*"))


def test_two_processes_that_save_to_one_folder_leave_one_model_whole(tmp_path: Path) -> None:
    models = ensemble(single()), ensemble(text())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda turn: models[turn % 2].save_pretrained(tmp_path), range(16)))
    found = Ensemble.from_pretrained(tmp_path)
    assert_same_model(found, models[found.kind == "text"])


def test_weights_edited_after_calibrating_are_said_once_when_saved(tmp_path: Path) -> None:
    calibrated = he.calibrate(ensemble(single(), metadata=Metadata()), labelled(single()), familiarity=None)
    known = replace(calibrated.metadata.calibration, weights=weights_of(calibrated))  # type: ignore[type-var]
    calibrated = calibrated.with_metadata(calibration=known)
    with warnings.catch_warnings(action="error"):
        calibrated.save_pretrained(tmp_path)
        he.load(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with torch.no_grad():
        calibrated.readout.classifier.weight.data.mul_(2.0)  # type: ignore[union-attr]
    with pytest.warns(he.HydraWarning, match="calibrate again"):
        calibrated.save_pretrained(tmp_path)


# --- refused ---------------------------------------------------------------------------------------------------------


def assert_refused(folder: Path | str, token: str, kind: type[Ensemble] | type[DualEncoder] = Ensemble) -> None:
    with pytest.raises(CheckpointError, match=token):
        kind.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensemble(text()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_folder_of_a_build_means_its_finished_ensemble(folder: Path, tmp_path: Path) -> None:
    for name in ("base", "ensemble"):
        shutil.copytree(folder, tmp_path / "run" / name)
    assert_refused(tmp_path / "run", "one of base, ensemble")  # two models side by side are no build
    (tmp_path / "run" / "run.json").write_text("{}")
    shutil.rmtree(tmp_path / "run" / "base")
    assert isinstance(he.load(tmp_path / "run"), Ensemble)


def test_missing_folders_and_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(tmp_path / "nowhere", "does not exist")
    assert_refused(f"{folder.name}/config.json", "is a file")  # it looks like a hub id
    assert_refused(folder, "he.load reads any", DualEncoder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "pickles")  # which are never loaded
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, r"no tokenizer\.json")


@pytest.mark.parametrize(
    ("name", "content", "token"),
    [
        ("config.json", b'{"model_type": "vit"}', r"hydra_ensembles\.convert"),
        ("config.json", b'{"format": "hydra_ensembles", "format_version": 2}', "version 2.*convert"),
        ("config.json", b"{", r"config\.json"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("model.safetensors", b"half a fi", "SHA-256"),
        ("tokenizer.json", b"{}", "SHA-256"),
    ],
)
def test_files_that_are_not_what_was_saved(name: str, content: bytes, token: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    assert_refused(folder, token)


WITHOUT_LIBRARIES = """
import sys
import torch
import hydra_ensembles as he
heavy = "timm transformers open_clip torchvision sklearn torchmetrics matplotlib accelerate tokenizers PIL scipy jinja2"
loaded = [name for name in heavy.split() if name in sys.modules]
assert not loaded, loaded  # importing the package stays light
for name in ("timm", "transformers", "open_clip", "torchvision", "ftfy", "regex", "sklearn", "torchmetrics", "jinja2"):
    sys.modules[name] = None  # importing it raises ImportError
for folder in sys.argv[3:]:
    saved = torch.load(folder + "/expected.pt", weights_only=True)
    assert "PIL" not in sys.modules and "tokenizers" not in sys.modules
    with torch.no_grad():
        assert torch.equal(he.Ensemble.from_pretrained(folder)(saved["inputs"]), saved["logits"])
from PIL import Image
picture = Image.new("RGB", (70, 50), (200, 30, 90))
dual = he.DualEncoder.from_pretrained(sys.argv[1])
saved = torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
other = he.zero_shot(he.DualEncoder.from_pretrained(sys.argv[2]), ["violin", "piano"])
with torch.no_grad():
    assert torch.equal(dual.encode_text(saved["strings"]), saved["text"])
    assert torch.equal(dual.encode_image(picture), saved["image"])
    assert torch.equal(other(other.prepare([picture])), saved["other"])
"""


@pytest.mark.usefixtures("usual_kernels")
def test_importing_stays_light_and_loading_needs_no_model_library(tmp_path: Path) -> None:
    from PIL import Image

    dual = he.convert(open_clip_model(text={"vocab_size": 49408, "context_length": 20}))
    strings, picture = ["a photo of a cat", "Ein Bär &amp; zwei Hunde ☺", ""], Image.new("RGB", (70, 50), (200, 30, 90))
    dual.save_pretrained(tmp_path / "dual")
    members = he.fuse([he.prune(dual, heads) for heads in ([(0, 1, "image"), (1, 2, "text")], [(1, 0, "text")])])
    members.save_pretrained(tmp_path / "fused")
    other = he.zero_shot(members, ["violin", "piano"])
    with torch.no_grad():
        answers = {"text": dual.encode_text(strings), "image": dual.encode_image(picture)}
        answers["other"] = other(other.prepare([picture]))
        torch.save({"strings": strings, **answers}, tmp_path / "dual/expected.pt")
        for name, config in CONFIGS.items():
            model, inputs = ensemble(config()), inputs_for(config())
            model.save_pretrained(tmp_path / name)
            torch.save({"inputs": inputs, "logits": model(inputs)}, tmp_path / name / "expected.pt")
    folders = [str(tmp_path / name) for name in ("dual", "fused", *CONFIGS)]
    command = [sys.executable, "-W", "error", "-W", "ignore:at least one text has", "-c", WITHOUT_LIBRARIES, *folders]
    subprocess.run(command, check=True, timeout=600)
