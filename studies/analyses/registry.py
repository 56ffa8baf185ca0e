"""Every analysis by name: run on seeds, stored as `NAME-TASK.json`, and shown as a table and a figure."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.files import read_json, write_json

from ..dual_recipe import ZERO_SHOT, read_recipe
from ..results import ROOT, save_figure, versions
from ..samples import device_name
from ..seed import Seed
from ..task import recipe
from . import abstaining, chosen_heads, diversity, noise, pruned, rates, seeds, separation
from .analysis import Analysis, Result, marked

FIGURES = ROOT / "docs" / "figures" / "analyses"
FORMAT = "hydra_ensembles.analysis 1"
DEMO = "demo"  # the embedded model; its stored `noise` was made by an earlier version of the code
ANALYSES: Mapping[str, Analysis] = {
    "untrained": pruned.UNTRAINED,
    "noise": noise.ANALYSIS,
    "separation": separation.ANALYSIS,
    "overlap": chosen_heads.OVERLAP,
    "shares": pruned.SHARES,
    "diversity": diversity.DIFFERENCES,
    "members": diversity.MORE,
    "seeds": seeds.SEEDS,
    "towers": seeds.TOWERS,
    "stability": chosen_heads.STABILITY,
    "distance": pruned.DISTANCE,
    "rates": rates.ANALYSIS,
    "abstaining": abstaining.ANALYSIS,
}
"""In the order of the paper; the last four are not in it."""


def chosen(names: str) -> dict[str, Analysis]:
    """Analyses by their names, separated by commas."""
    chosen_names = names.split(",")
    unknown = [name for name in chosen_names if name not in ANALYSES]
    if unknown:
        raise ConfigError(f"there are no analyses {unknown}; choose from {', '.join(ANALYSES)}, separated by commas")
    return {name: ANALYSES[name] for name in chosen_names}


def with_analyses() -> dict[str, Any]:
    """The settings of the studies of classifiers, with those of the analyses."""
    return {**recipe(), "analyses": read_recipe("analyses")}


def analysed(name: str, seeds: Sequence[Seed]) -> dict[str, Any]:
    """Run an analysis on seeds of a task; results in the run folder with the same settings are reused."""
    analysis = ANALYSES[name]
    task = seeds[0].task
    if analysis.run is None or task.kind not in analysis.kinds:
        raise ConfigError(f"{name} does not run on {task.name}; it is for {_where(analysis)}")
    results = {str(seed.number): _of_seed(name, analysis, seed) for seed in seeds}
    made_with = [entry["versions"] for entry in results.values()]
    return {
        **_about(name, task.name),
        "versions": {package: _joined(one[package] for one in made_with) for package in made_with[0]},
        "share": task.share,
        "settings": task.settings["analyses"],
        "device": _joined(entry["device"] for entry in results.values()),
        "seconds": sum(entry["seconds"] for entry in results.values()),
        "seeds": {number: entry["found"] for number, entry in results.items()},
    }


def _of_seed(name: str, analysis: Analysis, seed: Seed) -> dict[str, Any]:
    """The result of a seed, with the device and the versions that it was made with."""
    made_with = {"versions": versions(), "device": device_name(seed.task.device)}
    path = seed.folder / "analyses" / f"{marked(seed.task, name)}.json"
    if not path.exists():
        assert analysis.run is not None
        start = time.monotonic()
        result = analysis.run(seed)
        seconds = time.monotonic() - start
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"found": result, "seconds": round(seconds, 1), **made_with})
        print(f"{seed.task.name} seed {seed.number}: {name} {seconds:.0f} s", flush=True)
    return {**made_with, **read_json(path)}  # older files lack both


def _joined(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


def read_stored(name: str, task: str, studies: Path) -> dict[str, Any]:
    """Run an analysis that reads the results of studies."""
    analysis = ANALYSES[name]
    if analysis.read is None:
        raise ConfigError(f"{name} does not read stored studies; it runs on {_where(analysis)}")
    if (analysis is seeds.TOWERS) != (task == ZERO_SHOT):
        fitting = f"`--task {ZERO_SHOT}`" if analysis is seeds.TOWERS else "a study of classifiers"
        raise ConfigError(f"{name} needs {fitting}, got the task {task!r}")
    return {**_about(name, task), "seconds": 0.0, **analysis.read(studies, task)}


def _about(name: str, task: str) -> dict[str, Any]:
    settings_of_task: Any = recipe()["tasks"].get(task, {})
    facts = {"format": FORMAT, "analysis": name, "task": task, "stands_for": settings_of_task.get("paper", "")}
    return {**facts, "versions": versions()}


def _where(analysis: Analysis) -> str:
    if analysis.run is None:
        return "the results of studies"
    return f"tasks of {' and '.join(f'{kind}s' for kind in analysis.kinds)}"


# --- files, tables, figures ------------------------------------------------------------------------------------------


def store(result: Result, results: Path) -> Path:
    """Write the result of an analysis."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{result['analysis']}-{result['task']}.json"
    write_json(path, dict(result))
    return path


def load(name: str, task: str, results: Path) -> dict[str, Any]:
    """Read the result of an analysis."""
    path = results / f"{name}-{task}.json"
    if not path.exists():
        raise DataError(f"{path} does not exist; {command(name, task)} makes it")
    return read_json(path)


def command(name: str, task: str) -> str:
    """The command that runs an analysis."""
    return f"`python -m studies analyse {name} --task {task}`"


def draw(result: Result, folder: Path = FIGURES) -> Path:
    """Write the figure of a stored result as SVG, with the hash of the result inside."""
    name, task = result["analysis"], result["task"]
    return save_figure(ANALYSES[name].figure(result), folder / f"{name}-{task}.svg", digest(result))


def digest(result: Result) -> str:
    """A hash of an analysis's result."""
    return f"sha256 {hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()}"


def stored(results: Path) -> list[dict[str, Any]]:
    """All stored results of analyses."""
    return [read_json(path) for path in sorted(results.glob("*-*.json"))]


def undrawn(results: Path, figures: Path = FIGURES) -> list[dict[str, Any]]:
    """Stored results without a figure, or with one drawn from other numbers."""

    def drawn(result: Result) -> bool:
        path = figures / f"{result['analysis']}-{result['task']}.svg"
        return path.exists() and digest(result) in path.read_text(encoding="utf-8")

    return [result for result in stored(results) if not drawn(result)]


def blocks(results: Path) -> dict[str, str]:
    """Blocks of the documents by `analysis_NAME_TASK`, for every analysis and task; without results, how to run it."""
    by_name = {}
    for name, analysis in ANALYSES.items():
        for task in (*recipe()["tasks"], DEMO, ZERO_SHOT):
            key = f"analysis_{name}_{task}"
            if not (results / f"{name}-{task}.json").exists():
                by_name[key] = f"No results yet; {command(name, task)} makes them."
                continue
            table = analysis.table(load(name, task, results))
            figure = f"![{analysis.title}](figures/analyses/{name}-{task}.svg)"
            by_name[key] = f"{figure}\n\n{table}\n\nFrom `results/analyses/{name}-{task}.json`."
    return by_name
