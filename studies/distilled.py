"""Distilled Hydras: settings on held-out rows, the best at each price on the test set, and every stored study of one.

    python -m studies distilled --data shared      # with a GPU: runs the study, then the tables
    python benchmarks/inference.py --batches 128 --contenders top-k9 top-k10 top-k10-mean top-k10-lost4
    python benchmarks/inference.py --batches 128 --contenders top-k10-mean-lost4
    python benchmarks/inference.py --batches 128 --contenders top-k11 --members 3 5 8

`make` runs the study `vision-cifar100-distilled` in phases of several processes, which fill a GPU: what it needs of
other seeds is finished before. Its prices are times of ViT-B/16, the shape that users have, on a GPU in bfloat16 at
batch 128, relative to the user's own model compiled and recorded (`benchmarks/inference.py`).
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json

from .classifiers import recipe
from .engine import slug
from .methods import DEEP, DISTILLED, HYDRA, LOOKED_FOR, SOUP
from .promise import Stored
from .rows import SINGLE, Rows
from .tables import Cells, Study, read_csv, write_csv

TASK, SEEDS = "vision-cifar100-distilled", range(5)
LAYERS, HEADS, PRICED_HEADS = 12, 6, 12  # of the study's model, and heads of the one that is timed
KEYS = ("accuracy", "calibrated.nll", "aurc", "near.auroc", "far.auroc")
NEAR_ENOUGH = 0.002  # of the Deep Ensemble's negative log-likelihood
PLACE = {"shape": "vit-b16", "dtype": "bfloat16", "mode": "graphed", "batch": "128"}
FIXED = {SINGLE: ("ours", 1), SOUP: ("ours", 1), DEEP: ("deep-stacked", 3)}

Prices = Mapping[tuple[str, int], float]
Part = tuple[Sequence[str], Sequence[int], str]  # methods, seeds and stages of a process


def phases(seeds: Sequence[int] = SEEDS) -> list[list[Part]]:
    """What runs at once: all fine-tunings; then settings are chosen on the first seed; then the best two."""
    theirs, best = (SINGLE, SOUP, HYDRA, DEEP), (DISTILLED, *LOOKED_FOR[:2])
    return [
        [(theirs, [seed], "report") for seed in seeds],
        [(LOOKED_FOR, seeds[:1], "choose"), *(((DISTILLED,), [seed], "report") for seed in seeds[1:])],
        [(best, [seed], "report") for seed in seeds],
        [((*theirs, *best), seeds[:1], "cost,tables")],
    ]


def make(data: Path, output: Path) -> Path:
    """Run the study, phase by phase; a stopped run resumes. Returns its folder."""
    for phase in phases():
        options = ["--data", str(data), "--output", str(output)]
        commands = [["--methods", ";".join(part[0]), "--seeds", ",".join(map(str, part[1]))] for part in phase]
        running = [
            subprocess.Popen([sys.executable, "-m", "studies", "run", TASK, *options, *command, "--stages", part[2]])
            for command, part in zip(commands, phase, strict=True)
        ]
        codes = [one.wait() for one in running]
        if any(codes):
            raise DataError("a process of the study failed, see above; the same command goes on from there")
    return output / TASK


def write_distilled(results: Path, run: Path | None = None) -> list[Path]:
    """Write the table of stored studies with a distilled Hydra; of a run that of its settings, and its lines."""
    folder = results / "tables"
    stored = folder / "inference.csv"
    rows = [row for row in read_csv(stored) if PLACE.items() <= row.items()] if stored.exists() else []
    prices = {(row["contender"], int(row["members"])): float(row["ratio_to_single"]) for row in rows}
    paths, lines = list[Path](), list[Cells]()
    for path in sorted((results / "rows").glob("*.parquet")):
        kept = Rows.read(path)
        if DISTILLED in kept.runs and path.stem != TASK:
            lines += results_lines(Study(kept), Stored.read(results, path.stem).prices)
    if run is not None:
        path = folder / "distill_settings.csv"
        paths.append(write_csv(path, settings_lines(run, prices)))
        chosen = {method: chosen_of(run, method) for method in LOOKED_FOR}
        study = Study(Rows.read(run / "rows.parquet"))
        timed = {one: prices.get(contender(one, chosen.get(one, {}))) for one in study.methods}
        lines += results_lines(study, {one: price for one, price in timed.items() if price is not None}, chosen)
    head = ["task", "method", "setting", "seeds", "price"]
    head += [name for key in KEYS for name in (key, f"{key} to deep", f"{key} half_width")]
    return [*paths, write_csv(folder / "distill.csv", [[*head, "enough", "test_rows"], *lines])]


def chosen_of(run: Path, method: str) -> dict[str, Any]:
    """The setting that a run chose for a method; empty if there was nothing to choose."""
    path = run / "choices" / f"{slug(method)}.json"
    return dict(read_json(path)["setting"]) if path.exists() else {}


def whole_setting(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A setting with what it leaves to the defaults."""
    plain = recipe()
    return {"members": plain["members"], "rows": "augmented", **plain["hydra"], **plain["distilled"], **setting}


def contender(method: str, setting: Mapping[str, Any]) -> tuple[str, int]:
    """What a model is called in the benchmark, and its members; pruned ones lose the same share of heads there."""
    if method in FIXED:
        return FIXED[method]
    whole = whole_setting(setting)
    lost = round(whole.get("lost", 0) * PRICED_HEADS / HEADS)
    parts = [f"top-k{round(whole['trunk'] * LAYERS)}", *(["mean"] if whole["mlp"] == "mean" else [])]
    return "-".join([*parts, *([f"lost{lost}"] if lost else [])]), whole["members"]


def settings_lines(run: Path, prices: Prices) -> Iterator[Cells]:
    """A line for every setting of the first seed, on half B, and for what it is compared with."""
    names = ("members", "trunk", "mlp", "lost", "epochs", "rows")
    yield "method", *names, "price", *KEYS[:3], "held_out_auroc", "taken", "seed", "torch"
    for row in reversed(LOOKED_FOR):
        path = run / "choices" / f"{slug(row)}.json"
        chosen = read_json(path) if path.exists() else {"measured": []}
        for one in chosen["measured"]:
            setting = one["setting"]
            method, whole = setting.get("method", DISTILLED), whole_setting(setting)
            shown: Cells = [""] * len(names)
            if method == DISTILLED:
                shown = [whole["members"], round(LAYERS * whole["trunk"]), whole["mlp"], whole.get("lost", 0)]
                shown = [*shown, whole["epochs"], whole["rows"]]
            taken = "taken" if method == DISTILLED and setting == chosen["setting"] else ""
            numbers = [one[key] for key in (*KEYS[:3], "far.auroc")]
            price = prices.get(contender(method, setting), "")
            yield method, *shown, price, *numbers, taken, chosen["seed"], torch.__version__


def results_lines(
    study: Study, prices: Mapping[str, float], chosen: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Cells]:
    """A line for every method: means over seeds, paired differences to the Deep Ensemble, and if that is enough."""
    for method in (one for one in study.methods if one in (SINGLE, SOUP, HYDRA, DEEP) or one.startswith(DISTILLED)):
        price, gaps = prices.get(method), {key: study.difference(method, DEEP, key) for key in KEYS}
        cells: list[Any] = []
        for key, gap in gaps.items():
            cells += [study.mean(method, key), *(("", "") if gap is None else (gap.value, gap.half_width))]
        nll, level, enough = gaps["calibrated.nll"], [gaps[key] for key in ("accuracy", "aurc")], ""
        if price is not None and nll is not None and method not in (DEEP, SINGLE):
            inside = all(gap is not None and abs(gap.value) <= gap.half_width for gap in level)
            enough = "yes" if price <= 1 and nll.value <= NEAR_ENOUGH and inside else "no"
        rows = len(study.rows.places[f"{study.alone}|{study.alone}"])
        setting = (chosen or {}).get(method, "")
        yield study.name, method, setting, len(study.seeds(method)), price, *cells, enough, rows
