"""From the run folders of a zero-shot study to results, and from results to the same tables again."""

from pathlib import Path
from typing import Any

from hydra_ensembles.schema import to_plain

from ..claims import RESAMPLES
from ..collecting import settled
from .claims import zero_shot_claims
from .recipe import ZeroShotRecipe
from .results import StoredZeroShot, bring_together
from .rows import counted_tasks, zero_shot_rows
from .tables import TABLES


def collect_zero_shot(recipe: ZeroShotRecipe, output: Path, folder: Path) -> str:
    """Bring the seeds of a run folder together, make every table, write `NAME.json` and `NAME.npz`.

    Returns:
        The tables in Markdown.

    Raises:
        DataError: A seed is not finished.
    """
    study = bring_together(recipe, output)
    return settled(study, make_tables(study), folder, TABLES, store=True)


def rebuild_zero_shot(name: str, folder: Path, *, store: bool = False) -> str:
    """Make every number of a study again from its stored logits and hold it against the stored one.

    Args:
        name: Name of the study.
        folder: Folder of the results.
        store: Whether to store the numbers instead: after a change of metrics or tables.

    Returns:
        The tables in Markdown.

    Raises:
        DataError: Results are missing, or come out different.
    """
    study = StoredZeroShot.load(name, folder)
    return settled(study, make_tables(study), folder, TABLES, store=store)


def make_tables(study: StoredZeroShot) -> dict[str, Any]:
    """Rows, claims and the tasks that leave the means, as plain data."""
    rows = zero_shot_rows(study)
    counted = {task for tasks in counted_tasks(study, rows).values() for task in tasks}
    return {
        "rows": rows,
        "left_out": [task for task in study.tasks() if task not in counted],
        "claims": [to_plain(one) for one in zero_shot_claims(study, rows, RESAMPLES)],
    }
