"""Checkpoints that must not load are refused with one of our errors, before anything large is read or built."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hydra_ensembles as he
from architectures_clip import DUAL_CASES, open_clip_model
from checkpoint_models import ensemble, same_state, text
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.files import checksum, sealed
from hydra_ensembles.model.dual_encoder import DualEncoder
from hydra_ensembles.model.ensemble import Ensemble
from zero_shot_models import NAMES, dual_of

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text ensemble, a dual encoder and a zero-shot classifier; not to be modified."""
    folder = tmp_path_factory.mktemp("saved")
    ensemble(text()).save_pretrained(folder / "text")
    he.convert(open_clip_model()).save_pretrained(folder / "dual")
    dual = dual_of(next(case for case in DUAL_CASES if case.name == "open_clip-nonscalar"))
    members = [he.prune(dual, heads) for heads in ([(0, 1, "image"), (1, 2, "text")], [(1, 0, "text")])]
    he.zero_shot(he.fuse(members), NAMES).save_pretrained(folder / "zero-shot")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the text ensemble, or of the one named by the test."""
    return Path(shutil.copytree(saved / getattr(request, "param", "text"), tmp_path / "model"))


def change_config(folder: Path, change: Change) -> None:
    """Change the configuration and update its digest, so that only the content is wrong."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    del config["digest"]
    (folder / "config.json").write_text(json.dumps(sealed(config)), encoding="utf-8")


def assert_refused(folder: str | Path, token: str, kind: type[Ensemble] | type[DualEncoder] = Ensemble) -> None:
    with pytest.raises(CheckpointError, match=token):
        kind.from_pretrained(folder)


def test_the_folder_of_a_build_means_its_finished_ensemble(folder: Path, tmp_path: Path) -> None:
    for name in ("base", "ensemble"):
        shutil.copytree(folder, tmp_path / "run" / name)
    assert_refused(tmp_path / "run", "one of base, ensemble")  # two models side by side are no build
    (tmp_path / "run" / "run.json").write_text("{}")
    shutil.rmtree(tmp_path / "run" / "base")
    built = he.load(tmp_path / "run")
    assert isinstance(built, Ensemble)
    built.with_metadata(source="mine").save_pretrained(tmp_path / "run")
    assert he.load(tmp_path / "run").metadata.source == "mine"


def test_missing_folders_and_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(tmp_path / "nowhere", "does not exist")
    assert_refused(f"{folder.name}/config.json", "is a file")  # it looks like a hub id
    assert_refused(folder.parent, f"no config.*wrote, one of {folder.name}$")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "pickles")  # which are never loaded
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, "no tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_only_plain_files_in_the_folder_are_read(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_refused(folder, "outside")
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would block forever
    assert_refused(folder, "plain file")


def test_links_within_the_folder_and_within_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors").symlink_to("other.safetensors")
    Ensemble.from_pretrained(folder)
    cached = tmp_path / "hub/models--a--b/snapshots/0123"
    cached.parent.mkdir(parents=True)
    blobs = (tmp_path / "hub/models--a--b/blobs", tmp_path / "hub/blobs")
    shutil.move(folder, cached)
    for name, blob in zip(("config.json", "tokenizer.json"), blobs, strict=True):
        blob.mkdir()
        (cached / name).rename(blob / name)
        (cached / name).symlink_to(blob / name)
    Ensemble.from_pretrained(cached)


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (b'{"model_type": "vit"}', r"hydra_ensembles\.convert"),
        (b'{"format": "hydra_ensembles", "format_version": 3}', "version 3"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs"),
    ],
)
def test_texts_that_are_no_config(content: bytes, token: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, token)


WRONG: dict[str, list[tuple[Change, str]]] = {
    "text": [
        (lambda c: c["files"].update({"../model.safetensors": "0" * 64}), "checksums"),
        (lambda c: c["model"]["encoder"].pop("causal"), "causal"),  # a missing field does not get its default
        (lambda c: c["model"]["heads"][0].__setitem__(0, [1, 0]), "ascending"),
        (lambda c: c["metadata"]["calibration"].update(temperature=[1e-320]), "must be positive"),
        (lambda c: c["metadata"]["preprocessing"].update(tokenizer="{}"), "tokenizer"),
        (lambda c: c["metadata"]["preprocessing"].update(pad_id=11), "pad_id is 11"),
        (lambda c: c.update(format_version=1, files={}), "checksums"),
        (lambda c: c.update(kind="dual_encoder"), "kind 'dual_encoder'"),
        (lambda c: c["model"]["heads"].pop(), "3 temperatures"),
        (lambda c: c["metadata"].update(labels=["one"]), "1 labels"),
        (lambda c: c["model"]["encoder"].update(width=1 << 24), "instead of"),
    ],
    "dual": [(lambda c: c["metadata"]["image"]["preprocessing"].update(crop_fraction=1e-9), "makes images of")],
    "zero-shot": [
        (lambda c: c["metadata"].update(text_side=None), "tokenizer"),
        (lambda c: c["files"].pop("tokenizer.json"), "tokenizer"),
        (lambda c: c["metadata"]["text_side"]["projection"].update(outputs=23), "width 23"),
    ],
}


@pytest.mark.parametrize(
    ("folder", "kind", "change", "token"),
    [(name, DualEncoder if name == "dual" else Ensemble, *row) for name, rows in WRONG.items() for row in rows],
    indirect=["folder"],
)
def test_configs_that_do_not_add_up_or_are_enormous_are_refused_before_a_model_is_built(
    folder: Path, kind: Any, change: Change, token: str
) -> None:
    change_config(folder, change)
    assert_refused(folder, token, kind)


def test_a_changed_config_is_noticed_and_one_of_the_first_format_answers_as_before(folder: Path) -> None:
    model = Ensemble.from_pretrained(folder)
    content = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(content.replace('"threshold": 0.1', '"threshold": 0.2'), encoding="utf-8")
    assert_refused(folder, "digest")  # a changed value is noticed
    config = json.loads(content)
    del config["digest"]  # the old format had none
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 1}), encoding="utf-8")
    loaded = Ensemble.from_pretrained(folder)
    assert (loaded.config, loaded.metadata) == (model.config, model.metadata)
    assert same_state(loaded, model)
    tensors = load_file(folder / "model.safetensors")
    tensors["stem.words"] = tensors["stem.words"].double()  # the old format allowed mixed dtypes
    save_file(tensors, folder / "model.safetensors")
    config["files"]["model.safetensors"] = checksum(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 1}), encoding="utf-8")
    loaded = Ensemble.from_pretrained(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
    assert torch.equal(loaded.predict("hello").probs, model.double().predict("hello").probs)


def test_files_of_absurd_size_are_not_read_through(folder: Path) -> None:
    for name, token in (("model.safetensors", "damaged"), ("config.json", "4194304 bytes")):
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 40)  # sparse: takes no space
        assert_refused(folder, token)


@pytest.mark.parametrize(
    ("change", "token"),
    [
        (lambda t: t.pop("stem.words"), "lacks"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown 'extra'"),
        (lambda t: t.update({"stem.words": torch.zeros(1, 6, 11)}), r"instead of \[1, 11, 6\]"),
        (lambda t: t.update({"stem.words": t["stem.words"].double()}), r"F64 \(stem\.words\)"),
    ],
)
def test_tensors_that_do_not_fit(change: Change, token: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    right = checksum(folder / "model.safetensors")
    change_config(folder, lambda config: config["files"].update({"model.safetensors": right}))
    assert_refused(folder, token)
