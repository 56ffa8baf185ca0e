"""Publishing to the Hub and loading from it; folders stand in for its repositories."""

import fnmatch
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi

from checkpoint_models import ensemble, hydra, same_state, text
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.model.ensemble import Ensemble

TOKEN = "hf_stand_in"


@dataclass
class Hub:
    """The functions that checkpoints call, with huggingface_hub's signatures; every upload is a revision."""

    root: Path
    private: dict[str, bool | None] = field(default_factory=dict)
    uploads: int = 0
    downloads: list[str] = field(default_factory=list)

    def api(self, token: str | None) -> Any:
        def create(repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
            if token != TOKEN:
                raise PermissionError("401 Client Error: invalid token")
            self.private.setdefault(repo_id, private)

        made = create_autospec(HfApi, instance=True)
        made.create_repo.side_effect, made.upload_folder.side_effect = create, self.upload
        return made

    def upload(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        self.uploads += 1
        for revision in (f"{self.uploads}", "main"):
            shutil.copytree(folder_path, self.root / repo_id / revision, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{self.uploads}")

    def download(
        self, repo_id: str, *, revision: str | None = None, token: str | None = None, allow_patterns: list[str]
    ) -> str:
        source = self.root / repo_id / (revision or "main")
        if not source.exists() or (self.private[repo_id] and token != TOKEN):
            raise FileNotFoundError("404 Client Error")
        place = self.root / f"cache-{len(self.downloads)}"
        place.mkdir()
        for path in source.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                self.downloads.append(path.name)
                shutil.copy(path, place)
        return str(place)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", found.api)
    asked = create_autospec(huggingface_hub.snapshot_download, side_effect=found.download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    return found


def test_round_trip_and_a_second_push_is_a_new_revision(hub: Hub) -> None:
    first, second = ensemble(text(), torch.bfloat16), ensemble(text(), torch.float64)
    assert first.push_to_hub("owner/model", token=TOKEN) == "https://hub/owner/model/commit/1"
    files = {path.name: path for path in (hub.root / "owner/model/1").iterdir()}
    assert sorted(files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert "from_pretrained('owner/model')" in files["README.md"].read_text()
    loaded = Ensemble.from_pretrained("owner/model")
    assert (loaded.config, loaded.metadata) == (first.config, first.metadata)
    assert same_state(loaded, first)
    second.push_to_hub("owner/model", token=TOKEN, commit_message="second")
    assert same_state(Ensemble.from_pretrained("owner/model"), second)
    assert same_state(Ensemble.from_pretrained("owner/model", revision="1"), first)


def test_only_our_files_are_downloaded(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded if a local folder has that name."""
    model = ensemble(hydra())
    model.push_to_hub("owner/model", token=TOKEN)
    for name in ("setup.py", "pytorch_model.bin"):
        (hub.root / "owner/model/main" / name).write_bytes(b"raise SystemExit")
    assert same_state(Ensemble.from_pretrained("hub:owner/model"), model)
    assert sorted(hub.downloads) == ["README.md", "config.json", "model.safetensors"]
    hub.downloads.clear()
    model.save_pretrained(tmp_path / "owner/model")
    monkeypatch.chdir(tmp_path)
    assert same_state(Ensemble.from_pretrained("owner/model"), model)
    assert hub.downloads == []


def test_what_the_hub_does_not_have_or_does_not_take(hub: Hub) -> None:
    model = ensemble(hydra())
    with pytest.raises(CheckpointError, match="'owner/nothing'"):
        Ensemble.from_pretrained("owner/nothing")
    with pytest.raises(CheckpointError, match=r"'owner/model'.*token"):
        model.push_to_hub("owner/model", token="wrong")
    model.push_to_hub("owner/secret", private=True, token=TOKEN)
    with pytest.raises(CheckpointError, match="revision 'v2'"):
        Ensemble.from_pretrained("owner/secret", revision="v2", token=TOKEN)
    with pytest.raises(CheckpointError, match="token"):
        Ensemble.from_pretrained("owner/secret")
    assert same_state(Ensemble.from_pretrained("owner/secret", token=TOKEN), model)
