"""The state of a training run on disk: JSON beside safetensors, replaced as one, readable without trust.

`checkpoint.json` says where the run stands and names the tensor files that belong to it. Tensors are written
first under new names and the JSON last, so a kill at any moment leaves a checkpoint that is whole. No random
state is stored: every seed is derived from the position.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from .._utils import write_atomically
from ..errors import CheckpointError, ConfigError
from ..schema import from_plain, to_plain
from .validation import Evaluation, Patience

FORMAT = "hydra-ensembles fine-tuning 1"
INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Position:
    """How far a run is: updates made, epochs finished, batches read of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a run needs to go on, besides tensors.

    Attributes:
        fingerprint: What the run was started with; a checkpoint serves only the same.
        position: How far it is.
        evaluations: Every evaluation so far: the journal of the run.
        best: The evaluation whose weights are kept.
        waited: Of the patience: evaluations without improvement.
        reference: Of the patience: the accuracy to improve on; None before the first evaluation.
        finished: Whether the result is final.
        files: Tensor files, by what they hold.
    """

    fingerprint: Mapping[str, Any]
    position: Position = Position()
    evaluations: tuple[Evaluation, ...] = ()
    best: Evaluation | None = None
    waited: int = 0
    reference: float | None = None
    finished: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def patience(self) -> Patience:
        """The state of early stopping."""
        return Patience(waited=self.waited) if self.reference is None else Patience(self.reference, self.waited)


class Store:
    """The folder of one run; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, fingerprint: Mapping[str, Any]) -> RunState | None:
        """The saved state, or None when there is none; a state of another run is refused."""
        if self.folder is None or not (self.folder / INDEX).exists():
            return None
        path = self.folder / INDEX
        try:
            state = from_plain(RunState, json.loads(path.read_text(encoding="utf-8")), path.name)
        except (json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error
        if state.format != FORMAT:
            raise CheckpointError(f"{path} has format {state.format!r}, this version reads {FORMAT!r}")
        _require_same(dict(state.fingerprint), json.loads(json.dumps(to_plain(fingerprint))), self.folder)
        return state

    def tensors(self, state: RunState, what: str) -> dict[str, Tensor]:
        """The tensors of one of the files a state names."""
        if self.folder is None:
            raise CheckpointError("nothing was stored: the run has no folder")
        path = self.folder / Path(state.files[what]).name
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error

    def write(self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> RunState:
        """Save a state with its tensors; files of `state.files` that are not given anew stay in use.

        Returns:
            The state as saved, naming its files.
        """
        if self.folder is None:
            return state
        files = dict(state.files)
        for what, named in tensors.items():
            files[what] = f"{what}-{state.position.step}-{state.position.epoch}.safetensors"
            content = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            write_atomically(self.folder / files[what], save(content))
        state = replace(state, files=files)
        text = json.dumps(to_plain(state), indent=2)
        write_atomically(self.folder / INDEX, text.encode())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in files.values():
                path.unlink(missing_ok=True)
        return state


def optimizer_tensors(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The tensors an optimizer keeps for each parameter, named `parameter/what`."""
    return {
        f"{name}/{what}": value
        for name, parameter in trained.items()
        for what, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put saved tensors back where `optimizer_tensors` found them."""
    names = {parameter: name for name, parameter in trained.items()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved: dict[int, dict[str, Tensor]] = {}
    for number, parameter in enumerate(listed):
        prefix = f"{names[parameter]}/"
        one = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if one:
            saved[number] = one
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})


def _require_same(saved: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    if saved == asked:
        return
    lines = []
    for key in sorted(saved.keys() | asked.keys()):
        old, new = saved.get(key), asked.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            parts = sorted(part for part in old.keys() | new.keys() if old.get(part) != new.get(part))
            lines += [f"{key}.{part} was {old.get(part)!r} and is {new.get(part)!r}" for part in parts]
        elif old != new:
            lines.append(f"{key} was {old!r} and is {new!r}")
    raise CheckpointError(
        f"the checkpoint in {folder} belongs to another run: {'; '.join(lines[:5])}. Give another output folder, or "
        "delete this one to start afresh"
    )
