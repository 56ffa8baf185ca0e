"""`hydra-ensembles evaluate`, `compare` and `report`: measure models and show the results."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ..data.dataset import AnyDataset
from ..data.suites import suite
from ..errors import ConfigError, DataError
from ..evaluation.evaluate import evaluate as evaluate_model
from ..evaluation.evaluation import FORMAT as EVALUATION
from ..evaluation.evaluation import Evaluation, Selective
from ..files import expanded, read_json
from ..metrics.inputs import Convention
from ..model.cost import Cost
from ..model.ensemble import Ensemble
from ..prediction import AnyScore
from ..report.compare import FORMAT as COSTS
from ..report.compare import columns_for, load_costs
from ..report.compare import compare as compare_evaluations
from ..report.html import write_report
from ..report.table import Column, to_csv, to_markdown, to_rich
from ..schema import to_plain
from . import sources as source
from .command import (
    Json,
    Quiet,
    command,
    did_you_mean,
    emit,
    emit_json,
    format_of,
    option,
    read_yaml,
    require_replaceable,
    write_settings,
)
from .sources import USUAL_BATCH, DataSettings, ModelSettings

KEPT = ".run"  # suffix of the folder that keeps partial results until the run is finished
SETTINGS_SUFFIX = ".config.yaml"  # suffix of the settings file next to an evaluation
HOW = ("output", "device", "batch_size", "workers")  # settings that do not change what is evaluated
GROUPS = ("near", "far", "apart")
UNGROUPED = "ungrouped"
_NAMED = re.compile(r"(?:(?P<group>near|far|apart):)?(?P<whole>(?:(?P<name>[^=:/\\]+)=)?(?P<data>.+))", re.DOTALL)


@dataclass(frozen=True)
class MeasuredSettings(DataSettings, ModelSettings):
    """Which model on which sets."""

    name: str | None = option(None, "What tables and pages call the model; its own name if not given.")
    id: str | None = option(None, "Labelled in-distribution test set.")
    ood: tuple[str, ...] = option((), "OOD set, repeatable: [near:|far:|apart:][NAME=]DATA.")
    suite: str | None = option(None, "A suite, for all sets not named here.")
    score: AnyScore = option("msp", "Score that detects OOD inputs.")

    def __post_init__(self) -> None:
        """Check that there are data to measure on."""
        super().__post_init__()
        if self.id is None and self.suite is None:
            raise ConfigError("no data to evaluate on; give id (and ood, as near:NAME=DATA), or a suite")
        source.require_different_sources(("id", self.id), *(("ood", data) for _, _, data in grouped_specs(self.ood)))

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of `evaluate`."""
        about = {"name": self.name or self.own_name, "score": self.score}
        return {**about, "batch_size": self.batch_size or USUAL_BATCH, "num_workers": self.workers}


@dataclass(frozen=True)
class EvaluateSettings(MeasuredSettings):
    """Which model on which sets, and what to measure."""

    output: str = option("evaluations", "Folder for the evaluation, or a .json file.")
    shift: tuple[str, ...] = option((), "Labelled set under distribution shift, repeatable: NAME=DATA.")
    scores: tuple[AnyScore, ...] = option((), "Further score to report, repeatable.")
    convention: Convention = option("torch-uncertainty", "How AUPR and FPR95 are computed.")
    bootstrap: int = option(0, "Resamples for confidence intervals; 0 for none.")
    keep_logits: bool = option(False, "Save the member logits too.")

    def __post_init__(self) -> None:
        """Check that shifted sets have no group and different names."""
        super().__post_init__()
        specs = grouped_specs(self.shift)
        grouped = [spec for group, _, spec in specs if group != UNGROUPED]
        if grouped:
            raise DataError(f"shift {grouped[0]} has a group, which only OOD sets have; write it as NAME=DATA")
        names = [name or spec for _, name, spec in specs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"two shifted sets are called {twice!r}; rename one as NAME=DATA")

    @property
    def file(self) -> Path:
        """Where the evaluation is written."""
        path = expanded(self.output)
        title = self.name or self.own_name
        slug = re.sub(r"[^\w.-]+", "-", title.partition(":")[2] or title).strip("-").lower() or "model"
        return path if path.suffix == ".json" else path / f"{slug}.json"

    def require_free_file(self) -> None:
        """Refuse to overwrite an evaluation of something else; one that `output` names is overwritten."""
        require_replaceable(self.file, EVALUATION)
        if Path(self.output).suffix == ".json" or not self.file.exists():
            return
        settings, ours = self.file.with_suffix(SETTINGS_SUFFIX), self.by_full_names()
        theirs = read_yaml(settings) if settings.exists() else None
        if not isinstance(theirs, dict) or {**theirs, **{name: ours[name] for name in HOW}} != ours:
            advice = f"give this one its own --name or --output, or --output {self.file} to replace it"
            raise ConfigError(f"{self.file} holds another evaluation (see {settings.name}); {advice}")

    def by_full_names(self) -> dict[str, Any]:
        """The settings as plain data with absolute paths, so that they mean the same in any working directory."""
        plain: dict[str, Any] = {**to_plain(self), "output": str(expanded(self.output).resolve())}
        folder = expanded(self.model)
        if folder.is_dir() and not self.model.startswith((source.TIMM, source.HUB)):
            plain |= {"model": str(folder.resolve()), "name": self.name or self.own_name}
        if self.weights is not None:
            plain["weights"] = str(expanded(self.weights).resolve())
        if self.id is not None:
            plain["id"] = source.full_name_of_data(self.id)
        for role, entries in (("ood", self.ood), ("shift", self.shift)):
            for index, (_, name, spec) in enumerate(grouped_specs(entries)):
                if role == "ood" or name is not None:  # else what was typed is the name of the set
                    plain[role][index] = entries[index].removesuffix(spec) + source.full_name_of_data(spec)
        specs = [plain["id"] or "", *plain["ood"], *plain["shift"]]
        below_root = self.suite is not None or any(source.SUITE in spec or source.TORCHVISION in spec for spec in specs)
        if self.root is not None or below_root:
            plain["root"] = str(Path(self.root or "").resolve())
        return plain


def grouped_specs(options: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """Group, name (None: the data's own) and data of each `[GROUP:][NAME=]DATA`."""
    specs = []
    for entry in options:
        match = _NAMED.fullmatch(entry)
        if match is None:
            raise DataError(f"a set is written [near:|far:|apart:][NAME=]DATA, got {entry!r}")
        is_path = source.existing_path(match["whole"])[0] is not None  # a path may contain "="
        name, data = (None, match["whole"]) if is_path else (match["name"], match["data"])
        specs.append((match["group"] or UNGROUPED, name, data))
    ungrouped = [data for group, _, data in specs if group == UNGROUPED]
    if 0 < len(ungrouped) < len(specs):
        raise DataError(f"{', '.join(ungrouped)} have no group but others do; write near:, far: or apart: before each")
    return specs


def read_sets(settings: MeasuredSettings, model: Ensemble) -> tuple[AnyDataset, dict[str, dict[str, AnyDataset]]]:
    """The in-distribution set, and OOD sets by group and name, each checked against the model."""
    test = _read(f"suite:{settings.suite}:test" if settings.id is None else settings.id, settings, model)
    groups: dict[str, dict[str, AnyDataset]] = {}
    specs = settings.ood
    if settings.suite is not None and not specs:
        references = [(group, ref.name) for group in GROUPS for ref in getattr(suite(settings.suite), group)]
        specs = tuple(f"{group}:{name}=suite:{settings.suite}:{name}" for group, name in references)
    for group, name, spec in grouped_specs(specs):
        data = _read(spec, settings, model, labelled=False)
        name = name or data.name
        if any(name in sets for sets in groups.values()):
            raise DataError(f"two OOD sets are called {name!r}; rename one as near:NAME=DATA")
        groups.setdefault(group, {})[name] = data
    return test, groups


def _read(spec: str, settings: MeasuredSettings, model: Ensemble, labelled: bool = True) -> AnyDataset:
    return source.fit_to_model(source.load_data(spec, settings, labelled), model, settings, labelled)


@command
def evaluate(settings: EvaluateSettings, quiet: Quiet = False, as_json: Json = False) -> None:
    """Measure a model on its task and on OOD data.

    Prints accuracy, calibration, OOD detection and selective risk, and writes them as JSON for compare and report, with
    the settings in a YAML file next to it.

    Examples:
      hydra-ensembles evaluate run --id test/ --ood near:cars=cars/ --ood far:digits=digits.parquet
      hydra-ensembles evaluate timm:vit_base_patch16_224 --id test/ --ood near:cars=cars/ --name Single
      hydra-ensembles evaluate run --suite paper-cifar100 --root data/
      hydra-ensembles compare evaluations/
    """
    settings.require_free_file()
    file, kept = settings.file, settings.file.with_suffix(KEPT)
    model = source.load_classifier(settings)
    test, groups = read_sets(settings, model)
    shifts = {name or spec: _read(spec, settings, model) for _, name, spec in grouped_specs(settings.shift)}
    evaluation = evaluate_model(
        model,
        test,
        groups,
        shifts,
        **settings.common,
        scores=settings.scores,
        convention=settings.convention,
        bootstrap=settings.bootstrap,
        keep_logits=settings.keep_logits,
        output=kept,
        progress=not quiet,
    )
    write_settings(file.with_suffix(SETTINGS_SUFFIX), settings.by_full_names(), "evaluate")  # for later runs
    evaluation.save(file)
    shutil.rmtree(kept)
    if as_json:
        emit_json(read_json(file))
        return
    shifted = [Column(f"shift.{name}.accuracy", "Acc", name, "higher", scale=100) for name in evaluation.shift]
    columns = [*columns_for([evaluation], list(evaluation.ood)), *shifted]
    Console().print(to_rich(compare_evaluations([evaluation], columns=columns)))
    if evaluation.selective is not None:
        print(accepted_in_words(evaluation.selective, evaluation.id_name))
    print(f"wrote {file}")


def accepted_in_words(chosen: Selective, id_name: str) -> str:
    """Describe what the calibrated thresholds accept of the in-distribution set."""
    risk = "" if chosen.risk is None else f", of which {chosen.risk:.2%} are wrong"
    text = f"{chosen.accepted:.2%} of {id_name}{risk}"
    if chosen.sure is not None and chosen.familiar is not None:
        alone = f"{chosen.score} alone {chosen.sure:.2%}, {chosen.familiarity} alone {chosen.familiar:.2%}"
        return f"Both calibrated thresholds together accept {text} ({alone})."
    return f"The calibrated threshold accepts {text}."


TableFormat = Literal["table", "markdown", "csv"]
SavedEvaluations = Annotated[list[Path], typer.Argument(help="Saved evaluations (.json), or folders that hold them.")]
AllowMismatch = Annotated[bool, typer.Option("--allow-mismatch", help="Compare even if the data differ, and say so.")]


@command
def compare(
    paths: SavedEvaluations,
    format: Annotated[TableFormat, typer.Option("--format", "-f", help="How to write the table.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    allow_mismatch: AllowMismatch = False,
) -> None:
    """Show saved evaluations side by side in one table.

    The best is bold, the second best underlined. Evaluations with the same name are runs of one method and are shown as
    mean ± standard deviation.

    Examples:
      hydra-ensembles compare runs/
      hydra-ensembles compare single.json hydra.json --format csv --output table.csv
    """
    require_replaceable(output, inputs=paths)
    evaluations, costs = find_runs(paths)
    comparison = compare_evaluations(evaluations, costs, allow_mismatch=allow_mismatch)
    writers = {"table": to_rich, "markdown": to_markdown, "csv": to_csv}
    emit(writers[format](comparison), output)


@command
def report(
    paths: SavedEvaluations,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    focus: Annotated[str | None, typer.Option(help="The method it is about; the last, if not given.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The method to compare with; the first, if not given.")] = None,
    allow_mismatch: AllowMismatch = False,
) -> None:
    """Write saved evaluations as one HTML page.

    Examples:
      hydra-ensembles report runs/ --output report.html
      hydra-ensembles report runs/ --focus "Hydra (Circ)" --baseline Single
    """
    require_replaceable(output, inputs=paths)
    evaluations, costs = find_runs(paths)
    named: dict[str, Any] = {"title": title, "focus": focus, "baseline": baseline}
    page = write_report(evaluations, output, costs=costs, allow_mismatch=allow_mismatch, **named)
    print(f"wrote {page}")


def find_runs(paths: Sequence[Path]) -> tuple[list[Evaluation], list[Cost]]:
    """Load evaluations and costs from JSON files and folders; other JSON files in a folder are skipped."""
    evaluations: list[Evaluation] = []
    costs: list[Cost] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist{did_you_mean(path)}")
        count = len(evaluations) + len(costs)
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            kind = format_of(file)
            if kind == EVALUATION:
                evaluations.append(Evaluation.load(file))
            elif kind == COSTS:
                costs += load_costs(file)
        if len(evaluations) + len(costs) == count:
            raise DataError(f"no saved evaluation or costs in {path}; hydra-ensembles evaluate MODEL writes one")
    return evaluations, costs
