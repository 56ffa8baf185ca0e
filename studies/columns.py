"""Files of columns: arrays by name, in one compressed piece."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hydra_ensembles.files import write_atomically

Array = npt.NDArray[Any]


def read_columns(path: Path) -> dict[str, Array]:
    """All columns of a file; none where there is no file."""
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def write_columns(path: Path, columns: Mapping[str, Array]) -> None:
    """A file of columns, in one piece; the same columns give the same bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **columns)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())
