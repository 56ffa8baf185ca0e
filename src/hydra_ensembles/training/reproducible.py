"""Going on with a run: its state and checkpoints, and the data it was begun with, known again without reading all."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.data import TensorDataset

from .._utils import derive_seed, require_same_run, write_atomically
from ..batches import Batches, borrowed, epoch_of, length_of, parts_of, read_batch
from ..errors import CheckpointError, ConfigError, DataError
from ..heads.ranking import tensor_bytes
from ..schema import from_plain, to_plain

FORMAT = "hydra-ensembles fine-tuning 1"
INDEX = "checkpoint.json"
Content = Callable[[Any, str, int], Mapping[str, Tensor]]
SOME_BATCHES, SOME_ROWS = 8, 64
"""Of the batches of a list and the rows of a tensor: how many are looked at, from the first to the last."""


def content_of(batch: Any, name: str, index: int = 0) -> dict[str, Tensor]:
    """The tensors of a batch by name, labels among them."""
    inputs, labels = read_batch(batch, name, index)
    tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    return tensors if labels is None else {**tensors, "labels": labels}


def fingerprint(batches: Batches, name: str, seed: int, content: Content = content_of) -> str:
    """A short name for a data source, from what can be had without reading an epoch; the source is left as it was.

    That is its length, the first batch in the order of the seed, and of what lies in memory: all labels and row
    numbers of its data set, some rows of a `TensorDataset`, all labels and some batches of a list. Sources that agree
    in all of this have the same name. `content` gives the tensors of a batch by name.
    """
    digest = hashlib.sha256(f"{length_of(batches)}".encode())
    with borrowed(batches), epoch_of(batches, 0, seed, torch.device("cpu")):
        at_hand = dict(_at_hand(batches))
        first = next(iter(batches), None)
    if first is None:
        raise DataError(f"{name} has no batches; check the loader")
    _take_in(digest, content(first, name, 0))
    if _in_memory(batches):
        for index in _spread(len(batches), SOME_BATCHES):
            _take_in(digest, content(batches[index], name, index))
    _take_in(digest, at_hand)
    return digest.hexdigest()[:16]


def data_identity(
    train: Batches, validation: Batches | None, seed: int, content: Content = content_of
) -> dict[str, str | None]:
    """Fingerprints of the data of a run with this seed, for its identity."""
    own = derive_seed(seed, "fingerprint")
    held_out = None if validation is None else fingerprint(validation, "validation", own, content)
    return {"train": fingerprint(train, "train", own, content), "validation": held_out}


def _in_memory(batches: Batches) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a source is a list and no more; a class made from one may do something when it is read."""
    return type(batches) in (list, tuple)


def _at_hand(batches: Batches) -> Iterator[tuple[str, Tensor]]:
    """What a source holds in memory that tells its items apart, by name."""
    if _in_memory(batches):
        for number, batch in enumerate(batches):
            labels = _as_tensor(_labels(batch))
            if labels is not None:
                yield f"batch {number}", labels
    parts: list[Any] = []
    for part in parts_of(batches):
        joined = getattr(part, "datasets", None)  # of a `ConcatDataset`
        parts += [part, *(joined if isinstance(joined, list | tuple) else ())]
    for number, part in enumerate(parts):
        for attribute in ("labels", "targets", "rows", "indices"):
            values = _as_tensor(getattr(part, attribute, None))
            if values is not None:
                yield f"{attribute} {number}", values
        if isinstance(part, TensorDataset):
            for column, tensor in enumerate(part.tensors):
                rows = tensor if tensor.dim() == 1 else tensor[_spread(len(tensor), SOME_ROWS)]
                yield f"column {number} {column}", rows


def _labels(batch: Any) -> Any:
    """Where the labels of a batch are, if it has any; not checked."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch.get("label"))
    return batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None


def _as_tensor(values: Any) -> Tensor | None:
    """Numbers or strings in a tensor; None for anything else."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, list | tuple | range) and len(values):
        if isinstance(values[0], str):
            values = np.frombuffer("\x1f".join(map(str, values)).encode(), np.uint8)
        elif not isinstance(values[0], int | float | np.number):
            return None
    if not isinstance(values, np.ndarray | list | tuple | range):
        return None
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):  # objects, lists of different lengths
        return None


def _spread(count: int, some: int) -> list[int]:
    """At most `some` positions out of `count`, evenly from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, max(count - 1, 0), min(count, some)).tolist()})


def _take_in(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))


@dataclass(frozen=True)
class Validation:
    """Accuracy and negative log-likelihood on validation data, and when they were measured."""

    step: int
    epoch: int
    accuracy: float
    nll: float

    def better_than(self, other: "Validation | None") -> bool:
        """Higher accuracy; where equal, lower NLL. Equal in both, the earlier one stays."""
        return other is None or (self.accuracy, -self.nll) > (other.accuracy, -other.nll)


@dataclass(frozen=True)
class Position:
    """How far a run is: updates made, epochs finished, batches read of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a run needs to go on, besides tensors."""

    fingerprint: Mapping[str, Any]  # what the run was started with; a checkpoint serves only the same
    position: Position = Position()
    evaluations: tuple[Validation, ...] = ()  # the journal of the run
    best: Validation | None = None  # the one whose weights are kept
    waited: int = 0  # validations in a row that brought no improvement over `reference`
    reference: float | None = None  # the last accuracy that did; None before the first validation
    finished: bool = False  # whether the result is final
    files: Mapping[str, str] = field(default_factory=dict)  # of tensors, by what they hold
    format: str = FORMAT

    def after(self, found: Validation, min_delta: float) -> "RunState":
        """The state after one more validation; only a rise by more than `min_delta` counts as improvement."""
        improved = self.reference is None or found.accuracy - min_delta > self.reference
        return replace(
            self,
            evaluations=(*self.evaluations, found),
            best=found if found.better_than(self.best) else self.best,
            waited=0 if improved else self.waited + 1,
            reference=found.accuracy if improved else self.reference,
        )


class Checkpoints:
    """The folder of one run: a state in JSON, which names the tensor files it goes with. Without a folder, nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, fingerprint: Mapping[str, Any]) -> RunState | None:
        """The saved state, or None when there is none; a state of another run is refused."""
        if self.folder is None or not (path := self.folder / INDEX).exists():
            return None
        try:
            state = from_plain(RunState, json.loads(path.read_text(encoding="utf-8")), path.name)
        except (json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error
        if state.format != FORMAT:
            raise CheckpointError(f"{path} has format {state.format!r}, this version reads {FORMAT!r}")
        asked = json.loads(json.dumps(to_plain(fingerprint)))
        require_same_run(dict(state.fingerprint), asked, self.folder, "the training")
        return state

    def tensors(self, state: RunState, what: str) -> dict[str, Tensor]:
        """The tensors of one of the files a state names."""
        assert self.folder is not None  # the state was read from it
        path = self.folder / Path(state.files[what]).name
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error

    def write(self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> RunState:
        """Save a state with its tensors, and give it back with their files; those not given anew stay in use."""
        if self.folder is None:
            return state
        files = dict(state.files)
        for what, named in tensors.items():
            files[what] = f"{what}-{state.position.step}-{state.position.epoch}.safetensors"
            content = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            write_atomically(self.folder / files[what], save(content))
        state = replace(state, files=files)
        write_atomically(self.folder / INDEX, json.dumps(to_plain(state), indent=2).encode())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in files.values():
                path.unlink(missing_ok=True)
        return state
