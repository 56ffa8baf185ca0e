"""The figure of all stored studies: what each method gains over Single in finding foreign inputs, against its price."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .all_tasks import TITLES
from .dual_findings import DualStudy
from .dual_recipe import ZERO_SHOT
from .findings import stored_studies
from .results import pyplot, save_figure
from .rows import DEEP, HYDRA, HYDRA_CIRC, HYDRA_TAYLOR, SINGLE, SOUP
from .stored import Study

MARKS = {  # of every row that is shown: how it looks
    "Laplace (last layer)": ("v", "tab:brown"),
    "LoRA-Ensemble": ("^", "tab:gray"),
    "Single, trained as long": ("P", "tab:olive"),
    "Single, D.2, nothing pruned": ("X", "tab:pink"),
    SOUP: ("s", "tab:orange"),
    DEEP: ("D", "tab:blue"),
    HYDRA: ("*", "tab:red"),
    HYDRA_TAYLOR: ("<", "tab:cyan"),
    HYDRA_CIRC: (">", "tab:purple"),
    "CircAvg": ("o", "tab:green"),
}
APART = 0.03  # of a price, between rows that cost the same


def figure(studies: Sequence[Study]) -> Any:
    """A field for each task: gain in AUROC by the largest probability, with its interval; empty marks: arithmetic."""
    size = {"figsize": (2.1 * len(studies) + 2.2, 3.2), "sharey": True, "squeeze": False}
    canvas, (fields,) = pyplot().subplots(1, len(studies), **size)
    for field, study in zip(fields, studies, strict=True):
        dual = isinstance(study, DualStudy)
        key = f"{study.detections[0]}.all.auroc" if isinstance(study, DualStudy) else "all.auroc"
        prices: list[float] = []
        for row in (row for row in MARKS if row in study.rows):
            gain, (price, measured) = study.difference(row, SINGLE, key), price_of(study, row)
            if gain is None or price is None:
                continue
            while any(abs(price - other) < APART * price for other in prices):
                price *= 1 + APART
            prices.append(price)
            mark, colour = MARKS[row]
            field.errorbar(
                price,
                100 * gain.value,
                yerr=100 * gain.half_width if gain.seeds > 1 else None,
                fmt=mark,
                color=colour,
                markersize=10 if row == HYDRA else 6,
                markerfacecolor=colour if measured else "white",
                elinewidth=0.8,
            )
        field.axhline(0, color="0.5", linewidth=1)
        field.set_xscale("log")
        field.set_xticks([1, 2, 3], ["1", "2", "3"])
        field.set_xticks([], minor=True)
        field.set_xlim(0.94 * min([0.9, *prices]), 3.8)
        field.grid(alpha=0.25)
        field.set_title("zero-shot" if dual else TITLES[study.name], fontsize=9)
    fields[0].set_ylabel("gain in OOD AUROC (points)")
    canvas.supxlabel("price of an answer over Single's", fontsize=9, y=-0.06)
    rows = [row for row in MARKS if any(row in study.rows for study in studies)]
    marks = [
        pyplot().Line2D([], [], marker=MARKS[row][0], color=MARKS[row][1], linestyle="", label=row) for row in rows
    ]
    fields[-1].legend(handles=marks, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    return canvas


def price_of(study: Study, row: str) -> tuple[float | None, bool]:
    """Time of a batch over Single's where it was measured, else multiply-adds over Single's; and which."""
    if cost := study.cost(row):
        return float(cost["latency_ratio"]), True
    work = study.work(row)
    return (None if work == "–" else float(work.removesuffix("x"))), False


def draw(results: Path, path: Path) -> Path:
    """Draw it from the studies of a folder of results that have Hydra, and know a price."""
    fused = [study for study in stored_studies(results) if HYDRA in study.rows]
    dual = [DualStudy(ZERO_SHOT, results)] if (results / ZERO_SHOT / "study.json").exists() else []
    priced = [study for study in (*fused, *dual) if any(price_of(study, row)[0] for row in study.rows)]
    return save_figure(figure(priced), path)
