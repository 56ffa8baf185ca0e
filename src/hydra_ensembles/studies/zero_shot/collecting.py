"""From the run folders of a zero-shot study to results, and from results to the same tables again."""

from pathlib import Path
from typing import Any

from ...errors import DataError
from ...schema import to_plain
from ..claims import RESAMPLES
from ..results import SAME, save
from ..rows import largest_difference
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
    made = make_tables(study)
    save(study, made, folder)
    return written({**study.facts, **made})


def rebuild_zero_shot(name: str, folder: Path) -> str:
    """Make every number of a study again from its stored logits and hold it against the stored one.

    Returns:
        The tables in Markdown.

    Raises:
        DataError: Results are missing, or come out different.
    """
    study = StoredZeroShot.load(name, folder)
    made = make_tables(study)
    gap = largest_difference(made["rows"], study.facts["rows"])
    verdicts = [[one["verdict"] for one in claims] for claims in (made["claims"], study.facts["claims"])]
    if gap > SAME or verdicts[0] != verdicts[1] or made["left_out"] != study.facts["left_out"]:
        raise DataError(
            f"the tables of {name} come out different from its stored logits (by up to {gap:.2g}); the files in "
            f"{folder} do not belong together, or the metrics changed: run `--collect` again"
        )
    return written({**study.facts, **made})


def make_tables(study: StoredZeroShot) -> dict[str, Any]:
    """Rows, claims and the tasks that leave the means, as plain data."""
    rows = zero_shot_rows(study)
    counted = {task for tasks in counted_tasks(study, rows).values() for task in tasks}
    return {
        "rows": rows,
        "left_out": [task for task in study.tasks() if task not in counted],
        "claims": [to_plain(one) for one in zero_shot_claims(study, rows, RESAMPLES)],
    }


def written(facts: dict[str, Any]) -> str:
    """All tables of a study, one below the other."""
    return "\n\n".join(f"### {facts['study']}: {name}\n\n{table(facts)}" for name, table in TABLES.items())
