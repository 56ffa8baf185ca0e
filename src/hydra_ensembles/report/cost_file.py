"""Costs as a JSON file, beside the evaluations they belong to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .._utils import write_atomically
from ..errors import DataError
from ..model.cost import Cost
from ..schema import from_plain, to_plain

FORMAT = "hydra_ensembles.costs"


@dataclass(frozen=True)
class _Costs:
    costs: tuple[Cost, ...]


def save_costs(path: str | Path, costs: Iterable[Cost]) -> None:
    """Write the rows of `measure_costs` as JSON."""
    plain = {"format": FORMAT, **to_plain(_Costs(tuple(costs)))}
    write_atomically(Path(path), json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False).encode())


def load_costs(path: str | Path) -> tuple[Cost, ...]:
    """Read what `save_costs` wrote.

    Raises:
        DataError: The file is missing or holds something else.
        ConfigError: A field does not hold what it should.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a table of costs: {error}") from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise DataError(f'{path} is not a table of costs: it lacks "format": "{FORMAT}"')
    return from_plain(_Costs, {key: value for key, value in data.items() if key != "format"}, str(path)).costs
