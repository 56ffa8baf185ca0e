"""Tables of finding foreign inputs: AUROC, FPR95 and AUPR at OOD sets by themselves and in means, the paper's below."""

from collections.abc import Sequence

from .cells import MARKED, level, with_paper
from .measures import FEWEST
from .paper import LIKE, STANDS_FOR
from .results import markdown
from .stored import Study

METRICS = ("auroc", "fpr95", "aupr")
TITLE = "AUROC ↑ / FPR95 ↓ / AUPR ↑"


def metrics(scopes: Sequence[str]) -> list[list[str]]:
    """The three metrics of scopes such as `near` or `ood.mnist`, each a cell."""
    return [[f"{scope}.{metric}" for metric in METRICS] for scope in scopes]


def detection_table(study: Study) -> str:
    """Tables 15 to 17: near, far and all OOD sets."""
    groups = [*study.facts["groups"], "all"]
    small = small_sets(study)
    left_out = f" FPR95 leaves out {', '.join(small)}: under 1,000 samples." if small else ""
    return markdown(
        ["row", *groups], with_paper(study, metrics(groups)), f"Means over OOD sets: {_note(study)}{left_out}"
    )


def sets_table(study: Study) -> str:
    """Tables 18 to 23: every OOD set by itself."""
    groups = study.facts["groups"]
    sizes = set_sizes(study)
    heads = [f"{name} ({group}, {sizes[name]:,})" for group, names in groups.items() for name in names]
    lines = with_paper(study, metrics([f"ood.{name}" for name in study.outside]))
    like = [f"{LIKE[name]} for {name}" for name in study.outside if name in LIKE] if study.paper() else []
    stand_ins = f" The paper's are of {', '.join(like)}." if like else ""
    note = (
        f"{_note(study)}{stand_ins} In brackets samples of a set, which AUPR hangs on, beside "
        f"{sizes[study.facts['inside']]:,} of the task; FPR95 of sets of 1,000 or more."
    )
    return markdown(["row", *heads], lines, note)


def _note(study: Study) -> str:
    """What the numbers are, and whose stand below them."""
    paper = study.paper()
    inside = study.facts["inside"]
    missing = [row for row in paper if row not in study.rows]
    below = f" Below, in brackets, the paper's on {STANDS_FOR[inside]} and its sets." if paper else ""
    below += f" Rows of the paper that are not here: {', '.join(missing)}." if missing else ""
    return (
        f"{TITLE} by the largest probability, in per cent. {level(study, study.rows)}. {MARKED}; FPR95 and AUPR have "
        f"no interval.{below}"
    )


def set_sizes(study: Study) -> dict[str, int]:
    """Samples of the test set and of every OOD set."""
    columns = study.columns(study.rows[0], study.seeds(study.rows[0])[0])
    return {name: len(columns[f"{name}|msp"]) for name in (study.facts["inside"], *study.outside)}


def small_sets(study: Study) -> list[str]:
    """OOD sets too small for an FPR95."""
    sizes = set_sizes(study)
    return [name for name in study.outside if sizes[name] < FEWEST]
