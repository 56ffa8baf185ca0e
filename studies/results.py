"""Files under `results/`, and what documents show of them: JSON, tables, figures, and what they were made with."""

import importlib.metadata
import json
import platform
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
    """A file under `results/`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def store(path: Path, content: Any) -> None:
    """Write a result file in one step; it may have numbers that are none."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def versions(*packages: str) -> dict[str, str]:
    """Versions of torch, of this library, and of others that are installed."""
    installed = {"torch": str(torch.__version__), "hydra_ensembles": hydra_ensembles.__version__}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def hardware(device: str) -> str:
    """What times are taken on."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """A number as documents write it: halves go up, and the last bits, which the order of sums decides, have no say."""
    exact = Decimal(repr(round(value, 9))).quantize(Decimal(10) ** -decimals, ROUND_HALF_UP)
    return f"{exact:{sign},}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "", align: str = "l") -> str:
    """A table, and a note below; `align` has an `l` or an `r` for each column, those it does not name are numbers."""
    rule = "".join("|---" if side == "l" else "|---:" for side in align.ljust(len(header), "r"))
    lines = [f"| {' | '.join(header)} |", rule + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]
    return "\n".join([*lines, *(["", note] if note else [])])


def pyplot() -> Any:
    """matplotlib, set up for drawings that are the same on every run."""
    matplotlib = require("matplotlib", extra="report")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "hydra_ensembles", "svg.fonttype": "none", "font.size": 9}
    settings["axes.titlesize"] = "medium"
    matplotlib.rcParams.update({**settings, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def save_figure(figure: Any, path: Path, source: str | None = None) -> Path:
    """Write a drawing as SVG, which may say what it was drawn from, and let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fit = None if figure.get_constrained_layout() else "tight"  # that layout has put all of it inside
    figure.savefig(path, metadata={"Date": None, "Source": source}, bbox_inches=fit, facecolor="white")
    pyplot().close(figure)
    return path
