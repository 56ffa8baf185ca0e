"""The journal of an extraction, from which an interrupted run resumes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._distributed import Ranks
from .._utils import require_same_run
from ..errors import CheckpointError
from ..files import read_sealed, write_sealed
from ..heads.masking import ONE_TOWER
from ..heads.ranking import Head
from ..schema import from_plain, to_plain

FORMAT = "hydra_ensembles circuit journal 1"


@dataclass(frozen=True)
class Step:
    """One greedy step: the head removed, the integers of the model without it, and the work of all ranks.

    For an audited step, `excess` is by how much the integer of the choice exceeds that of the best candidate.
    """

    layer: int
    head: int
    errors: int
    discordance: int
    layer_evaluations: int
    multiply_adds: int
    excess: int | None = None
    tower: str = ONE_TOWER


@dataclass
class Journal:
    """The stored steps of a run; `settings` are those on which the choices depend besides the model and the data."""

    format: str
    model: str  # fingerprints
    data: str
    settings: Mapping[str, Any]
    start: Mapping[str, int] | None = None  # `errors` and `discordance` before the first step
    steps: tuple[Step, ...] = ()

    @property
    def heads(self) -> list[Head]:
        """The heads removed so far."""
        return [Head(step.layer, step.head, step.tower) for step in self.steps]

    def add(self, step: Step, path: Path | None) -> None:
        """Append a step; if there is a path, rewrite the file atomically, with its digest."""
        self.steps = (*self.steps, step)
        if path is not None:
            write_sealed(path, to_plain(self))


def stored_journal(path: Path | None, ranks: Ranks) -> Journal | None:
    """Load a journal on rank 0 for all ranks; None if there is no file. Raises if the file is not a journal."""

    def read() -> Journal | None:
        if path is None or ranks.rank or not path.exists():
            return None
        try:
            journal = from_plain(Journal, read_sealed(path), "journal")
            if journal.steps and (journal.start is None or journal.start.keys() != {"errors", "discordance"}):
                raise CheckpointError("it lacks the state of the model before the first step")
            return journal
        except ValueError as error:
            raise CheckpointError(f"{path} is not a journal of a circuit ({error}); delete it to start over") from error

    return ranks.gather(ranks.all_or_none(read))[0]


def resumed(journal: Journal, stored: Journal, path: Path, candidates: Sequence[Head]) -> Journal:
    """Return the stored journal; raise if it is of another run than `journal`, which has no steps yet."""
    expected = {**vars(journal), "start": stored.start, "steps": stored.steps}
    require_same_run(vars(stored), expected, path, "the journal of a circuit")
    if len(set(stored.heads) & set(candidates)) < len(stored.heads):  # possible in old files, without digest
        raise CheckpointError(f"{path} has a head twice, or one that is not a candidate; delete it to start over")
    return stored
