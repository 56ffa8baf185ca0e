"""Files under `results/` and how documents show them: JSON, tables, CSV, figures, hardware and versions."""

import csv
import importlib.metadata
import io
import json
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles
from hydra_ensembles._utils import require
from hydra_ensembles.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
FIGURES = ROOT / "docs" / "figures"


def load(name: str) -> Any:
    """Read a JSON file under `results/`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def store(path: Path, content: Any) -> None:
    """Write a result file atomically; NaN and infinity are allowed."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def versions(*packages: str) -> dict[str, str]:
    """Versions of torch, of this library, and of the given packages that are installed."""
    installed = {"torch": str(torch.__version__), "hydra_ensembles": hydra_ensembles.__version__}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def hardware(device: str) -> str:
    """The name of the hardware that times are measured on."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """Format a number for documents: halves round up, and bits that depend on the order of summation are ignored."""
    exact = Decimal(repr(round(value, 9))).quantize(Decimal(10) ** -decimals, ROUND_HALF_UP)
    return f"{exact:{sign},}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "", align: str = "l") -> str:
    """A table with a note below; `align` has an `l` or `r` per column, and columns beyond it are right-aligned."""
    rule = "".join("|---" if side == "l" else "|---:" for side in align.ljust(len(header), "r"))
    lines = [f"| {' | '.join(header)} |", rule + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]
    return "\n".join([*lines, *(["", note] if note else [])])


def as_csv(text: str) -> list[str]:
    """Every Markdown table of a text as CSV; columns `bold` and `italics` name the cells that are, if any is."""
    files = []
    for table in re.findall(r"(?:^\|.*$\n?)+", text, re.MULTILINE):
        head, _, *rows = [line[2:-2].split(" | ") for line in table.splitlines()]
        lines = [[*head, "bold", "italics"]]
        for cells in rows:
            bold = [title for title, cell in zip(head, cells, strict=True) if "**" in cell]
            italics = [title for title, cell in zip(head, cells, strict=True) if "*" in cell.replace("**", "")]
            lines.append([*(cell.replace("*", "") for cell in cells), "; ".join(bold), "; ".join(italics)])
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(lines if "*" in table else [line[:-2] for line in lines])
        files.append(file.getvalue())
    return files


def pyplot() -> Any:
    """Return pyplot, configured so that figures are the same on every run."""
    matplotlib = require("matplotlib", extra="report")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "hydra_ensembles", "svg.fonttype": "none", "font.size": 9}
    settings["axes.titlesize"] = "medium"
    matplotlib.rcParams.update({**settings, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def save_figure(figure: Any, path: Path, source: str | None = None) -> Path:
    """Write a figure as SVG, optionally with its source in the metadata, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fit = None if figure.get_constrained_layout() else "tight"  # constrained layout already fits everything
    figure.savefig(path, metadata={"Date": None, "Source": source}, bbox_inches=fit, facecolor="white")
    pyplot().close(figure)
    return path
