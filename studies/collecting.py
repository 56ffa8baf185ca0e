"""From run folders to results, and from results to the same tables again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra_ensembles.errors import DataError
from hydra_ensembles.schema import to_plain

from .claims import Replicates, study_claims
from .contrasts import contrasts
from .recipe import load_recipe
from .results import StoredStudy, bring_together
from .rows import largest_difference, study_rows
from .stored_results import StoredResults
from .tables import CONTRASTS, TABLES

SAME = 1e-5  # numbers made again may differ by the rounding of another machine

Tables = Mapping[str, Callable[[Mapping[str, Any]], str]]


def collect(name: str, output: Path, folder: Path, *, tiny: bool = False) -> str:
    """Bring the seeds of a run folder together, make every table, write `NAME.json` and `NAME.npz`.

    Returns:
        The tables in Markdown.

    Raises:
        DataError: A seed is not finished.
    """
    study = bring_together(load_recipe(name, tiny), output)
    return settled(study, make_tables(study), folder, TABLES, store=True)


def rebuild(name: str, folder: Path, *, store: bool = False) -> str:
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
    study = StoredStudy.load(name, folder)
    return settled(study, make_tables(study), folder, TABLES, store=store)


def make_tables(study: StoredStudy) -> dict[str, Any]:
    """Rows, claims and contrasts as plain data."""
    replicates = Replicates(study)
    controls = tuple(one["name"] for one in study.facts["recipe"].get("controls", ()))
    claims = [to_plain(one) for one in study_claims(study, replicates)]
    return {"rows": study_rows(study), "claims": claims, CONTRASTS: contrasts(replicates, controls)}


def settled(study: StoredResults, made: Mapping[str, Any], folder: Path, tables: Tables, *, store: bool) -> str:
    """The tables in Markdown, once their numbers are stored, or are those that are stored."""
    if store:
        study.save(made, folder)
    else:
        require_same(study, made, folder)
    return written({**study.facts, **made}, tables)


def require_same(study: StoredResults, made: Mapping[str, Any], folder: Path) -> None:
    """Hold tables that were made again against the stored ones.

    Raises:
        DataError: Rows, verdicts or anything else in them differ.
    """
    numbers = [key for key in ("rows", CONTRASTS) if key in made]
    gap = max(largest_difference(made[key], study.facts.get(key, {})) for key in numbers)
    verdicts = [[one["verdict"] for one in claims] for claims in (made["claims"], study.facts["claims"])]
    others = [key for key in made if key not in ("claims", *numbers)]
    if gap > SAME or verdicts[0] != verdicts[1] or any(made[key] != study.facts[key] for key in others):
        raise DataError(
            f"the tables of {study.name} come out different from its stored logits (by up to {gap:.2g}); the files in "
            f"{folder} do not belong together, or the metrics changed: `--collect --from-results` stores them anew"
        )


def written(facts: Mapping[str, Any], tables: Tables) -> str:
    """All tables of a study, one below the other."""
    return "\n\n".join(f"### {facts['study']}: {name}\n\n{table(facts)}" for name, table in tables.items())
