"""The steps of a circuit extraction, noted in a file, so that a run that was stopped goes on where it was."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._distributed import Ranks
from .._utils import require_same_run, write_atomically
from ..errors import CheckpointError, HydraError
from ..heads.ranking import Head
from ..schema import from_plain, parse_json, to_plain

FORMAT = "hydra_ensembles circuit journal 1"


@dataclass(frozen=True)
class Step:
    """One greedy step: the head removed, and the integers of the model without it.

    Attributes:
        layer: Layer of the head.
        head: Its original index.
        errors: Wrong ID samples.
        discordance: Twice the pairs in the wrong order, plus ties; 0 where no OOD data is needed.
        layer_evaluations: Blocks run on one sample in this step, over all ranks.
        multiply_adds: Multiply-adds of this step, over all ranks.
        excess: On an audited step, by how much the choice of the method missed the reference, in units of the
            integer that is minimised; None elsewhere.
        tower: The tower of the head.
    """

    layer: int
    head: int
    errors: int
    discordance: int
    layer_evaluations: int
    multiply_adds: int
    excess: int | None = None
    tower: str = "main"


@dataclass(frozen=True)
class Start:
    """The integers of the model before the first step."""

    errors: int
    discordance: int


@dataclass(frozen=True)
class _Content:
    format: str
    model: str
    data: str
    settings: Mapping[str, Any]
    start: Start
    steps: tuple[Step, ...]


class Journal:
    """The steps of a run, kept in a file where a path is given.

    Args:
        path: The file; None keeps nothing.
        identity: Fingerprints of the `model` and the `data`, and what else the choices depend on, as `settings`.

    Raises:
        CheckpointError: The file belongs to another model, other data or other settings, or is no journal.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = None if path is None else Path(path), dict(identity)
        self.start: Start | None = None
        self.steps: list[Step] = []
        if self.path is not None and self.path.exists():
            self._read(self.path)

    @property
    def heads(self) -> list[Head]:
        """The heads removed so far."""
        return [Head(step.layer, step.head, step.tower) for step in self.steps]

    def add(self, step: Step) -> None:
        """Append a step and write the file anew, in one piece."""
        self.steps.append(step)
        if self.path is not None:
            content = {"format": FORMAT, **self.identity, "start": to_plain(self.start), "steps": to_plain(self.steps)}
            write_atomically(self.path, json.dumps(content, indent=1).encode())

    def _read(self, path: Path) -> None:
        try:
            content = from_plain(_Content, parse_json(path.read_bytes(), "the file"), "journal")
            if content.format != FORMAT:
                raise CheckpointError(f"its format is {content.format!r}, expected {FORMAT!r}")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a journal of a circuit extraction ({error}); delete the file to start anew, or give "
                "another path"
            ) from error
        theirs = {"model": content.model, "data": content.data, "settings": dict(content.settings)}
        require_same_run(theirs, self.identity, path, "the journal of a circuit")
        self.start, self.steps = content.start, list(content.steps)


def open_journal(path: str | Path | None, identity: Mapping[str, Any], ranks: Ranks) -> Journal:
    """The journal, read and written by rank 0; the other ranks get its steps, or its refusal."""
    problem: HydraError | None = None
    record = Journal(None, identity)
    if ranks.rank == 0:
        try:
            record = Journal(path, identity)
        except HydraError as error:
            problem = error
    problem = ranks.from_first(problem)
    if problem is not None:
        raise problem
    record.start, record.steps = ranks.from_first((record.start, record.steps))
    return record
