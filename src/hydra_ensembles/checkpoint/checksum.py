"""SHA-256 of the files of a checkpoint, which `config.json` remembers."""

import hashlib
from pathlib import Path

from ..errors import CheckpointError
from .contents import CONFIG

GIT_LFS_POINTER = b"version https://git-lfs"


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """Refuse a file that is not the one `config.json` was saved with."""
    if checksum(path) != expected:
        raise CheckpointError(
            f"{path} is not the file that {CONFIG} was saved with (its SHA-256 differs); it was changed or cut off, "
            "or a save was interrupted: save or download the model again"
        )


def refuse_pointer(path: Path) -> None:
    """Refuse what git leaves in place of a large file when git-lfs is not set up."""
    with path.open("rb") as file:
        if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
            raise CheckpointError(f"{path} is only a pointer of git-lfs; fetch the content with: git lfs pull")
