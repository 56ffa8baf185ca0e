"""Format numbers in tables of studies: digits, significance, and the seeds of a mean."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .measures import Difference
from .results import fixed
from .stored import Study
from .storing import SINGLE

LOWER = ("nll", "brier", "ece", "aurc", "fpr95")  # metrics where lower is better
PLAIN = ("nll", "brier")  # not shown in per cent
BEYOND = "(95 % intervals over seeds and test samples, paired; from three seeds on)"
MARKED = f"**Better** or *worse* than Single where significant {BEYOND}"
PAPER = "(paper)"  # in brackets, like the paper's numbers: italics mean worse
ACROSS = "†"  # marks comparisons across two runs
ACROSS_TOLD = (
    f"{ACROSS} Rows of two runs: shown is what each gains over the Single of its own run; it is called significant, or "
    "judged, only where the rows as they are agree."
)


def printed(value: float | None, key: str, sign: str = "") -> str:
    """Format a number for a table."""
    if value is None:
        return "–"
    return fixed(value, 3, sign) if key.rpartition(".")[2] in PLAIN else fixed(100 * value, 2, sign)


def gap_text(gap: Difference, key: str) -> str:
    """A difference with half its interval."""
    return f"{printed(gap.value, key, '+')} ± {printed(gap.half_width, key)}"


def marked(study: Study, row: str, key: str) -> str:
    """A mean; bold if significantly better than Single's, in italics if significantly worse."""
    text = printed(study.mean(row, key), key)
    return text if row == SINGLE else judged_text(text, study.difference(row, SINGLE, key), key)


def judged_text(text: str, gap: Difference | None, key: str) -> str:
    """The text, bold if the difference is significantly better, in italics if worse; plain if it rounds to zero."""
    if gap is None or not gap.certain or not float(printed(gap.value, key)):
        return text
    better = (gap.value < 0) == (key.rpartition(".")[2] in LOWER)
    return f"**{text}**" if better else f"*{text}*"


def gains(study: Study, row: str, keys: Sequence[str]) -> str:
    """What a row gains over Single in a study, by metric."""
    gaps = [(study.difference(row, SINGLE, key), key) for key in keys]
    texts = [judged_text(printed(gap.value, key, "+"), gap, key) for gap, key in gaps if gap is not None]
    return " / ".join(texts) or "–"


def with_paper(
    study: Study, columns: Sequence[Sequence[str]], more: Callable[[str], list[str]] = lambda _: []
) -> list[list[str]]:
    """Table lines: one per row, ending with the cells of `more`, then the paper's; a cell may show several keys."""
    lines = []
    paper = study.paper()
    for row in study.rows:
        numbers, end = paper.get(row, {}), more(row)
        theirs = [" / ".join(printed(numbers.get(key), key) for key in keys) for keys in columns]
        known = [f"({text})" if keys[0] in numbers else "" for text, keys in zip(theirs, columns, strict=True)]
        lines.append([row, *(" / ".join(marked(study, row, key) for key in keys) for keys in columns), *end])
        lines += [[PAPER, *known, *[""] * len(end)]] if any(known) else []
    return lines


def later_runs(study: Study) -> str:
    """A note for studies that several runs made."""
    return " Rows that a later run added are compared with the Single of that run." if study.in_parts else ""


def level(study: Study, rows: Sequence[str]) -> str:
    """A note on how many seeds each row has, and how means over different seeds are made comparable."""
    counts = {row: len(study.seeds(row)) for row in rows if row in study.rows}
    usual = max(sorted(set(counts.values())), key=list(counts.values()).count)
    others: dict[int, list[str]] = {}
    for row, count in counts.items():
        if count != usual:
            others.setdefault(count, []).append(row)
    few = "".join(f"; {count} of {', '.join(names)}" for count, names in others.items())
    if not others and not study.in_parts:
        return f"Means over {usual} seeds" if usual > 1 else "One seed: nothing is known of how seeds differ"
    return (
        f"Means over seeds ({usual} a row{few}): Single's mean, and what a row gains over the Single of its own seeds "
        "and run ([why](evidence.md#how-to-read-the-tables))"
    )


def memory(cost: Mapping[str, Any]) -> str:
    """Peak memory in MiB."""
    peak = cost.get("peak_memory_bytes")
    return f"{peak / 2**20:.0f} MiB" if peak else "–"


def ratio(cost: Mapping[str, Any]) -> str:
    """Batch time relative to Single's."""
    return f"{cost['latency_ratio']:.2f}x" if cost else "–"


def measured_on(costs: Mapping[str, Any]) -> str:
    """Batch size, dtype and device of the measured costs."""
    return f"a batch of {costs['batch']}, {costs['dtype']}, {costs['device']}"
