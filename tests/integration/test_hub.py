"""Publishing to the hub and loading from it, against a stand-in server on this machine."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from checkpoint_models import ensemble, hydra, same_state, text
from hub_stand_in import Hub, running_hub
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.model.ensemble import Ensemble

TOKEN = "hf_stand_in"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running stand-in that `huggingface_hub` takes for the hub, with an empty cache and no stored login."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub(TOKEN) as hub:
        # HF_ENDPOINT, as it would be read when huggingface_hub is imported
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def assert_same_model(loaded: Ensemble, saved: Ensemble) -> None:
    assert (loaded.config, loaded.metadata) == (saved.config, saved.metadata)
    assert same_state(loaded, saved)


def test_round_trip_and_a_second_push_is_a_new_revision(hub: Hub) -> None:
    first, second = ensemble(text(), torch.bfloat16), ensemble(text(), torch.float64)
    address = first.push_to_hub("owner/model", token=TOKEN)
    repository = hub.repositories["owner/model"]
    (commit,) = repository.commits
    assert address == f"{hub.address}/owner/model/commit/{commit}"
    assert sorted(repository.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert b"from_pretrained('owner/model')" in repository.files["README.md"]
    assert_same_model(Ensemble.from_pretrained("owner/model"), first)
    second.push_to_hub("owner/model", token=TOKEN, commit_message="second")
    assert repository.messages == ["Upload a Hydra Ensembles model", "second"]
    assert_same_model(Ensemble.from_pretrained("owner/model"), second)
    assert_same_model(Ensemble.from_pretrained("owner/model", revision=commit), first)


def test_only_our_files_are_downloaded_only_once_and_not_where_a_folder_has_that_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ensemble(hydra())
    model.push_to_hub("owner/model", token=TOKEN)
    others = {"setup.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "sub/config.json": b"{}"}
    hub.repositories["owner/model"].commit(others, "more files")
    for _ in range(2):
        assert_same_model(Ensemble.from_pretrained("owner/model"), model)
    assert sorted(hub.downloads) == ["README.md", "config.json", "model.safetensors"]
    hub.downloads.clear()
    model.save_pretrained(tmp_path / "owner/model")
    monkeypatch.chdir(tmp_path)
    assert_same_model(Ensemble.from_pretrained("owner/model"), model)
    assert hub.downloads == []


def test_what_the_hub_does_not_have_or_does_not_take(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ensemble(hydra())
    with pytest.raises(CheckpointError, match="'owner/nothing'"):
        Ensemble.from_pretrained("owner/nothing")
    with pytest.raises(CheckpointError, match=r"'owner/model'.*token"):
        model.push_to_hub("owner/model", token="wrong")
    for name in ("model", "a/b/c", "../x", "owner/", "owner/na me"):
        with pytest.raises(CheckpointError, match="owner/name"):
            model.push_to_hub(name, token=TOKEN)
    assert hub.repositories == {}
    model.push_to_hub("owner/secret", private=True, token=TOKEN)
    with pytest.raises(CheckpointError, match="revision 'v2'"):
        Ensemble.from_pretrained("owner/secret", revision="v2", token=TOKEN)
    with pytest.raises(CheckpointError, match="token"):
        Ensemble.from_pretrained("owner/secret")
    assert_same_model(Ensemble.from_pretrained("owner/secret", token=TOKEN), model)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(CheckpointError, match="connection"):
        Ensemble.from_pretrained("owner/other")
    with pytest.raises(CheckpointError, match="connection"):
        model.push_to_hub("owner/other", token=TOKEN)
