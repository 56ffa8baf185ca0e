"""Write the tables of the documentation from the files under `results/`.

    python benchmarks/render_tables.py           # rewrite
    python benchmarks/render_tables.py --check   # fail when a document is not what the results say

A document marks the place with `<!-- table: NAME -->` and `<!-- end -->`; nothing else in it is touched.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proposition1_figure
import tower_scores_figure
from demo_table import demo_table
from study_tables import study_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def circuit_table(name: str) -> str:
    """Naive, exact and screened for each score."""
    data = json.loads((RESULTS / name).read_text())
    rows = data["results"]
    lines = [
        "| case | score | method | seconds | faster | model forwards | fewer | final S (%) |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        same = [one for one in rows if one["case"] == row["case"] and one["score"] == row["score"]]
        naive = next((one for one in same if one["method"] == "naive"), None)
        star = " (extrapolated)" if row["extrapolated"] else ""
        final = "" if row["final_score"] is None or row["extrapolated"] else f"{100 * row['final_score']:.2f}"
        faster, fewer = (
            "" if naive is None else f"{naive[key] / row[key]:.1f}x" for key in ("seconds", "model_forwards")
        )
        lines.append(
            f"| {row['case']} | {row['score']} | {row['method']}{star} | {row['seconds']:.1f} | {faster} "
            f"| {row['model_forwards']:,.0f} | {fewer} | {final} |"
        )
    first = rows[0]
    lines += [
        "",
        f"{data['hardware']}, torch {data['versions']['torch']}, {data['dtype']}, seed {data['seed']}; up to ",
    ]
    lines[-1] += (
        f"{max(row['id_samples'] for row in rows)} ID and {max(row['ood_samples'] for row in rows)} OOD samples, "
    )
    lines[-1] += f"{first['heads']} heads, budget {first['budget']}. From `results/{name}`."
    return "\n".join(lines)


def fusion_table(name: str) -> str:
    """Every way to fuse the same three members."""
    data = json.loads((RESULTS / name).read_text())
    lines = [
        "| method | MLP | norms | readout | accuracy | NLL | ECE | AUROC | parameters |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in data["rows"]:
        how = " | ".join(str(row.get(key, "")) for key in ("mlp", "norms", "readout"))
        lines.append(
            f"| {row['method']} | {how} | {100 * row['accuracy']:.1f} | {row['nll']:.4f} | {100 * row['ece']:.2f} "
            f"| {100 * row['auroc']:.2f} | {row['parameters'] / 1e6:.2f} M |"
        )
    lines += ["", f"{data['hardware']}, torch {data['torch']}, seed {data['seed']}; {data['holdout_id']} ID and "]
    lines[-1] += (
        f"{data['holdout_ood']} OOD images held out, {data['prune']} of 72 heads pruned. From `results/{name}`."
    )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "circuits": lambda: circuit_table("circuit_dinov2_cifar10.json"),
    "scaling": lambda: circuit_table("circuit_scaling.json"),
    "fusion": lambda: fusion_table("fusion_dinov2_cifar10.json"),
    "proposition1": proposition1_figure.table,
    "tower_scores": tower_scores_figure.table,
    "demo": lambda: demo_table(RESULTS / "demo.json"),
    **study_tables(RESULTS / "studies"),
}


def rendered(text: str) -> str:
    """A document with every marked table written anew."""

    def write(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options: Any = parser.parse_args()
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = rendered(before)
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not options.check:
                path.write_text(after)
    if options.check and stale:
        sys.exit(f"not what the results say: {', '.join(map(str, stale))}; run python benchmarks/render_tables.py")


if __name__ == "__main__":
    main()
