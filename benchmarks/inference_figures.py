"""Figures and tables of what inference costs, from the rows that `inference.py` measured.

python benchmarks/inference_figures.py                      # figures into docs/figures
python benchmarks/inference_figures.py --tables             # and the tables of docs/performance.md
python benchmarks/inference_figures.py --tables --check     # fail when the document is not what the results say
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import LABELS
from inference_rows import Results, Row
from inference_tables import chosen, fitted_line, gpu_rows, rendered, usual

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "single": "#4d4d4d",
    "ours": "#8c8c8c",
    "deep-in-turn": "#b2182b",
    "deep-stacked": "#ef8a62",
    "hydra-k0": "#2166ac",
    "hydra-k8": "#4393c3",
    "hydra-k10": "#92c5de",
    "hydra-uneven": "#35978f",
}
PAPER = ("single", "deep-in-turn", "hydra-k0", "hydra-k8")  # what the paper's figure compares, and the trunk


def plotting() -> Any:
    """matplotlib, set up for drawings that are the same on every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "inference", "svg.fonttype": "none", "font.size": 9})
    return pyplot


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print(f"wrote {path}")


def cost_figure(rows: Sequence[Row], path: Path, batch: int = 4) -> bool:
    """Time per batch in two types, parameters, multiply-adds: single model, Deep Ensemble, Hydra."""
    rows = chosen(usual(gpu_rows(rows)), shape="vit-b16", mode="graphed", batch=batch)
    names = [name for name in PAPER if chosen(rows, contender=name)]
    if len(names) < 2:
        return False
    pyplot = plotting()
    figure, (times, parameters, operations) = pyplot.subplots(1, 3, figsize=(9.5, 3))
    dtypes = [dtype for dtype in ("bfloat16", "float32") if chosen(rows, dtype=dtype)]
    for index, name in enumerate(names):
        for place, dtype in enumerate(dtypes):
            for row in chosen(rows, contender=name, dtype=dtype):
                x = place + (index - (len(names) - 1) / 2) * 0.8 / len(names)
                bar = times.bar(x, row.latency_ms, 0.75 / len(names), color=COLOURS[name])
                times.bar_label(bar, [f"{row.ratio_to_single:.2f}x"], fontsize=7)
        first = chosen(rows, contender=name)[0]
        parameters.bar(index, first.parameters / 1e6, color=COLOURS[name], label=LABELS[name])
        operations.bar(index, first.multiply_adds / 1e9, color=COLOURS[name])
    times.set_xticks(range(len(dtypes)), dtypes)
    times.set_ylabel(f"time of a batch of {batch}, ms")
    parameters.set_ylabel("parameters, millions")
    operations.set_ylabel("multiply-adds of one input, billions")
    for axes in (parameters, operations):
        axes.set_xticks([])
    for axes in (times, parameters, operations):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*parameters.get_legend_handles_labels(), loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.1))
    figure.tight_layout()
    save(figure, path)
    return True


def batches_figure(rows: Sequence[Row], path: Path) -> bool:
    """Cost against batch size, with the ratio that arithmetic alone would give as a dashed line."""
    rows = chosen(usual(gpu_rows(rows)), shape="vit-b16", dtype="bfloat16", mode="graphed")
    if len({row.batch for row in rows}) < 3:
        return False
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for name, colour in COLOURS.items():
        mine = sorted(chosen(rows, contender=name), key=lambda row: row.batch)
        if mine:
            axes.plot(
                [row.batch for row in mine],
                [row.ratio_to_single for row in mine],
                marker="o",
                markersize=3,
                color=colour,
                label=LABELS[name],
            )
            axes.axhline(mine[0].limit, color=colour, linestyle=":", linewidth=0.8)
    batches = sorted({row.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("time, of the user's own model")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
    return True


def members_figure(rows: Sequence[Row], path: Path) -> bool:
    """Cost against the number of members, with a straight line fitted to each."""
    rows = chosen(gpu_rows(rows), shape="vit-b16", dtype="bfloat16", mode="graphed-eager")
    groups = [group for group in _growth(rows).items() if len(group[1]) >= 3]
    if not groups:
        return False
    pyplot = plotting()
    batches = sorted({batch for (_, batch), _ in groups})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(4.5 * len(batches), 3.4), squeeze=False)
    for (name, batch), group in groups:
        axes = panels[0][batches.index(batch)]
        members, ratios = [row.members for row in group], [row.ratio_to_single for row in group]
        intercept, slope = fitted_line(members, ratios)
        text = f"{LABELS[name]}: {intercept:.2f} + {slope:.2f} M"
        axes.plot(members, ratios, "o", markersize=4, color=COLOURS[name])
        ends = [min(members), max(members)]
        axes.plot(ends, [intercept + slope * end for end in ends], color=COLOURS[name], linewidth=1, label=text)
    for batch, axes in zip(batches, panels[0], strict=True):
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("members M")
        axes.set_ylabel("time, of the user's own model")
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7)
    figure.tight_layout()
    save(figure, path)
    return True


def _growth(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows of one contender at one batch size, by number of members."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.members):
        if row.contender in COLOURS and row.contender not in ("single", "ours"):
            groups.setdefault((row.contender, row.batch), []).append(row)
    return groups


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=ROOT / "results" / "inference.json")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--tables", action="store_true", help="rewrite the marked blocks of the document")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where the tables are not up to date")
    options = parser.parse_args(arguments)
    rows = list(Results(options.input).rows.values())
    if not options.check:
        drawn = [
            cost_figure(rows, options.figures / "inference_cost.svg"),
            batches_figure(rows, options.figures / "inference_batches.svg"),
            members_figure(rows, options.figures / "inference_members.svg"),
        ]
        print(f"{sum(drawn)} of {len(drawn)} figures drawn; the others need rows that are not there yet")
    if options.tables or options.check:
        before = options.document.read_text()
        after = rendered(before, rows, {path.name for path in options.figures.glob("*.svg")})
        if options.check and after != before:
            sys.exit(f"{options.document} is not what the results say; run benchmarks/inference_figures.py --tables")
        options.document.write_text(after)


if __name__ == "__main__":
    main()
