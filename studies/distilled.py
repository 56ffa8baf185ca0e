"""Tables of distilled Hydras: every setting on held-out rows, and the best at each price on the test set.

Quality is that of the study `vision-cifar100-distilled`; prices are times of ViT-B/16, the shape that users have, on a
GPU in bfloat16 at batch 128, relative to the user's own model compiled and recorded (`benchmarks/inference.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles.files import read_json

from .classifiers import recipe
from .engine import slug
from .methods import DEEP, DISTILLED, HYDRA, LOOKED_FOR, SOUP
from .rows import SINGLE, Rows
from .tables import Cells, Study, read_csv, write_csv

LAYERS, HEADS, PRICED_HEADS = 12, 6, 12  # of the study's model, and heads of the one that is timed
KEYS = ("accuracy", "calibrated.nll", "aurc", "near.auroc", "far.auroc")
NEAR_ENOUGH = 0.002  # of the Deep Ensemble's negative log-likelihood
PLACE = {"shape": "vit-b16", "dtype": "bfloat16", "mode": "graphed", "batch": "128"}
FIXED = {SINGLE: ("ours", 1), SOUP: ("ours", 1), DEEP: ("deep-stacked", 3)}

Prices = Mapping[tuple[str, int], float]


def write_distilled(run: Path, results: Path) -> list[Path]:
    """Write both tables from the folder of a run; prices are those in the results' `tables/inference.csv`."""
    folder = results / "tables" if (results / "tables").is_dir() else results
    stored = folder / "inference.csv"
    rows = [row for row in read_csv(stored) if PLACE.items() <= row.items()] if stored.exists() else []
    prices = {(row["contender"], int(row["members"])): float(row["ratio_to_single"]) for row in rows}
    about = [f"torch {torch.__version__}", next((row["hardware"] for row in rows), "")]
    return [
        write_csv(folder / "distill_settings.csv", settings_lines(run, prices, about)),
        write_csv(folder / "distill.csv", results_lines(run, prices, about)),
    ]


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


def settings_lines(run: Path, prices: Prices, about: list[str]) -> Iterator[Cells]:
    """A line for every setting of seed 0, on half B, and for what it is compared with."""
    names = ("method", "members", "trunk", "mlp", "lost", "epochs", "rows")
    yield *names, "price", *KEYS[:3], "held_out_auroc", "taken", "seed", "torch", "hardware"
    for row in (*LOOKED_FOR[::-1], DISTILLED):
        path = run / "choices" / f"{slug(row)}.json"
        chosen = read_json(path) if path.exists() else {"measured": []}
        for one in chosen["measured"]:
            setting = one["setting"]
            method = setting.get("method", DISTILLED)
            whole = whole_setting(setting)
            shown: Cells = [whole["members"], round(LAYERS * whole["trunk"]), whole["mlp"], whole.get("lost", 0)]
            shown = [*shown, whole["epochs"], whole["rows"]] if method == DISTILLED else ["", "", "", "", "", ""]
            taken = "taken" if method == DISTILLED and setting == chosen["setting"] else ""
            numbers = [one[key] for key in (*KEYS[:3], "far.auroc")]
            yield method, *shown, prices.get(contender(method, setting), ""), *numbers, taken, chosen["seed"], *about


def results_lines(run: Path, prices: Prices, about: list[str]) -> Iterator[Cells]:
    """A line for every method: means over seeds, paired differences to the Deep Ensemble, and if that is enough."""
    study = Study(Rows.read(run / "rows.parquet"))
    columns = [(key, f"{key} to deep", f"{key} half_width") for key in KEYS]
    yield "method", "setting", "seeds", "price", *sum(columns, ()), "enough", "test_rows", "torch", "hardware"
    for method in study.methods:
        path = run / "choices" / f"{slug(method)}.json"
        setting = read_json(path)["setting"] if path.exists() else {}
        price = prices.get(contender(method, setting))
        gaps = {key: study.difference(method, DEEP, key) for key in KEYS}
        cells: list[Any] = []
        for key, gap in gaps.items():
            cells += [study.mean(method, key), *(("", "") if gap is None else (gap.value, gap.half_width))]
        nll, level = gaps["calibrated.nll"], [gaps[key] for key in ("accuracy", "aurc")]
        enough = ""
        if price is not None and nll is not None and method not in (DEEP, SINGLE):
            inside = all(gap is not None and abs(gap.value) <= gap.half_width for gap in level)
            enough = "yes" if price <= 1 and nll.value <= NEAR_ENOUGH and inside else "no"
        lines = len(study.rows.places[f"{study.alone}|{study.alone}"])
        about_setting = setting if method not in (SINGLE, SOUP, DEEP, HYDRA) else ""
        yield method, about_setting, len(study.seeds(method)), price, *cells, enough, lines, *about
