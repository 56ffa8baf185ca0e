"""Finding the evaluations and costs that a command was pointed at."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..evaluation.evaluation import FORMAT as EVALUATION
from ..evaluation.evaluation import Evaluation
from ..model.cost import Cost
from ..report.compare import FORMAT as COSTS
from ..report.compare import load_costs


@dataclass(frozen=True)
class SavedRuns:
    """What was found: evaluations in the order given, files of a folder by name; and costs."""

    evaluations: tuple[Evaluation, ...]
    costs: tuple[Cost, ...]


def find_runs(paths: Sequence[Path]) -> SavedRuns:
    """Read evaluations and costs from JSON files and folders of them; other JSON files in a folder are passed over.

    Raises:
        DataError: A path does not exist, is something else, or no evaluation is found.
    """
    evaluations: list[Evaluation] = []
    costs: list[Cost] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; give saved evaluations (.json) or folders that hold them")
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        for file in files:
            kind = _format_of(file)
            if kind == EVALUATION:
                evaluations.append(Evaluation.load(file))
            elif kind == COSTS:
                costs += load_costs(file)
            elif not path.is_dir():
                raise DataError(f"{file} is neither a saved evaluation nor a table of costs")
    if not evaluations:
        raise DataError(
            f"no saved evaluation found in {', '.join(str(path) for path in paths)}; hydra-ensembles evaluate MODEL "
            "writes one, into evaluations/ if no other folder is named"
        )
    return SavedRuns(tuple(evaluations), tuple(costs))


def _format_of(file: Path) -> str | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); it may have been cut off") from error
    found = data.get("format") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None
