"""Tables of `docs/performance.md`, from the rows that `inference.py` measured."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from contenders import LABELS, NAMES, ONE_MEMBER
from inference_rows import Row

ORDER = [
    "single",
    "ours",
    "pruned",
    "mc-dropout",
    "deep-in-turn",
    "deep-vmap",
    "deep-stacked",
    *sorted((name for name in NAMES if name.startswith("hydra-k")), key=lambda name: int(name[7:])),
    "hydra-uneven",
    "hydra-int8",
    "hydra-joint",
    "single-texts",
    "hydra-texts",
]

ZERO_SHOT = "clip-b32"
ZERO_SHOT_CPU = "clip-b32-100"  # fewer class names: their embeddings take a CPU minutes, images do not see them


@dataclass(frozen=True)
class Target:
    """A cell that has to stay below a ratio."""

    contender: str
    batch: int
    ratio: float


GPU_TARGETS = (
    Target("hydra-k0", 1, 1.2),
    Target("hydra-k0", 4, 1.6),
    Target("hydra-k0", 128, 2.5),
    Target("hydra-k8", 4, 1.25),
    Target("hydra-k8", 128, 1.5),
    Target("hydra-k10", 128, 1.2),
)
CPU_TARGETS = (Target("hydra-k0", 8, 0.9), Target("hydra-k8", 8, 0.55))


def chosen(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def gpu_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows measured on a GPU."""
    return [row for row in rows if not row.hardware.startswith("CPU")]


def cpu_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows measured on a CPU."""
    return [row for row in rows if row.hardware.startswith("CPU")]


def label(row: Row) -> str:
    """What a contender is called in a document."""
    name, _, plan = row.contender.partition("@")
    return f"{LABELS[name]}, {plan}" if plan else LABELS[name]


def targets_table(rows: Sequence[Row]) -> str:
    """Each target beside what was measured."""
    lines = ["| where | contender | batch | target | measured | arithmetic alone | to our single | met |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---|")
    gpu = chosen(gpu_rows(rows), shape="vit-b16", dtype="bfloat16", mode="graphed", members=3)
    cpu = chosen(cpu_rows(rows), shape="vit-s16", dtype="float32", mode="eager", members=3)
    for where, targets, found in (("GPU", GPU_TARGETS, gpu), ("CPU", CPU_TARGETS, cpu)):
        for target in targets:
            for row in chosen(found, contender=target.contender, batch=target.batch):
                ratio = row.ratio_to_single if where == "GPU" else row.ratio_to_deep
                if ratio is None:
                    continue
                limit = row.limit if where == "GPU" else row.limit / row.members
                lines.append(
                    f"| {row.hardware} | {label(row)} | {row.batch} | {target.ratio:g} | {ratio:.2f} | {limit:.2f} "
                    f"| {_ratio(row.ratio_to_ours)} | {'yes' if ratio <= target.ratio else 'no'} |"
                )
    return "\n".join(lines) if len(lines) > 2 else ""


def batches_table(rows: Sequence[Row]) -> str:
    """Latency and ratio by batch size, for every contender."""
    batches = sorted({row.batch for row in rows})
    if not batches:
        return ""
    lines = ["| contender | " + " | ".join(f"batch {batch}" for batch in batches) + " | arithmetic alone |"]
    lines.append("|---|" + "---:|" * (len(batches) + 1))
    for name in _names(rows):
        mine = {row.batch: row for row in chosen(rows, contender=name)}
        first = next(iter(mine.values()))
        cells = [
            f"{mine[batch].latency_ms:.3g} ms ({_times(mine[batch])})" if batch in mine else "" for batch in batches
        ]
        lines.append(f"| {label(first)} | " + " | ".join(cells) + f" | {first.limit:.2f}x |")
    return "\n".join([*lines, "", source(rows)])


def details_table(rows: Sequence[Row]) -> str:
    """Everything about each contender at each batch size."""
    if not rows:
        return ""
    lines = [
        "| batch | contender | plan | latency | inputs/s | 50,000 inputs | to single | to our single | to pruned "
        "| to the limit | parameters | peak memory |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for batch in sorted({row.batch for row in rows}):
        for name in _names(rows):
            for row in chosen(rows, batch=batch, contender=name):
                peak = "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:,.0f} MB"
                lines.append(
                    f"| {row.batch} | {label(row)} | {row.plan} | {row.latency_ms:.3g} ms "
                    f"| {row.inputs_per_second:,.0f} | {row.test_set_s:.1f} s | {_times(row)} "
                    f"| {_ratio(row.ratio_to_ours)} | {_ratio(row.ratio_to_pruned)} | {row.ratio_to_limit:.2f}x "
                    f"| {row.parameters / 1e6:.1f} M | {peak} |"
                )
    return "\n".join([*lines, "", source(rows)])


def modes_table(rows: Sequence[Row]) -> str:
    """The ratio to the user's model in each mode, a column for mode and batch size."""
    columns = sorted({(row.batch, row.mode) for row in rows})
    if not columns:
        return ""
    lines = ["| contender | " + " | ".join(f"batch {batch}, {mode}" for batch, mode in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for name in _names(rows):
        mine = {(row.batch, row.mode): row for row in chosen(rows, contender=name)}
        first = next(iter(mine.values()))
        cells = [f"{mine[one].latency_ms:.3g} ms ({_times(mine[one])})" if one in mine else "" for one in columns]
        lines.append(f"| {label(first)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source(rows)])


def others_table(rows: Sequence[Row]) -> str:
    """Other shapes and types, a column for each."""
    columns = sorted({(row.shape, row.dtype, row.batch) for row in rows})
    if not columns:
        return ""
    heads = [f"{shape}, {dtype}, batch {batch}" for shape, dtype, batch in columns]
    lines = ["| contender | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(columns)]
    for name in _names(rows):
        mine = {(row.shape, row.dtype, row.batch): row for row in chosen(rows, contender=name)}
        first = next(iter(mine.values()))
        cells = [f"{mine[one].latency_ms:.3g} ms ({_times(mine[one])})" if one in mine else "" for one in columns]
        lines.append(f"| {label(first)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source(rows)])


def cpu_table(rows: Sequence[Row]) -> str:
    """Times on a CPU, beside three models in turn."""
    if not rows:
        return ""
    lines = [
        "| hardware | batch | contender | latency | to three in turn | arithmetic alone | to single | weights "
        "| peak memory |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row.hardware, row.batch, _place(row.contender))):
        lines.append(
            f"| {row.hardware} | {row.batch} | {label(row)} | {row.latency_ms:,.0f} ms | {_ratio(row.ratio_to_deep)} "
            f"| {row.limit / 3:.2f}x | {_times(row)} | {row.weight_bytes / 1e6:.0f} MB "
            f"| {(row.peak_memory_bytes or 0) / 1e6:.0f} MB |"
        )
    return "\n".join([*lines, "", source(rows)])


def zero_shot_table(rows: Sequence[Row]) -> str:
    """CLIP as a classifier: latency, ratio and arithmetic by batch size; text towers cost the less the larger it is."""
    batches = sorted({row.batch for row in rows})
    if not batches:
        return ""
    heads = [f"batch {batch} | arithmetic alone" for batch in batches]
    lines = ["| contender | parameters | " + " | ".join(heads) + " |", "|---|---:|" + "---:|---:|" * len(batches)]
    for name in _names(rows):
        mine = {row.batch: row for row in chosen(rows, contender=name)}
        first = next(iter(mine.values()))
        cells = [
            f"{mine[batch].latency_ms:.3g} ms ({_times(mine[batch])}) | {mine[batch].limit:.2f}x"
            if batch in mine
            else " | "
            for batch in batches
        ]
        lines.append(f"| {label(first)} | {first.parameters / 1e6:.1f} M | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source(rows)])


def members_table(rows: Sequence[Row]) -> str:
    """The ratio to the user's model by number of members, and what each member adds."""
    counts = sorted({row.members for row in rows})
    lines = ["| batch | contender | " + " | ".join(f"M = {count}" for count in counts) + " | fitted |"]
    lines.append("|---:|---|" + "---:|" * (len(counts) + 1))
    for batch in sorted({row.batch for row in rows}):
        for name in _names(chosen(rows, batch=batch)):
            mine = {row.members: row for row in chosen(rows, batch=batch, contender=name)}
            if len(mine) < 3:
                continue
            intercept, slope = fitted_line(list(mine), [row.ratio_to_single for row in mine.values()])
            cells = [_times(mine[count]) if count in mine else "" for count in counts]
            first = next(iter(mine.values()))
            lines.append(f"| {batch} | {label(first)} | " + " | ".join(cells) + f" | {intercept:.2f} + {slope:.2f} M |")
    return "\n".join([*lines, "", source(rows)]) if len(lines) > 2 else ""


def fitted_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line that fits best by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def source(rows: Sequence[Row]) -> str:
    """Where numbers come from."""
    machines = sorted({row.hardware for row in rows})
    torches = sorted({row.settings.get("torch", "?") for row in rows})
    repeats = sorted(row.repeats for row in rows)
    seeds = sorted({row.seed for row in rows})
    return (
        f"{', '.join(machines)}; torch {', '.join(torches)}; medians of {repeats[0]} to {repeats[-1]} rounds, "
        f"taken in turn with the user's own model; seed {', '.join(map(str, seeds))}. From `results/inference.json`."
    )


def _names(rows: Sequence[Row]) -> list[str]:
    return sorted({row.contender for row in rows}, key=_place)


def _place(contender: str) -> tuple[int, str]:
    return ORDER.index(contender.partition("@")[0]), contender


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _times(row: Row) -> str:
    return f"{row.ratio_to_single:.2f}x"


def _vit(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return chosen(gpu_rows(rows), shape="vit-b16", dtype="bfloat16", **wanted)


def usual(rows: Sequence[Row]) -> list[Row]:
    """Rows with three members, or the one that a single model has, run by the plan that was chosen for them."""
    return [row for row in rows if row.members == (1 if row.contender in ONE_MEMBER else 3)]


def _others(rows: Sequence[Row], mode: str) -> list[Row]:
    """Rows of other shapes and types than the main grid's; zero-shot classifiers have a table of their own."""
    apart = [row for row in usual(gpu_rows(rows)) if (row.shape, row.dtype) != ("vit-b16", "bfloat16")]
    return [row for row in apart if row.mode == mode and row.shape != ZERO_SHOT]


TABLES: dict[str, tuple[Callable[[Sequence[Row]], str], str]] = {
    "targets": (targets_table, "--modes graphed --batches 1 4 128"),
    "batches": (
        lambda rows: batches_table(usual(_vit(rows, mode="graphed"))),
        "--modes graphed --batches 1 4 32 128 512",
    ),
    "details": (
        lambda rows: details_table([row for row in usual(_vit(rows, mode="graphed")) if row.batch in (4, 128)]),
        "--modes graphed --batches 4 128",
    ),
    "modes": (
        lambda rows: modes_table([row for row in usual(_vit(rows)) if row.batch in (4, 128)]),
        "--modes graphed compiled graphed-eager eager --batches 4 128",
    ),
    "members": (
        lambda rows: members_table(_vit(rows, mode="graphed-eager")),
        "--members 1 2 3 5 8 --modes graphed-eager --batches 4 128",
    ),
    "others_graphed": (
        lambda rows: others_table(_others(rows, "graphed")),
        "--shape bert-base --modes graphed --batches 4 128",
    ),
    "others": (
        lambda rows: others_table(_others(rows, "graphed-eager")),
        "--shape bert-base --modes graphed-eager --batches 4 128",
    ),
    "zero_shot": (
        lambda rows: zero_shot_table(
            chosen(usual(gpu_rows(rows)), shape=ZERO_SHOT, dtype="bfloat16", mode="graphed-eager")
        ),
        "--shape clip-b32 --modes graphed-eager --batches 4 128",
    ),
    "zero_shot_cpu": (
        lambda rows: zero_shot_table(chosen(usual(cpu_rows(rows)), shape=ZERO_SHOT_CPU, mode="eager")),
        "--shape clip-b32-100 --dtype float32 --modes eager --batches 8 --device cpu --threads 2 "
        "--contenders single ours hydra-joint deep-in-turn",
    ),
    "cpu": (
        lambda rows: cpu_table(chosen(usual(cpu_rows(rows)), shape="vit-s16", mode="eager")),
        "--shape vit-s16 --dtype float32 --modes eager --batches 8 --device cpu --threads 2",
    ),
}


FIGURES = {
    "batches": ("inference_batches.svg", "Cost against batch size; dotted, what arithmetic alone would give"),
    "details": ("inference_cost.svg", "Time of a batch of 4, parameters and multiply-adds"),
    "members": ("inference_members.svg", "Cost against the number of members"),
}


def rendered(text: str, rows: Sequence[Row], figures: Collection[str] = ()) -> str:
    """A document with every block `<!-- inference: NAME -->` … `<!-- end -->` written anew.

    Args:
        text: The document.
        rows: What was measured.
        figures: Names of the figures there are, in a folder beside the document; a block shows the one it has.
    """

    def write(match: re.Match[str]) -> str:
        make, command = TABLES[match[1]]
        made = make(rows) or f"Not measured yet: run `python benchmarks/inference.py {command}`."
        file, title = FIGURES.get(match[1], ("", ""))
        drawing = f"\n\n![{title}](figures/{file})" if file in figures else ""
        return f"<!-- inference: {match[1]} -->\n{made}{drawing}\n<!-- end -->"

    return re.sub(r"<!-- inference: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)
