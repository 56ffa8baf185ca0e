"""Tables and figures of docs/performance.md and docs/tables_performance.md, from the rows that `inference.py` measured.

python benchmarks/inference_report.py       # the figures; `tables.py` writes the tables
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import common  # noqa: F401 (finds `studies`)
from inference_models import LABELS, MEMBERS, METHODS

from studies.results import FIGURES, RESULTS, load, markdown, pyplot, save_figure

ORDER = list(LABELS)
CLIP, CLIP_CPU = "clip-b32", "clip-b32-100"  # fewer class names on a CPU, where embedding them takes minutes
GPU_TARGETS = {
    ("hydra-k0", 1): 1.2,
    ("hydra-k0", 4): 1.6,
    ("hydra-k0", 128): 2.5,
    ("hydra-k8", 4): 1.25,
    ("hydra-k8", 128): 1.5,
    ("hydra-k10", 128): 1.2,
}
CPU_TARGETS = {("hydra-k0", 8): 0.9, ("hydra-k8", 8): 0.55}
PAPER = ("single", "deep-in-turn", "hydra-k0", "hydra-k8")  # contenders of the paper's figure, and one with a trunk
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

Row = SimpleNamespace  # of `inference.py`, see there
Rows = Sequence[Row]


# --- selecting rows --------------------------------------------------------------------------------------------------


def measured(name: str = "inference.json") -> list[Row]:
    """All rows whose contenders still exist."""
    rows = [row for row in load(name)["rows"] if row["contender"] in LABELS]
    return [Row(**row, label=LABELS[row["contender"]], position=ORDER.index(row["contender"])) for row in rows]


def chosen(rows: Rows, gpu: bool = True, usual: bool = True, **fields: Any) -> list[Row]:
    """Rows with these values; the usual ones have three members, or the fixed number of their contender."""
    return [
        row
        for row in rows
        if row.hardware.startswith("CPU") != gpu
        and (not usual or row.members == MEMBERS.get(row.contender, 3))
        and all(getattr(row, name) == value for name, value in fields.items())
    ]


def vit(rows: Rows, usual: bool = True, **fields: Any) -> list[Row]:
    """Rows of the main grid."""
    return chosen(rows, usual=usual, shape="vit-b16", dtype="bfloat16", **fields)


def others(rows: Rows, mode: str) -> list[Row]:
    """Rows of other shapes and dtypes than the main grid's; zero-shot classifiers have their own table."""
    apart = [row for row in chosen(rows, mode=mode) if (row.shape, row.dtype) != ("vit-b16", "bfloat16")]
    return [row for row in apart if row.shape != CLIP]


# --- tables ----------------------------------------------------------------------------------------------------------


def by_contender(rows: Rows) -> list[list[Row]]:
    """The rows of each contender."""
    groups = [[row for row in rows if row.contender == name] for name in ORDER]
    return [group for group in groups if group]


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def targets_table(rows: Rows) -> str:
    """Each target with the measured value."""
    lines = []
    gpu = vit(rows, mode="graphed")
    cpu = chosen(rows, gpu=False, shape="vit-s16", dtype="float32", mode="eager")
    for on_gpu, targets, group in ((True, GPU_TARGETS, gpu), (False, CPU_TARGETS, cpu)):
        for (contender, batch), target in targets.items():
            for row in group:
                ratio = row.ratio_to_single if on_gpu else row.ratio_to_deep
                if (row.contender, row.batch) == (contender, batch) and ratio is not None:
                    limit = row.limit / (1 if on_gpu else row.members)
                    met = "yes" if ratio <= target else "no"
                    numbers = (f"{target:g}", f"{ratio:.2f}", f"{limit:.2f}", times(row.ratio_to_ours))
                    lines.append((row.hardware, row.label, batch, *numbers, met))
    header = ("where", "contender", "batch", "target", "measured", "arithmetic alone", "to our single", "met")
    return markdown(header, lines, align="llrrrrrl")


def grid(rows: Rows, column: Callable[[Row], Any], heading: Callable[[Any], str], more: str = "") -> str:
    """Latency and ratio: a line for each contender, a column for each value of `column`.

    `more` adds the limit by arithmetic alone: once (`"limit"`), or next to each cell, with the parameters (`"limits"`).
    """
    columns = sorted({column(row) for row in rows})
    lines = []
    for group in by_contender(rows):
        by_column = {column(row): row for row in group}
        cells = [[f"{row.latency_ms:.3g} ms ({times(row.ratio_to_single)})", times(row.limit)] if row else ["", ""]
                 for row in map(by_column.get, columns)]  # fmt: skip
        if more == "limits":
            lines.append([group[0].label, f"{group[0].parameters / 1e6:.1f} M", *chain(*cells)])
        else:
            lines.append([group[0].label, *(cell[0] for cell in cells), *([times(group[0].limit)] if more else [])])
    headings = [heading(value) for value in columns]
    if more == "limits":
        headings = ["parameters", *chain(*((title, "arithmetic alone") for title in headings))]
    elif more:
        headings.append("arithmetic alone")
    return markdown(["contender", *headings], lines, source(rows))


def details_table(rows: Rows) -> str:
    """Everything about each contender at each batch size."""
    header = ("batch", "contender", "plan", "latency", "inputs/s", "50,000 inputs", "to single", "to our single",
              "to pruned", "to the limit", "parameters", "peak memory")  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda row: (row.batch, row.position)):
        speed = (f"{row.latency_ms:.3g} ms", f"{row.inputs_per_second:,.0f}", f"{row.test_set_s:.1f} s")
        ratios = map(times, (row.ratio_to_single, row.ratio_to_ours, row.ratio_to_pruned, row.ratio_to_limit))
        sizes = (f"{row.parameters / 1e6:.1f} M", f"{(row.peak_memory_bytes or 0) / 1e6:,.0f} MB")
        lines.append((row.batch, row.label, row.plan, *speed, *ratios, *sizes))
    return markdown(header, lines, source(rows), "rll")


def cpu_table(rows: Rows) -> str:
    """Times on a CPU, compared with three models in turn."""
    header = ("hardware", "batch", "contender", "latency", "to three in turn", "arithmetic alone", "to single",
              "weights", "peak memory")  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda row: (row.hardware, row.batch, row.position)):
        ratios = map(times, (row.ratio_to_deep, row.limit / 3, row.ratio_to_single))
        sizes = (f"{size / 1e6:.0f} MB" for size in (row.weight_bytes, row.peak_memory_bytes or 0))
        lines.append((row.hardware, row.batch, row.label, f"{row.latency_ms:,.0f} ms", *ratios, *sizes))
    return markdown(header, lines, source(rows), "lrl")


def methods_table(counts: Rows, rows: Rows) -> str:
    """Every baseline, a single model and Hydra Ensembles: stored parameters and work, and times if measured."""
    batches = sorted({row.batch for row in rows})
    lines = []
    for count in counts:
        timed = {row.batch: row for row in rows if row.contender == count.contender}
        waits = [times(timed[batch].ratio_to_single) if batch in timed else "–" for batch in batches]
        waits += [f"{timed[batch].peak_memory_bytes / 1e9:.2f} GB" if batch in timed else "–" for batch in batches[-1:]]
        label, needs = METHODS[count.contender]
        lines.append((label, f"{count.parameters / 1e6:.1f} M", times(count.limit), *waits, needs))
    measured = [f"time, batch {batch}" for batch in batches] + [f"peak memory, batch {size}" for size in batches[-1:]]
    header = ["method", "parameters", "work", *measured, "what it needs"]
    about = (
        source(rows, "inference_methods.json")
        if rows
        else "Counted, nothing is timed. From `results/inference_counts.json`."
    )
    return markdown(header, lines, about, "l" + "r" * (len(header) - 2) + "l")


def growth(rows: Rows) -> dict[tuple[int, str], list[Row]]:
    """Rows by contender and batch size, in order of their number of members, if there are three or more."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.batch, row.position, row.members)):
        groups.setdefault((row.batch, row.contender), []).append(row)
    return {key: group for key, group in groups.items() if len(group) > 2}


def members_table(rows: Rows) -> str:
    """The ratio to the user's model by number of members, and the cost per member."""
    counts = sorted({row.members for row in rows})
    lines = []
    for (batch, _), group in growth(rows).items():
        ratios = {row.members: times(row.ratio_to_single) for row in group}
        intercept, slope = fitted_line(group)
        fitted = f"{intercept:.2f} + {slope:.2f} M"
        lines.append((batch, group[0].label, *(ratios.get(count, "") for count in counts), fitted))
    header = ["batch", "contender", *(f"M = {count}" for count in counts), "fitted"]
    return markdown(header, lines, source(rows), "rl")


def fitted_line(rows: Rows) -> tuple[float, float]:
    """Intercept and slope of the ratio against the number of members, by least squares."""
    fitted = statistics.linear_regression([row.members for row in rows], [row.ratio_to_single for row in rows])
    return fitted.intercept, fitted.slope


def source(rows: Rows, file: str = "inference.json") -> str:
    """Hardware, versions and file of the numbers."""
    machines, torches = sorted({row.hardware for row in rows}), sorted({row.settings["torch"] for row in rows})
    repeats, seeds = sorted(row.repeats for row in rows), sorted({row.seed for row in rows})
    return (
        f"{', '.join(machines)}; torch {', '.join(torches)}; medians of {repeats[0]} to {repeats[-1]} rounds, "
        f"taken in turn with the user's own model; seed {', '.join(map(str, seeds))}. From `results/{file}`."
    )


FIGURE_OF = {
    "batches": "![Cost against batch size; dotted, what arithmetic alone would give](figures/inference_batches.svg)",
    "details": "![Time of a batch of 4, parameters and multiply-adds](figures/inference_cost.svg)",
    "members": "![Cost against the number of members](figures/inference_members.svg)",
}


def trunks_table(rows: Rows) -> str:
    """Multiply-adds of ViT-B/16 with three members that keep 8 of 12 heads above a trunk: counted, and as measured."""
    tokens, width, layers, members, kept = 197, 768, 12, 3, 8 / 12
    mlp = 8 * tokens * width**2
    layer, pruned = (mlp + share * (4 * tokens * width**2 + 2 * tokens**2 * width) for share in (1, kept))
    around = (tokens - 1) * width**2 + 1000 * width  # patches, and the classifier
    single = around + layers * layer
    lines = []
    for trunk in (0, 4, 6, 8, 10):
        (limit,) = {row.limit for row in vit(rows) if row.contender == f"hydra-k{trunk}"}
        work = around + trunk * layer + members * (layers - trunk) * pruned
        lines.append([str(trunk), f"{work / 1e9:.1f} G", f"{work / single:.2f}x", f"{limit:.2f}x"])
    return markdown(["trunk", "MAdds", "work", "arithmetic alone"], lines, align="r")


def tables() -> dict[str, str]:
    """The blocks of these pages by name."""
    rows = measured()
    main = vit(rows, mode="graphed")
    clip = chosen(rows, shape=CLIP, dtype="bfloat16", mode="graphed-eager")
    few = [row for row in vit(rows) if row.batch in (4, 128)]

    def of_batch(rows: Rows, more: str) -> str:
        return grid(rows, lambda row: row.batch, lambda batch: f"batch {batch}", more)

    def of_shape(rows: Rows) -> str:
        return grid(rows, lambda row: (row.shape, row.dtype, row.batch), lambda key: "{}, {}, batch {}".format(*key))

    blocks = {
        "targets": targets_table(rows),
        "trunks": trunks_table(rows),
        "batches": of_batch(main, "limit"),
        "details": details_table([row for row in few if row.mode == "graphed"]),
        "modes": grid(few, lambda row: (row.batch, row.mode), lambda key: f"batch {key[0]}, {key[1]}"),
        "members": members_table(vit(rows, usual=False, mode="graphed-eager")),
        "others_graphed": of_shape(others(rows, "graphed")),
        "others": of_shape(others(rows, "graphed-eager")),
        "zero_shot": of_batch(clip, "limits"),  # text towers cost relatively less at larger batches
        "zero_shot_cpu": of_batch(chosen(rows, gpu=False, shape=CLIP_CPU, mode="eager"), "limits"),
        "cpu": cpu_table(chosen(rows, gpu=False, shape="vit-s16", mode="eager")),
    }
    timed = (RESULTS / "inference_methods.json").exists()
    blocks["methods"] = methods_table(
        [Row(**row) for row in load("inference_counts.json")["rows"]],
        chosen(measured("inference_methods.json"), mode="graphed-eager") if timed else [],
    )
    for name, figure in FIGURE_OF.items():
        blocks[name] += f"\n\n{figure}"
    return {f"inference_{name}": block for name, block in blocks.items()}


# --- figures ---------------------------------------------------------------------------------------------------------


def cost_figure(rows: Rows, batch: int = 4) -> Any:
    """Time per batch in two types, parameters, multiply-adds: single model, Deep Ensemble, Hydra."""
    batch_rows = chosen(rows, shape="vit-b16", mode="graphed", batch=batch)
    figure, (speed, parameters, operations) = pyplot().subplots(1, 3, figsize=(9.5, 3))
    dtypes = ("bfloat16", "float32")
    for index, name in enumerate(PAPER):
        group = [row for row in batch_rows if row.contender == name]
        for row in group:
            x = dtypes.index(row.dtype) + (index - 1.5) * 0.2
            bar = speed.bar(x, row.latency_ms, 0.19, color=COLOURS[name])
            speed.bar_label(bar, [times(row.ratio_to_single)], fontsize=7)
        parameters.bar(index, group[0].parameters / 1e6, color=COLOURS[name], label=LABELS[name])
        operations.bar(index, group[0].multiply_adds / 1e9, color=COLOURS[name])
    speed.set_xticks(range(len(dtypes)), dtypes)
    speed.set_ylabel(f"time of a batch of {batch}, ms")
    parameters.set(ylabel="parameters, millions", xticks=[])
    operations.set(ylabel="multiply-adds of one input, billions", xticks=[])
    figure.legend(*parameters.get_legend_handles_labels(), loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.1))
    figure.tight_layout()
    return figure


def batches_figure(rows: Rows) -> Any:
    """Cost against batch size, with the ratio that arithmetic alone would give as a dotted line."""
    graphed = vit(rows, mode="graphed")
    figure, axes = pyplot().subplots(figsize=(6, 3.6))
    for name, colour in COLOURS.items():
        group = sorted((row for row in graphed if row.contender == name), key=lambda row: row.batch)
        x, y = [row.batch for row in group], [row.ratio_to_single for row in group]
        axes.plot(x, y, marker="o", markersize=3, color=colour, label=LABELS[name])
        axes.axhline(group[0].limit, color=colour, linestyle=":", linewidth=0.8)
    batches = sorted({row.batch for row in graphed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="batch size", ylabel="time, of the user's own model", ylim=(0, None))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def members_figure(rows: Rows) -> Any:
    """Cost against the number of members, with a straight line fitted to each."""
    grown = growth(vit(rows, usual=False, mode="graphed-eager"))
    groups = {key: group for key, group in grown.items() if key[1] in COLOURS}
    batches = sorted({batch for batch, _ in groups})
    figure, panels = pyplot().subplots(1, len(batches), figsize=(4.5 * len(batches), 3.4), squeeze=False)
    for (batch, name), group in groups.items():
        axes = panels[0][batches.index(batch)]
        colour = COLOURS[name]
        intercept, slope = fitted_line(group)
        members = [row.members for row in group]
        axes.plot(members, [row.ratio_to_single for row in group], "o", markersize=4, color=colour)
        text = f"{LABELS[name]}: {intercept:.2f} + {slope:.2f} M"
        ends = (min(members), max(members))
        axes.plot(ends, [intercept + slope * end for end in ends], color=colour, linewidth=1, label=text)
    for batch, axes in zip(batches, panels[0], strict=True):
        axes.set(title=f"batch {batch}", xlabel="members M", ylabel="time, of the user's own model", ylim=(0, None))
        axes.legend(fontsize=7)
    figure.tight_layout()
    return figure


def main() -> None:
    rows = measured()
    for name, draw in {"cost": cost_figure, "batches": batches_figure, "members": members_figure}.items():
        print(f"wrote {save_figure(draw(rows), FIGURES / f'inference_{name}.svg')}")


if __name__ == "__main__":
    main()
