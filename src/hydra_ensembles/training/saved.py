"""Saved training state: position and tensors, with digests; only the same run resumes from it."""

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
    by_nll: bool = field(default=False, metadata=ADDED_LATER)  # whether the NLL says what is better, not the accuracy

    @property
    def merit(self) -> tuple[float, float]:
        """Larger is better: higher accuracy, and where equal, lower NLL; or the other way round."""
        return (-self.nll, self.accuracy) if self.by_nll else (self.accuracy, -self.nll)


@dataclass(frozen=True)
class Position:
    """How far a run is: updates made, epochs finished, batches read of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a run needs to go on, besides tensors: the content of `checkpoint.json`."""

    fingerprint: Mapping[str, Any]  # what the run was started with; a checkpoint serves only the same
    position: Position = Position()
    evaluations: tuple[Validation, ...] = ()  # the journal of the run
    best: Validation | None = None  # the one whose weights are kept; of equal ones, the first
    waited: int = 0  # validations in a row that brought no improvement over `reference`
    reference: float | None = None  # the last accuracy (or minus NLL) that did; None before the first validation
    finished: bool = False  # whether the result is final
    files: Mapping[str, str] = field(default_factory=dict)  # of tensors, by what they hold
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
        """Refuse what no run can have written."""
        position = self.position
        counts = (position.step, position.epoch, position.batch, self.waited)
        expected = {"result"} if self.finished else {"current"} if self.best is None else {"current", "best"}
        checksummed = self.checksums.keys() in (set(), set(self.files.values()))  # files of before have none
        if min(counts) < 0 or self.files.keys() != expected or not checksummed:
            raise CheckpointError(
                f"{INDEX} is at {position} with files of {sorted(self.files)}; expected are counts from 0 and files of "
                f"{sorted(expected)}, each with its checksum"
            )


def require_layout(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or types than `expected`: they would be of another model."""
    in_file, in_model = (
        {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (saved, expected)
    )
    for name in sorted(in_file.keys() | in_model.keys()):
        was = in_file.get(name, "missing")
        now = in_model.get(name, "unknown")
        if was != now:
            raise CheckpointError(f"the tensor {name!r} is {was} in the file, and {now} in the model")


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Whatever is wrong with a checkpoint becomes an error that says what to delete."""
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} cannot be used: {error}. Delete {folder} to start this training again"
        ) from error


def read_state(folder: Path, fingerprint: Mapping[str, Any]) -> RunState | None:
    """The saved state of a run, or None when there is none; a state of another run is refused.

    A run is at one learning rate. Which others were to be tried is no part of it, so a grid may lose or gain some.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    with usable(folder):
        state = from_plain(RunState, read_sealed(path), path.name, complete=True)
        state.check()
    theirs, ours = (_at_its_rate(one) for one in (state.fingerprint, json.loads(json.dumps(to_plain(fingerprint)))))
    require_same_run(theirs, ours, folder, "the training")
    return state


def _at_its_rate(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was started with, but for the rates of its recipe: its own has a place beside it."""
    others = {} if "rate" not in fingerprint else dict.fromkeys(("grid", "learning_rate"))
    recipe = fingerprint.get("recipe")
    return {**fingerprint, "recipe": {**recipe, **others} if isinstance(recipe, Mapping) else recipe}


def read_tensors(
    folder: Path, state: RunState, trained: Mapping[str, Tensor]
) -> tuple[RunState, dict[str, dict[str, Tensor]]]:
    """The tensors of every file that a state names, by what they hold; and the state with all checksums.

    No file is larger than three times what is `trained`, which is what an optimizer keeps, and some room for names.
    """
    tensors, checksums = {}, {}
    most = 3 * sum(tensor.nbytes for tensor in trained.values()) + (len(trained) << 12) + (1 << 20)
    for part, name in state.files.items():
        content = read_file(folder / Path(name).name, most)
        checksums[name] = hashlib.sha256(content).hexdigest()
        if state.checksums.get(name, checksums[name]) != checksums[name]:
            raise CheckpointError(f"{name} was changed after it was written: its SHA-256 is not that in {INDEX}")
        try:
            tensors[part] = load(content)
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{name} holds no tensors ({error})") from error
    return replace(state, checksums=checksums), tensors


def write_state(folder: Path, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> RunState:
    """Save a state with its tensors, and give it back with their files; those not given anew stay in use."""
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
    """Take away tensors that the state does not name: those it replaced."""
    for path in folder.glob("*.safetensors"):
        if path.name not in state.files.values():
            path.unlink(missing_ok=True)
