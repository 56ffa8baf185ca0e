"""The demo from start to end: build a Hydra Ensemble from the embedded backbone, compare it, write everything down."""

import time
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.evaluation import Evaluation
from ..model.cost import Cost
from ..report.compare import Comparison, save_costs
from ..report.html import write_report
from ..schema import to_plain
from .embedded import load_backbone, load_sample
from .folder import DemoFolder, write_json
from .methods import HYDRA_CIRC, SINGLE, Announce, DemoData, Methods
from .results import results, table
from .settings import DemoSettings


@dataclass(frozen=True)
class DemoResult:
    """What a demo found, and where it wrote it.

    Attributes:
        comparison: The table.
        evaluations: Of each method.
        costs: Parameters and time of each method.
        output: The folder.
        report: The HTML report.
        model: The fused ensemble, for `Ensemble.from_pretrained`.
        results: Every number, as JSON.
    """

    comparison: Comparison
    evaluations: dict[str, Evaluation]
    costs: tuple[Cost, ...]
    output: Path
    report: Path
    model: Path
    results: Path


def run_demo(
    output: str | Path = "hydra-demo",
    settings: DemoSettings | None = None,
    *,
    progress: bool = True,
    announce: Announce | None = None,
) -> DemoResult:
    """Make a Hydra Ensemble out of the embedded backbone and hold it against five other methods. No network.

    Interrupted, it goes on where it stopped when it is called again with the same settings. Called again after it
    has finished, it does everything anew, with the same numbers.

    Args:
        output: Folder for the report, the fused model, the evaluations and all numbers.
        settings: How to run it.
        progress: Whether to show progress bars.
        announce: Called with a line at the start of each step.

    Raises:
        CheckpointError: The folder holds something else.
    """
    settings = settings or DemoSettings()
    say = announce or (lambda line: None)
    builds = {"circuit": settings.circuit_build, "taylor": settings.taylor_build}
    folder = DemoFolder(output, {"settings": to_plain(settings), "builds": to_plain(builds)})
    started = time.perf_counter()
    backbone = load_backbone()
    data = DemoData.prepare(load_sample(), backbone, settings)
    methods = Methods(backbone, data, settings, folder.work, progress, say)
    rows = methods.rows()
    costs = methods.costs(rows)
    evaluations = {name: row.evaluation for name, row in rows.items()}
    comparison = table(rows, costs, settings)
    hydra = rows[HYDRA_CIRC].model
    hydra.save_pretrained(folder.model)
    for name, evaluation in evaluations.items():
        evaluation.save(folder.evaluations / f"{_file_name(name)}.json")
    save_costs(folder.evaluations / "costs.json", costs)
    write_report(
        folder.report,
        evaluations,
        ensemble=hydra,
        costs=costs,
        title="Hydra Ensembles: the embedded demo",
        focus=HYDRA_CIRC,
        baseline=SINGLE,
    )
    seconds = {**methods.seconds, "all": round(time.perf_counter() - started, 1)}
    write_json(folder.results, results(rows, costs, settings, data.samples(), seconds))
    folder.finish()
    return DemoResult(comparison, evaluations, costs, folder.path, folder.report, folder.model, folder.results)


def _file_name(method: str) -> str:
    """The name of a method as a file name: letters and digits, words joined by underscores."""
    words = "".join(character if character.isalnum() else " " for character in method.lower()).split()
    return "_".join(words)
