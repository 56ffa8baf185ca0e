"""`hydra-ensembles predict`: labels for files or texts, how sure the model is, and whether to trust it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .._utils import write_atomically
from ..errors import ConfigError
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..prediction import ScoreName
from . import options
from .errors import one_line_errors
from .models import load_classifier
from .predict_inputs import find_inputs, read_batches
from .predict_output import OutputFormat, Row, rows_of, write_rows
from .settings import AUTOMATIC, USUAL_BATCH, ModelSettings
from .yaml_file import read_pairs

EXAMPLES = """\b
Examples:
  hydra-ensembles predict run photo.jpg more-photos/
  hydra-ensembles predict run photos/ --format jsonl --output predictions.jsonl
  hydra-ensembles predict my-hydra-bert --text "a fine film" --text "two hours too long"
  cat reviews.txt | hydra-ensembles predict my-hydra-bert - --format csv

The verdict is accept or abstain, by the threshold that build calibrated and stored with the model (or --threshold).
A model without one gives no verdict.
"""


@one_line_errors
def predict(
    model: options.ModelArgument,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Images, folders, text files, tables; - for standard input."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", "-t", help="A text to predict, once for each.")] = None,
    format: Annotated[OutputFormat, typer.Option("--format", "-f", help="How to write it.")] = OutputFormat.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="Abstain where the score is above this.")
    ] = None,
    score: Annotated[ScoreName | None, typer.Option("--score", help="The score that --threshold is for.")] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out inputs that cannot be read, instead of stopping.")
    ] = False,
    weights: options.WeightsOption = None,
    num_classes: options.NumClassesOption = None,
    labels: options.LabelsOption = None,
    model_option: options.ModelOptionOption = None,
    random_weights: options.RandomWeightsOption = None,
    device: options.DeviceOption = None,
    column: options.ColumnOption = None,
    batch_size: options.BatchSizeOption = None,
) -> None:
    """Predict images or texts: label, confidence, uncertainty, and accept or abstain."""
    settings = ModelSettings(
        model=model,
        weights=weights,
        num_classes=num_classes,
        labels=labels,
        model_options=read_pairs(model_option, "--model-option") or {},
        random_weights=bool(random_weights),
        device=device or AUTOMATIC,
    )
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {batch_size}")
    ensemble = load_classifier(settings)
    ensemble = _with_threshold(ensemble, threshold, score)
    items = find_inputs(ensemble.kind, inputs or (), text or (), read_pairs(column, "--column") or {})
    rows: list[Row] = []
    for names, contents in read_batches(items, batch_size or USUAL_BATCH, "skip" if skip_unreadable else "fail"):
        rows += rows_of(names, ensemble.predict(contents))
    written = write_rows(rows, format, to_file=output is not None)
    if output is None:
        sys.stdout.write(written)
        sys.stdout.flush()
    else:
        write_atomically(output, written.encode())
    if rows and rows[0].verdict is None:
        print(
            "no verdict: this model has no calibrated threshold; build stores one, or give --threshold",
            file=sys.stderr,
        )


def _with_threshold(ensemble: Ensemble, threshold: float | None, score: ScoreName | None) -> Ensemble:
    """The ensemble with another threshold, where one is given; never one that nobody chose."""
    stored = ensemble.metadata.calibration or Calibration()
    if score is not None and score != stored.score and threshold is None:
        raise ConfigError(
            f"--score {score} needs a --threshold for it; the one stored with the model is for {stored.score}"
        )
    if threshold is None:
        return ensemble
    return ensemble.with_metadata(calibration=replace(stored, threshold=threshold, score=score or stored.score))
