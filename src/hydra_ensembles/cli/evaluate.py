"""`hydra-ensembles evaluate`: a model measured on its task and on OOD data."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DataError
from ..evaluation.evaluate import evaluate as evaluate_model
from ..evaluation.evaluation import Detection, Evaluation, logits_path
from ..metrics.inputs import Convention
from ..prediction import ScoreName
from ..schema import from_plain, to_plain
from . import options
from .class_labels import AnyDataset
from .datasets import find_suite, fit_to_model, load_data, load_reference, require_different
from .errors import one_line_errors
from .evaluate_settings import EvaluateSettings, read_named
from .models import load_classifier
from .settings import USUAL_BATCH
from .yaml_file import merge_settings, settings_given, write_yaml

EXAMPLES = """\b
Examples:
  hydra-ensembles evaluate run --id test/ --ood near:cars=cars/ --ood far:digits=digits.parquet
  hydra-ensembles evaluate timm:vit_base_patch16_224 --id test/ --ood near:cars=cars/ --name Single
  hydra-ensembles evaluate run --suite cifar10 --root data/
  hydra-ensembles compare evaluations/

The evaluation is written as JSON, for compare and report, with its settings in YAML beside it.
"""


@one_line_errors
def evaluate(
    model: options.OptionalModelArgument = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings; flags win.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder, or .json file.", metavar="PATH")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What tables call the model.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="Labelled test set.", metavar="DATA")] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option("--ood", help="OOD set, once for each.", metavar="[near:|far:|apart:][NAME=]DATA"),
    ] = None,
    shift: Annotated[
        list[str] | None, typer.Option("--shift", help="Labelled set under shift, once for each.", metavar="NAME=DATA")
    ] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Suite that gives all sets.")] = None,
    score: Annotated[ScoreName | None, typer.Option("--score", help="Score that detects OOD inputs.")] = None,
    scores: Annotated[
        list[str] | None, typer.Option("--also-score", help="Further score to report, once for each.")
    ] = None,
    convention: Annotated[Convention | None, typer.Option("--convention", help="How AUPR and FPR95 count.")] = None,
    bootstrap: Annotated[int | None, typer.Option("--bootstrap", help="Resamples for confidence intervals.")] = None,
    gallery: Annotated[int | None, typer.Option("--gallery", help="Inputs to keep for the report; 6.")] = None,
    keep_logits: Annotated[bool | None, typer.Option("--keep-logits", help="Save the member logits too.")] = None,
    weights: options.WeightsOption = None,
    num_classes: options.NumClassesOption = None,
    labels: options.LabelsOption = None,
    model_option: options.ModelOptionOption = None,
    random_weights: options.RandomWeightsOption = None,
    device: options.DeviceOption = None,
    root: options.RootOption = None,
    column: options.ColumnOption = None,
    by_position: options.ByPositionOption = None,
    limit: options.LimitOption = None,
    batch_size: options.BatchSizeOption = None,
    workers: options.WorkersOption = None,
    quiet: options.QuietOption = False,
) -> None:
    """Measure accuracy, calibration, OOD detection and selective risk of a model; write them as JSON."""
    pairs = {"model_option": "model_options", "column": "columns"}
    flags = settings_given(locals(), pairs, leave_out=("config", "quiet", "pairs"))
    merged = merge_settings(config, flags, [one.name for one in fields(EvaluateSettings)])
    settings = from_plain(EvaluateSettings, merged, "evaluate" if config is None else str(config))
    evaluation = run_evaluation(settings, progress=not quiet)
    print_evaluation(evaluation, settings.file)


def run_evaluation(settings: EvaluateSettings, progress: bool) -> Evaluation:
    """Evaluate, and write the evaluation with its settings beside it."""
    require_different(("--id", settings.id), *(("--ood", one.data) for one in read_named(settings.ood, "--ood")))
    model = load_classifier(settings)
    test, groups = _test_and_ood(settings)
    shifted = {
        one.name or one.data: fit_to_model(load_data(one.data, "test", settings), "test", model, settings)
        for one in read_named(settings.shift, "--shift")
    }
    evaluation = evaluate_model(
        model,
        fit_to_model(test, "test", model, settings),
        {
            group: {key: fit_to_model(data, "ood", model, settings) for key, data in sets.items()}
            for group, sets in groups.items()
        },
        shifted,
        name=settings.title,
        score=settings.score,
        scores=settings.scores,
        convention=settings.convention,
        batch_size=settings.batch_size or USUAL_BATCH,
        num_workers=settings.workers,
        bootstrap=settings.bootstrap,
        gallery=settings.gallery,
        keep_logits=settings.keep_logits,
        progress=progress,
    )
    evaluation.save(settings.file)
    if evaluation.logits is None:  # those of an evaluation that this one replaces
        logits_path(settings.file).unlink(missing_ok=True)
    heading = "Resolved settings of an evaluation; repeat it with: hydra-ensembles evaluate --config THIS_FILE"
    write_yaml(settings.file.with_suffix(".config.yaml"), to_plain(settings), heading)
    return evaluation


def print_evaluation(evaluation: Evaluation, file: Path) -> None:
    """The main numbers as tables."""
    console = Console()
    own = evaluation.id
    table = Table(title=f"{evaluation.name} on {evaluation.id_name} ({own.samples:,} samples)", title_justify="left")
    for heading in ("accuracy", "ECE", "NLL", "Brier", "AURC"):
        table.add_column(heading, justify="right")
    table.add_row(f"{own.accuracy:.2%}", f"{own.ece:.4f}", f"{own.nll:.4f}", f"{own.brier:.4f}", f"{own.aurc:.4f}")
    console.print(table)
    if evaluation.ood:
        console.print(_ood_table(evaluation))
    chosen = evaluation.selective
    if chosen is not None:
        risk = "" if chosen.risk is None else f", of which {chosen.risk:.2%} are wrong"
        console.print(f"The calibrated threshold accepts {chosen.accepted:.2%} of {evaluation.id_name}{risk}.")
    print(f"wrote {file}")


def _ood_table(evaluation: Evaluation) -> Table:
    table = Table(title=f"OOD detection by {evaluation.score}", title_justify="left")
    table.add_column("set")
    for heading in ("group", "samples", "AUROC", "FPR95", "AUPR"):
        table.add_column(heading, justify="right")

    def row(name: str, group: str, samples: str, detection: Detection) -> None:
        numbers = (f"{value:.2%}" for value in (detection.auroc, detection.fpr95, detection.aupr))
        table.add_row(name, group, samples, *numbers)

    for name, result in evaluation.ood.items():
        group = "" if result.group == "ungrouped" else result.group
        row(name, group, f"{result.samples:,}", result.detection[evaluation.score])
    table.add_section()
    for mean, by_score in evaluation.means.items():
        row(f"mean of {mean}", "", "", by_score[evaluation.score])
    return table


def _test_and_ood(settings: EvaluateSettings) -> tuple[AnyDataset, dict[str, dict[str, AnyDataset]]]:
    """The test set, and the OOD sets by group and name; what options name wins over the suite."""
    groups: dict[str, dict[str, AnyDataset]] = {}
    test: AnyDataset | None = None
    if settings.suite is not None:
        suite = find_suite(settings.suite)
        if settings.id is None:
            test = load_reference(suite.id, "test", settings)
        for group, references in (("near", suite.near), ("far", suite.far), ("apart", suite.apart)):
            for reference in () if settings.ood else references:
                groups.setdefault(group, {})[reference.name] = load_reference(reference, "ood", settings)
    if settings.id is not None:
        test = load_data(settings.id, "test", settings)
    assert test is not None  # the settings have checked that there is one or the other
    for one in read_named(settings.ood, "--ood"):
        data = load_data(one.data, "ood", settings)
        name = one.name or data.name
        if any(name in sets for sets in groups.values()):
            raise DataError(f"two OOD sets are called {name!r}; name them apart: --ood near:NAME=DATA")
        groups.setdefault(one.group, {})[name] = data
    return test, groups
