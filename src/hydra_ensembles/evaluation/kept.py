"""Answers to batches that outlive an interruption: written as time goes by, read when the same is asked again."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from .._distributed import current_ranks
from ..batches import Inputs
from ..errors import ConfigError
from ..fingerprints import model_fingerprint, tensors_digest
from ..model.ensemble import Ensemble
from ..overlap import Keys
from ..run_folder import IDENTITY, RunFolder

EVERY = 30.0  # seconds between writes; what an interruption finds unwritten, it writes
PART = "answers-{}"


class Kept:
    """Answers of one ensemble by the content of the batches, in a folder of their own; entered, it is worked in.

    A folder of another model, or with other settings than what the answers depend on besides, is refused; None keeps
    nothing. `what` is the work in words, for messages: `"an atlas"`.
    """

    def __init__(self, folder: str | Path | None, model: object, settings: Mapping[str, Any], what: str) -> None:
        self._run: RunFolder | None = None
        self._stored: dict[str, dict[str, Tensor]] = {}
        self._new: dict[str, dict[str, Tensor]] = {}
        self._parts = 0
        self._written = monotonic()
        self._open = ExitStack()
        if folder is None:
            return
        if not isinstance(model, Ensemble) or current_ranks().size > 1:
            raise ConfigError(
                f"output keeps the answers of an Ensemble in one process, got a {type(model).__name__} in "
                f"{current_ranks().size}; leave it out"
            )
        fitted = model.metadata.familiarity
        identity = {
            "weights": model_fingerprint(model),
            "familiarity": None if fitted is None else tensors_digest(fitted.state),
            **settings,
        }
        if fitted is not None and fitted.settings.neighbours:  # which neighbour counts is in no tensor
            identity["neighbours"] = fitted.settings.neighbours
        if torch.is_autocast_enabled(model.device.type):
            identity["autocast"] = str(torch.get_autocast_dtype(model.device.type))
        self._run = RunFolder(folder, identity, what=what)

    def __enter__(self) -> "Kept":
        if self._run is not None:
            self._open.enter_context(self._run.working())
            while self._run.has(f"{PART.format(self._parts)}.safetensors"):
                for path, tensor in self._part({}).items():
                    key, _, name = path.partition("/")
                    self._stored.setdefault(key, {})[name] = tensor
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._write()
        finally:
            self._open.__exit__(*raised)
            folder = None if self._run is None else self._run.path
            if folder is not None and not self._parts:  # nothing came of it: the place is free for something else
                (folder / IDENTITY).unlink(missing_ok=True)
                if not any(folder.iterdir()):
                    folder.rmdir()

    def key(self, inputs: Inputs, keys: Keys, labels: Tensor | None = None) -> str:
        """What a batch is known by: the keys of its samples, and all numbers that these leave out."""
        if self._run is None:
            return ""
        tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(sorted(inputs.items()))
        exact = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}  # masks, segments
        exact |= {} if labels is None else {"labels": labels}
        return tensors_digest({"keys": torch.from_numpy(keys), **exact})

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The answers to a batch, if they are kept."""
        return self._stored.get(key)

    def put(self, key: str, answers: Mapping[str, Tensor]) -> None:
        """Keep the answers to a batch."""
        if self._run is not None:
            self._new[key] = dict(answers)
            if monotonic() - self._written >= EVERY:
                self._write()

    def _write(self) -> None:
        if self._new:
            self._part({f"{key}/{name}": tensor for key, batch in self._new.items() for name, tensor in batch.items()})
            self._new = {}
        self._written = monotonic()

    def _part(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The next part: as it lies there, or as it is written now."""
        assert self._run is not None
        self._parts += 1
        return self._run.tensors(PART.format(self._parts - 1), lambda: tensors)
