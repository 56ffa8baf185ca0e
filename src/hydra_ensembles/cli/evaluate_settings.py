"""Everything an evaluation is asked for, and the sets it names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ConfigError, DataError
from ..metrics.inputs import Convention
from ..prediction import ScoreName
from .settings import DataSettings, ModelSettings

Group = Literal["near", "far", "apart", "ungrouped"]
GROUPS: tuple[Group, ...] = ("near", "far", "apart", "ungrouped")
_NAMED = re.compile(r"(?:(?P<group>near|far|apart):)?(?:(?P<name>[^=:/\\]+)=)?(?P<data>.+)", re.DOTALL)


@dataclass(frozen=True)
class EvaluateSettings(DataSettings, ModelSettings):
    """Which model on which sets, and what to measure.

    Attributes:
        output: Folder for the evaluation, or a `.json` file.
        name: What tables call the model; its own name if not given.
        id: Labelled in-distribution test set.
        ood: OOD sets, `near:NAME=DATA`, `far:NAME=DATA`, `apart:NAME=DATA`, or without a group.
        shift: Labelled sets under distribution shift, `NAME=DATA`.
        suite: A suite that gives all sets.
        score, scores, convention, bootstrap, gallery, keep_logits: As `hydra_ensembles.evaluate` takes them.
    """

    output: str = "evaluations"
    name: str | None = None
    id: str | None = None
    ood: tuple[str, ...] = ()
    shift: tuple[str, ...] = ()
    suite: str | None = None
    score: ScoreName = "msp"
    scores: tuple[ScoreName, ...] = ()
    convention: Convention = "torch-uncertainty"
    bootstrap: int = 0
    gallery: int = 6
    keep_logits: bool = False

    def __post_init__(self) -> None:
        """Check that there is something to evaluate on."""
        ModelSettings.__post_init__(self)
        DataSettings.__post_init__(self)
        if self.id is None and self.suite is None:
            raise ConfigError("no data to evaluate on; give --id DATA (and --ood near:NAME=DATA), or --suite NAME")

    @property
    def title(self) -> str:
        """What tables call the model."""
        return self.name or Path(self.model.rstrip("/")).name or self.model

    @property
    def file(self) -> Path:
        """Where the evaluation is written."""
        path = Path(self.output).expanduser()
        slug = re.sub(r"[^\w.-]+", "-", self.title.partition(":")[2] or self.title).strip("-").lower() or "model"
        return path if path.suffix == ".json" else path / f"{slug}.json"


@dataclass(frozen=True)
class NamedData:
    """One set as an option names it: group, name (None: the data's own) and where it comes from."""

    group: Group
    name: str | None
    data: str


def read_named(options: Sequence[str], flag: str) -> list[NamedData]:
    """The sets that `[GROUP:][NAME=]DATA` options name.

    Raises:
        DataError: Some have a group and others not, or one is empty.
    """
    found = []
    for option in options:
        match = _NAMED.fullmatch(option)
        if match is None:
            raise DataError(f"{flag} takes [near:|far:|apart:][NAME=]DATA, got {option!r}")
        group: Group = next((one for one in GROUPS if one == match["group"]), "ungrouped")
        found.append(NamedData(group, match["name"], match["data"]))
    groups = {one.group for one in found}
    if "ungrouped" in groups and len(groups) > 1:
        without = [one.data for one in found if one.group == "ungrouped"]
        raise DataError(
            f"{flag}: {', '.join(without)} have no group but others do; write near:, far: or apart: before each"
        )
    return found
