"""OOD AUROC against inference cost, one figure a study, from the files under `results/studies`.

python benchmarks/study_figures.py
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study_tables import FIGURES, task_of

from hydra_ensembles.studies.methods import DEEP, HYDRA, HYDRA_TRUNK, SINGLE
from hydra_ensembles.studies.recipe import STUDIES

RESULTS = Path(__file__).resolve().parents[1] / "results" / "studies"
MARKERS = {SINGLE: "s", DEEP: "D", HYDRA: "*", HYDRA_TRUNK: "P"}  # the four to look at; others are dots


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """One point a method: mean over seeds, a bar of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for index, (name, cost) in enumerate(facts["costs"]["costs"].items()):
        values = [100 * value for value in facts["rows"][name]["chosen.all.auroc"]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        place = (cost["latency_ratio"], statistics.mean(values))
        mark, size = MARKERS.get(name, "o"), 9 if name in MARKERS else 5
        axes.errorbar(*place, yerr=spread, fmt=mark, color=colours[index], markersize=size, capsize=2, label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_xlabel("latency of a batch, over that of one model")
    axes.set_ylabel("OOD AUROC (%), mean over sets, score chosen on half B")
    axes.set_title(f"{facts['study']}: {facts['costs']['device']}, {facts['costs']['dtype']}")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Draw what was measured."""
    for study in STUDIES:
        source = RESULTS / f"{study}.json"
        facts = json.loads(source.read_text()) if source.exists() else {"costs": None}
        if facts["costs"] is None:
            print(f"{source} has no costs yet")
            continue
        target = FIGURES / f"study_{task_of(study)}.svg"
        draw(facts, target)
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
