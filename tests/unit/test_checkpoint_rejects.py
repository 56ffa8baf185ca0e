"""Checkpoints that must not load, each with the error a user would have to understand."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_models import ensemble, ragged, same_bits, text, tiny
from hydra_ensembles.checkpoint import checksum, open_checkpoint
from hydra_ensembles.errors import CheckpointError, ConfigError, HydraError
from hydra_ensembles.model.ensemble import Ensemble


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensemble(text()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the weights and the checksum with them, so that only the names, shapes and dtypes are wrong."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    trust(folder)


def trust(folder: Path) -> None:
    digests = {name: checksum(folder / name) for name in ("model.safetensors", "tokenizer.json")}
    change_config(folder, lambda config: config.update(files=digests))


def assert_refused(folder: str | Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Ensemble.from_pretrained(folder)
    assert isinstance(caught.value, HydraError)
    assert isinstance(caught.value, ValueError)


# --- where it lies -----------------------------------------------------------------------------------------


def test_missing_folders_and_files(folder: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "does not exist; give the folder that save_pretrained wrote")
    assert_refused("nowhere-at-all", "hub id of the form 'owner/name'")
    assert_refused(folder / "config.json", "is a file, not a folder")
    with pytest.raises(CheckpointError, match="revisions belong to hub ids"):
        Ensemble.from_pretrained(folder, revision="main")
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, r"has no tokenizer\.json \(it has \['README\.md', 'config\.json', 'model\.safetensors'\]")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, r"has no model\.safetensors")
    (folder / "config.json").unlink()
    assert_refused(folder, r"has no config\.json")


def test_an_unknown_device(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used here; available: cpu"):
        Ensemble.from_pretrained(folder, device="gpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "last.ckpt"])
def test_pickles_are_never_read(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert_refused(folder, f"{name}'.*pickles can run code and are never read")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_that_leave_the_folder(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_refused(folder, f"{name} is a link to .*outside of its folder")
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)  # a circle
    assert_refused(folder, f"has no {name}")
    (folder / name).unlink()
    (folder / name).mkdir()
    assert_refused(folder, "not a plain file")
    (folder / name).rmdir()
    os.mkfifo(folder / name)  # opening it would wait for ever
    assert_refused(folder, "not a plain file")


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
    "name", ["../model.safetensors", "/etc/passwd", "C:\\weights", "sub/model.safetensors", "pytorch_model.bin", ""]
)
def test_other_file_names(name: str, folder: Path) -> None:
    change_config(folder, lambda config: config["files"].update({name: "0" * 64}))
    assert_refused(folder, r"only model\.safetensors and tokenizer\.json are read")


# --- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 500 + b"]" * 500, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "Infinity is not a JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid Unicode"),
        (b'{"\\udfff": 1}', "not valid Unicode"),
        (b"[]", "not written by hydra_ensembles"),
        (b"null", "not written by hydra_ensembles"),
        (b'{"model_type": "vit"}', r"not written by hydra_ensembles.*hydra_ensembles\.convert"),
        (b'{"format": "hydra_ensembles"}', "format version None, this hydra_ensembles reads version 1"),
        (b'{"format": "hydra_ensembles", "format_version": 2}', "format version 2.*update hydra_ensembles"),
        (b'{"format": "hydra_ensembles", "format_version": true}', "format version True"),
        (b'{"format": "hydra_ensembles", "format_version": 1.0}', r"format version 1\.0"),
        (
            b'{"format": "hydra_ensembles", "format_version": 1}',
            r"lacks the fields \['library_version', 'kind', 'model'\]",
        ),
    ],
)
def test_texts_that_are_no_config(content: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, message)


def test_a_config_of_absurd_length(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no space
    assert_refused(folder, "at most 67108864 are accepted")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(surprise=1), r"unknown fields \['surprise'\]"),
        (lambda c: c.update(kind="dual_encoder"), "kind 'dual_encoder', expected 'ensemble'"),
        (lambda c: c.pop("model"), r"lacks the fields \['model'\]"),
        (lambda c: c.pop("files"), r"no checksum for model\.safetensors"),
        (lambda c: c["files"].update({"model.safetensors": "abc"}), "must be a SHA-256"),
        (lambda c: c["model"].pop("heads"), r"config\.model lacks the fields \['heads'\]"),
        (
            lambda c: c["model"]["encoder"].update(rotary=True),
            r"config\.model\.encoder has unknown fields \['rotary'\]",
        ),
        (
            lambda c: c["model"]["encoder"].update(width="8"),
            r"config\.model\.encoder\.width must be of type int, got '8'",
        ),
        (lambda c: c["model"]["encoder"].update(norm_eps=10**400), r"norm_eps must be a finite number"),
        (
            lambda c: c["model"]["stem"].update(kind="audio"),
            r"stem\.kind must be one of \['patch', 'text'\], got 'audio'",
        ),
        (lambda c: c["model"]["heads"].pop(), "3 temperatures for 2 members"),
        (lambda c: c["model"]["heads"][0].pop(), r"heads\[0\] lists 2 layers, the encoder has 3"),
        (lambda c: c["model"]["heads"][0].__setitem__(0, [1, 0]), "in ascending order"),
        (lambda c: c["model"]["heads"][0].__setitem__(0, [0, 0]), "distinct heads"),
        (lambda c: c["model"]["heads"][0].__setitem__(0, [4]), "between 0 and 3"),
        (lambda c: c["model"]["heads"][0].__setitem__(0, [0]), r"shape \[5, 3, 2, 8\] instead of \[4, 3, 2, 8\]"),
        (lambda c: c["model"].update(trunk=1), "share the attention of layer 0"),
        (lambda c: c["metadata"].update(labels=["one"]), "1 labels for 2 classes"),
        (lambda c: c["metadata"]["calibration"].update(temperature=[1, 1]), "2 temperatures for 3 members"),
        (lambda c: c["metadata"]["calibration"].update(score="magic"), r"calibration\.score must be one of"),
        (lambda c: c["metadata"]["preprocessing"].update(tokenizer="{}"), "a tokenizer is a file of its own"),
        (lambda c: c["metadata"].update(preprocessing=None), "lists a tokenizer"),
    ],
)
def test_configs_that_do_not_add_up(change: Callable[[dict[str, Any]], object], message: str, folder: Path) -> None:
    change_config(folder, change)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("stem", {"vocabulary": 1 << 24}),
        ("encoder", {"mlp_width": 1 << 24}),
        ("encoder", {"width": 1 << 24, "head_dim": 1 << 24, "mlp_width": 1 << 24}),
        ("readout", {"num_classes": 1 << 24}),
    ],
)
def test_terabytes_are_not_allocated(part: str, changes: dict[str, int], folder: Path) -> None:
    def grow(config: dict[str, Any]) -> None:
        config["model"][part].update(changes)
        config["metadata"]["labels"] = []

    change_config(folder, grow)
    assert_refused(folder, "instead of")


def test_sizes_whose_product_no_tensor_can_have(tmp_path: Path) -> None:
    ensemble(tiny()).save_pretrained(tmp_path)

    def grow(config: dict[str, Any]) -> None:
        config["model"]["encoder"]["width"] = 1 << 24
        config["model"]["stem"].update(channels=1 << 24, patch_size=[1 << 12, 1 << 12])

    change_config(tmp_path, grow)
    assert_refused(tmp_path, "impossible model: Storage size calculation overflowed")


def test_thousands_of_layers_are_not_built(folder: Path) -> None:
    def deepen(config: dict[str, Any]) -> None:
        config["model"]["encoder"]["layers"] = 4096
        config["model"]["heads"] = [[[]] * 4096]
        config["metadata"]["calibration"] = None

    change_config(folder, deepen)
    assert_refused(folder, "tensors, the configuration needs at least 4096")


def test_the_kind_can_be_another(folder: Path) -> None:
    change_config(folder, lambda config: config.update(kind="dual_encoder", model={"image": {}, "text": {}}))
    assert open_checkpoint(folder, "dual_encoder").record.model == {"image": {}, "text": {}}


# --- the other files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("stem.words"), r"lacks 'stem\.words'"),
        (lambda t: t.update(extra=torch.zeros(1)), "has the unknown 'extra'"),
        (lambda t: t.update({"stem.words": torch.zeros(1, 6, 11)}), r"shape \[1, 6, 11\] instead of \[1, 11, 6\]"),
        (lambda t: t.update({"stem.words": torch.zeros(66)}), r"shape \[66\] instead of \[1, 11, 6\]"),
        (lambda t: t.update({"stem.words": t["stem.words"].int()}), "as I32; accepted are float64, float32"),
        (lambda t: t.update({"stem.words": t["stem.words"].to(torch.complex64)}), "as C64; accepted are"),
        (lambda t: t.clear(), "holds 0 tensors"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[dict[str, Any]], object], message: str, folder: Path) -> None:
    change_tensors(folder, change)
    assert_refused(folder, message)


def test_weights_of_another_save_with_the_same_shapes(tmp_path: Path) -> None:
    model = ensemble(ragged())
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.stem.patch[0] += 1.0
    model.save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "a/model.safetensors", tmp_path / "b/model.safetensors")
    assert_refused(tmp_path / "b", "SHA-256 differs")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_files(name: str, folder: Path) -> None:
    content = (folder / name).read_bytes()
    for damaged in (b"", content[:7], content[: len(content) // 2], content[:-2], content + b"\0", b"\xff" * 99):
        (folder / name).write_bytes(damaged)
        assert_refused(folder, name)
        trust(folder)
        assert_refused(folder, name)
    (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert_refused(folder, "pointer of git-lfs")


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_tokenizer_that_is_no_json_object(content: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    trust(folder)
    assert_refused(folder, r"tokenizer\.json")


def test_a_file_of_absurd_size_is_not_read_through(tmp_path: Path) -> None:
    ensemble(tiny()).save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 42)
    assert_refused(tmp_path, "not a valid safetensors file")


def test_an_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert_refused(folder, "cannot be read .*Permission denied")


def test_a_good_copy_still_loads(folder: Path) -> None:
    model, loaded = ensemble(text()), Ensemble.from_pretrained(folder)
    assert all(same_bits(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
