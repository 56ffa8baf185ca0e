"""Saved training state: position and tensors, with digests; only the same run can resume from it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .._utils import require_same_run
from ..errors import CheckpointError
from ..files import read_file, read_sealed, write_atomically, write_sealed
from ..schema import ADDED_LATER, from_plain, to_plain

INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Validation:
    """Accuracy and negative log-likelihood on validation data, and when they were measured."""

    step: int
    epoch: int
    accuracy: float
    nll: float
    by_nll: bool = field(default=False, metadata=ADDED_LATER)  # whether NLL decides what is better, not accuracy

    @property
    def merit(self) -> tuple[float, float]:
        """Larger is better: accuracy first, then lower NLL; with `by_nll` in the opposite order."""
        return (-self.nll, self.accuracy) if self.by_nll else (self.accuracy, -self.nll)


@dataclass(frozen=True)
class Position:
    """Position of a run: updates made, epochs finished, batches read in the current epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything needed to resume a run, besides tensors: the content of `checkpoint.json`."""

    fingerprint: Mapping[str, Any]  # what the run was started with; only an identical run may resume
    position: Position = Position()
    evaluations: tuple[Validation, ...] = ()  # journal of the run
    best: Validation | None = None  # of equal ones the first; its weights are kept
    waited: int = 0  # validations in a row without improvement over `reference`
    reference: float | None = None  # accuracy (or minus NLL) of the last improvement; None before the first validation
    finished: bool = False  # whether the result is final
    files: Mapping[str, str] = field(default_factory=dict)  # tensor files, by content
    checksums: Mapping[str, str] = field(default_factory=dict, metadata=ADDED_LATER)  # SHA-256 of each file
    format: Literal["hydra-ensembles fine-tuning 1"] = "hydra-ensembles fine-tuning 1"

    def after(self, validation: Validation, min_delta: float) -> "RunState":
        """The state after one more validation; only a rise by more than `min_delta` counts as improvement."""
        improved = self.reference is None or validation.merit[0] - min_delta > self.reference
        return replace(
            self,
            evaluations=(*self.evaluations, validation),
            best=validation if self.best is None or validation.merit > self.best.merit else self.best,
            waited=0 if improved else self.waited + 1,
            reference=validation.merit[0] if improved else self.reference,
        )

    def check(self) -> None:
        """Raise if the state is inconsistent."""
        position = self.position
        counts = (position.step, position.epoch, position.batch, self.waited)
        expected = {"result"} if self.finished else {"current"} if self.best is None else {"current", "best"}
        checksummed = self.checksums.keys() in (set(), set(self.files.values()))  # older checkpoints have none
        if min(counts) < 0 or self.files.keys() != expected or not checksummed:
            raise CheckpointError(
                f"{INDEX} is at {position} with files of {sorted(self.files)}; expected are counts from 0 and files of "
                f"{sorted(expected)}, each with its checksum"
            )


def require_layout(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise if names, shapes or dtypes differ from `expected`: the tensors belong to another model."""
    in_file, in_model = (
        {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (saved, expected)
    )
    for name in sorted(in_file.keys() | in_model.keys()):
        was = in_file.get(name, "missing")
        now = in_model.get(name, "unknown")
        if was != now:
            raise CheckpointError(f"the tensor {name!r} is {was} in the file, but {now} in the model")


@contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Turn errors of a checkpoint into a `CheckpointError` that says what to delete."""
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} cannot be used: {error}. Delete {folder} to start this training again"
        ) from error


def read_state(folder: Path, fingerprint: Mapping[str, Any]) -> RunState | None:
    """The saved state of a run, or None if there is none; raises for the state of another run.

    A run has one learning rate. The other rates of the grid are not part of it, so the grid may change.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    with explain_errors(folder):
        state = from_plain(RunState, read_sealed(path), path.name, complete=True)
        state.check()
    theirs, ours = (_without_rates(one) for one in (state.fingerprint, json.loads(json.dumps(to_plain(fingerprint)))))
    require_same_run(theirs, ours, folder, "the training")
    return state


def _without_rates(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint without the rates of the recipe: the run's own is stored separately, as `rate`."""
    others = {} if "rate" not in fingerprint else dict.fromkeys(("grid", "learning_rate"))
    recipe = fingerprint.get("recipe")
    return {**fingerprint, "recipe": {**recipe, **others} if isinstance(recipe, Mapping) else recipe}


def read_tensors(
    folder: Path, state: RunState, trained: Mapping[str, Tensor]
) -> tuple[RunState, dict[str, dict[str, Tensor]]]:
    """The tensors of every file in the state, by content, and the state with all checksums.

    The maximum file size is three times the trained tensors, for weights and AdamW's state, and some room for names.
    """
    tensors, checksums = {}, {}
    most = 3 * sum(tensor.nbytes for tensor in trained.values()) + (len(trained) << 12) + (1 << 20)
    for part, name in state.files.items():
        content = read_file(folder / Path(name).name, most)
        checksums[name] = hashlib.sha256(content).hexdigest()
        if state.checksums.get(name, checksums[name]) != checksums[name]:
            raise CheckpointError(f"{name} was changed after it was written: its SHA-256 is not the one in {INDEX}")
        try:
            tensors[part] = load(content)
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{name} holds no tensors ({error})") from error
    return replace(state, checksums=checksums), tensors


def write_state(folder: Path, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> RunState:
    """Save the state with its tensors; return it with the new files. Files of other parts stay in use."""
    files, checksums = dict(state.files), dict(state.checksums)
    for part, weights in tensors.items():
        files[part] = f"{part}-{state.position.step}-{state.position.epoch}.safetensors"
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
        checksums[files[part]] = hashlib.sha256(content).hexdigest()
        write_atomically(folder / files[part], content)
    state = replace(state, files=files, checksums={name: checksums[name] for name in files.values()})
    write_sealed(folder / INDEX, to_plain(state))
    remove_unused(folder, state)
    return state


def remove_unused(folder: Path, state: RunState) -> None:
    """Delete tensor files that the state does not name, because it replaced them."""
    for path in folder.glob("*.safetensors"):
        if path.name not in state.files.values():
            path.unlink(missing_ok=True)
