"""What a build depends on, written into its folder so that another build does not go on there."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..heads.ranking import model_fingerprint
from ..schema import to_plain
from .config import HydraConfig
from .data import BuildData
from .start import Start

FORMAT = "hydra_ensembles build 1"
_SHOWN = 5  # differences named in an error


def run_identity(config: HydraConfig, start: Start, data: BuildData) -> dict[str, Any]:
    """Config, model and data of a build as plain data."""
    remembered = replace(start.base.metadata, text_side=None)
    metadata = json.dumps(to_plain(remembered), sort_keys=True).encode()
    model: dict[str, Any] = {
        "weights": model_fingerprint(start.ranked),
        "metadata": hashlib.sha256(metadata).hexdigest(),
    }
    if start.dual is not None:
        model["templates"] = list(start.templates)
    return {"format": FORMAT, "config": to_plain(config), "model": model, "data": data.fingerprints()}


def require_same_run(file: Path, identity: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder whose identity file says something else."""
    advice = f"give another output folder, or delete {file.parent} to start over"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); {advice}") from error
    lines = list(_differences(found, identity))
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise CheckpointError(
            f"{file.parent} holds another build: {'; '.join(lines[:_SHOWN])}{more}. To go on: {advice}"
        )


def _differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """What is different, one line for each innermost field."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(theirs.keys() | ours.keys()):
            yield from _differences(theirs.get(key), ours.get(key), f"{path}.{key}" if path else str(key))
    elif theirs != ours:
        yield f"{path or 'the content'} was {_short(theirs)} and is {_short(ours)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:16]}…"
