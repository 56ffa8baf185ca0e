"""Loading from the Hub; a folder stands in for it."""

import fnmatch
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import pytest

from checkpoint_models import ensemble, hydra, same_state, text
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.model.ensemble import Ensemble


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of repositories, each with a folder for every revision; what is downloaded lies in `cache`."""
    root, cache = tmp_path / "hub", tmp_path / "cache"

    def download(repo_id: str, *, revision: str = "main", token: str | None = None, allow_patterns: list[str]) -> str:
        source = root / repo_id / revision
        if not source.exists() or (repo_id == "owner/private" and token is None):
            raise FileNotFoundError("404 Client Error")
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        for path in source.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, cache)
        return str(cache)

    asked = create_autospec(huggingface_hub.snapshot_download, side_effect=download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    return root


def test_only_our_files_are_downloaded_and_a_folder_of_that_name_comes_first(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ensemble(text()), ensemble(hydra())
    first.save_pretrained(hub / "owner/model/1")
    second.save_pretrained(hub / "owner/model/main")
    for name in ("setup.py", "pytorch_model.bin"):
        (hub / "owner/model/main" / name).write_bytes(b"raise SystemExit")
    assert same_state(Ensemble.from_pretrained("hub:owner/model"), second)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    loaded = Ensemble.from_pretrained("owner/model", revision="1")
    assert same_state(loaded, first)
    assert loaded.metadata == first.metadata
    second.save_pretrained(tmp_path / "owner/model")
    shutil.rmtree(hub)
    monkeypatch.chdir(tmp_path)
    assert same_state(Ensemble.from_pretrained("owner/model"), second)


def test_what_the_hub_does_not_have(hub: Path) -> None:
    ensemble(text()).save_pretrained(hub / "owner/private/main")
    with pytest.raises(CheckpointError, match="'owner/nothing'"):
        Ensemble.from_pretrained("owner/nothing")
    with pytest.raises(CheckpointError, match="revision 'v2'"):
        Ensemble.from_pretrained("owner/private", revision="v2", token="secret")
    with pytest.raises(CheckpointError, match="token"):
        Ensemble.from_pretrained("owner/private")
    assert Ensemble.from_pretrained("owner/private", token="secret").kind == "text"
