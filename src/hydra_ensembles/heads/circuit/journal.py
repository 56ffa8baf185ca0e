"""A record on disk after every greedy step, from which an interrupted run goes on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._utils import write_atomically
from ...errors import HydraError
from ...schema import from_plain, to_plain

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
        model: Fingerprint of the model.
        data: Fingerprint of the data.
        settings: What else the choices depend on.

    Raises:
        HydraError: The file belongs to another model, other data or other settings, or is no journal.
    """

    def __init__(self, path: str | Path | None, model: str, data: str, settings: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._header: dict[str, Any] = {"format": FORMAT, "model": model, "data": data, "settings": dict(settings)}
        self.start: Start | None = None
        self.steps: list[Step] = []
        if self.path is not None and self.path.exists():
            content = self._read(self.path)
            self.start, self.steps = content.start, list(content.steps)

    def add(self, step: Step) -> None:
        """Append a step and write the file anew, in one piece."""
        self.steps.append(step)
        if self.path is not None:
            content = {**self._header, "start": to_plain(self.start), "steps": to_plain(self.steps)}
            write_atomically(self.path, json.dumps(content, indent=1).encode())

    def _read(self, path: Path) -> _Content:
        advice = "delete the file to start anew, or give another path"
        try:
            content = from_plain(_Content, json.loads(path.read_text()), "journal")
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, HydraError) as error:
            raise HydraError(f"{path} is not a journal of a circuit extraction ({error}); {advice}") from error
        if content.format != FORMAT:
            raise HydraError(f"{path} has the format {content.format!r}, expected {FORMAT!r}; {advice}")
        for name, what in (("model", "model"), ("data", "data set")):
            ours, theirs = self._header[name], getattr(content, name)
            if ours != theirs:
                raise HydraError(
                    f"{path} is the journal of another {what}: its fingerprint is {theirs[:12]}…, here it is "
                    f"{ours[:12]}…; {advice}"
                )
        ours, theirs = dict(self._header["settings"]), dict(content.settings)
        different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if different:
            lines = ", ".join(f"{key}: {theirs.get(key)} there, {ours.get(key)} here" for key in different)
            raise HydraError(f"{path} is the journal of a run with other settings ({lines}); {advice}")
        return content
