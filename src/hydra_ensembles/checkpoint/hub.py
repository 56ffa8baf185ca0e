"""Checkpoints on the Hugging Face hub: finding one by its id, and publishing one as a single commit."""

import re
import tempfile
from pathlib import Path

import huggingface_hub

from ..errors import CheckpointError
from .contents import FILE_NAMES, Contents
from .writing import save_checkpoint

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def locate(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder a checkpoint lies in: `source` itself, or the hub's cache after downloading `source`.

    A folder that exists wins. Otherwise a string like `owner/name` is a hub id; from the hub come only the
    files of a checkpoint, whatever else the repository holds.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} was given, but {source} is a folder; revisions belong to hub ids"
            )
        return folder
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"{source} {what}; give the folder that save_pretrained wrote, or a hub id of the form 'owner/name'"
        )
    try:
        snapshot = huggingface_hub.snapshot_download(
            source, revision=revision, token=token, allow_patterns=list(FILE_NAMES)
        )
    except Exception as error:  # the hub client raises whatever its HTTP library does
        raise CheckpointError(
            f"{source!r} is no folder here, and the hub did not give it as a model (revision "
            f"{revision or 'main'!r}): {_first_line(error)}. Check the name, the connection and, for a private "
            "model, the token"
        ) from error
    return Path(snapshot)


def push_checkpoint(
    repo_id: str,
    contents: Contents,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Publish a checkpoint, making the repository if need be; the address of the commit.

    All files go into one commit, so nobody can download half of an update.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"{repo_id!r} is not a hub id; it has the form 'owner/name'")
    with tempfile.TemporaryDirectory() as temporary:
        save_checkpoint(temporary, contents)
        operations = [
            huggingface_hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path)
            for path in sorted(Path(temporary).iterdir())
        ]
        api = huggingface_hub.HfApi(token=token)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.create_commit(
                repo_id, operations, commit_message=commit_message or "Upload a Hydra Ensembles model"
            )
        except Exception as error:  # as above
            raise CheckpointError(
                f"the hub did not take {repo_id!r}: {_first_line(error)}. Check the name, the connection and that "
                "the token may write there (log in with: hf auth login)"
            ) from error
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no further details'}"
