"""`hydra-ensembles predict`: labels for files or texts, how sure the model is, and whether to trust it."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from ..data.dataset import IMAGE_SUFFIXES, AnyDataset, read_image
from ..data.loading import TABLE_SUFFIXES, Columns, load
from ..errors import ConfigError, DataError
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..prediction import Prediction, ScoreName
from ..schema import from_plain
from .command import command, did_you_mean, emit, names_beside
from .sources import USUAL_BATCH, ModelSettings, load_classifier

NUMBERS = ("confidence", "epistemic", "entropy", "disagreement")
COLUMNS = ("input", "label", *NUMBERS, "score", "verdict")
LONGEST = 60  # characters of an input that a table shows

Item = tuple[str, Callable[[], Any]]
"""One input: what the result calls it, and how its content is read."""
OutputFormat = Literal["table", "json", "jsonl", "csv"]


@command
def predict(
    model: ModelSettings,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Images, folders, text files, tables; - for standard input."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", "-t", help="A text to predict, once for each.")] = None,
    format: Annotated[OutputFormat, typer.Option("--format", "-f", help="How to write it.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Abstain where the score is above this.")] = None,
    score: Annotated[ScoreName | None, typer.Option(help="The score that the threshold is for.")] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out inputs that cannot be read, instead of stopping.")
    ] = False,
    column: Annotated[
        list[str] | None, typer.Option(help="Column of a table, as text=sentence.", metavar="ROLE=NAME")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a batch.")] = USUAL_BATCH,
) -> None:
    """Label images or texts, or abstain.

    The verdict is accept or abstain, by the threshold that build calibrated and stored with the model (or --threshold).
    A model without one gives no verdict.

    Examples:
      hydra-ensembles predict run photo.jpg more-photos/
      hydra-ensembles predict run photos/ --format jsonl --output predictions.jsonl
      hydra-ensembles predict my-hydra-bert --text "a fine film" --text "two hours too long"
      cat reviews.txt | hydra-ensembles predict my-hydra-bert - --format csv
    """
    ensemble = _with_threshold(load_classifier(model), threshold, score)
    columns = dict(pair.partition("=")[::2] for pair in column or ())
    items = find_inputs(ensemble.kind, inputs or (), text or (), columns)
    answers: list[dict[str, Any]] = []
    for start in range(0, len(items), batch_size):
        names: list[str] = []
        contents: list[Any] = []
        for name, read in items[start : start + batch_size]:
            try:
                contents.append(read())
                names.append(name)
            except DataError as error:
                if not skip_unreadable:
                    raise
                print(f"warning: skipped: {error}", file=sys.stderr)
        if names:
            answers += _answers(names, ensemble.predict(contents))
    emit(_written(answers, format), output)
    if answers and answers[0]["verdict"] is None:
        print("no verdict: this model has no calibrated threshold; build stores one, or give --threshold",
              file=sys.stderr)  # fmt: skip


def _with_threshold(ensemble: Ensemble, threshold: float | None, score: ScoreName | None) -> Ensemble:
    """The ensemble with another threshold, where one is given; never one that nobody chose."""
    stored = ensemble.metadata.calibration or Calibration()
    if threshold is not None:
        return ensemble.with_metadata(calibration=replace(stored, threshold=threshold, score=score or stored.score))
    if score not in (None, stored.score):
        raise ConfigError(f"score {score} needs a threshold for it; the one stored is for {stored.score}")
    return ensemble


def find_inputs(kind: str, inputs: Sequence[str], texts: Sequence[str], columns: Mapping[str, str]) -> list[Item]:
    """The inputs that arguments name, in their order; `texts` come last.

    Args:
        kind: `"image"` or `"text"`: what the model reads.
        inputs: Files and folders; for text also `-` (standard input) and strings with a space in them.
        texts: Strings, as they are.
        columns: Column names, for tables.

    Raises:
        DataError: Something does not exist, or is nothing the model can read.
    """
    if kind == "image" and texts:
        raise DataError("got a text, but the model reads images; give image files or folders")
    items: list[Item] = []
    for argument in inputs:
        path = Path(argument).expanduser()
        if path.is_file() and path.suffix.lower() in TABLE_SUFFIXES:
            data = load(path, columns=from_plain(Columns, columns, "columns"), labels="optional")
            if data.kind != kind:
                raise DataError(f"{path} holds {data.kind}s, but the model reads {kind}s")
            items += [(f"{path}:{row}", partial(_content, data, row)) for row in range(len(data))]
        elif kind == "image":
            within = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            if not path.exists():
                raise DataError(f"{path} does not exist{did_you_mean(path.name, names_beside(path))}")
            if path.is_dir() and not within:
                raise DataError(f"{path} has no images in it (suffixes read: {', '.join(IMAGE_SUFFIXES)})")
            items += [(str(file), partial(read_image, file)) for file in (within if path.is_dir() else [path])]
        else:
            items += [(line, partial(str, line)) for line in _texts(argument, path)]
    items += [(text, partial(str, text)) for text in texts]
    if not items:
        wanted = "image files or folders" if kind == "image" else 'texts: --text "...", a file, or - for standard input'
        raise DataError(f"got nothing to predict; give {wanted}")
    return items


def _content(data: AnyDataset, row: int) -> Any:
    return data[row][0]


def _texts(argument: str, path: Path) -> list[str]:
    if path.is_dir():
        raise DataError(f"{path} is a folder, but the model reads text; give a file with one text a line")
    lines: Iterable[str] = [argument]
    if argument == "-":
        lines = sys.stdin
    elif path.is_file():
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8 ({error})") from error
    elif " " not in argument.strip():
        near = did_you_mean(path.name, names_beside(path))
        raise DataError(f"{path} does not exist{near}; for a text of one word write --text {argument!r}")
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise DataError(f"{'standard input' if argument == '-' else path} has no text; give one text a line")
    return found


def _answers(names: Sequence[str], prediction: Prediction) -> list[dict[str, Any]]:
    """The columns of the output; a label is a number where the model has no names, uncertainties are in nats."""
    known, accept = prediction.class_names, prediction.accept
    columns: dict[str, Sequence[Any]] = {
        "input": names,
        "label": [str(label) if known is None else known[label] for label in prediction.label.tolist()],
        **{name: getattr(prediction, name).tolist() for name in NUMBERS},
        "score": prediction.score().tolist(),
        "verdict": [None] * len(names) if accept is None else ["accept" if one else "abstain" for one in accept],
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _written(answers: Sequence[dict[str, Any]], format: OutputFormat) -> str | Table:
    if format == "json":
        return json.dumps(answers, indent=1, ensure_ascii=False) + "\n"
    if format == "jsonl":
        return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in answers)
    if format == "csv":
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(answers)
        return buffer.getvalue()
    table = Table(box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("input", overflow="fold")
    table.add_column("label", overflow="fold")
    for name in NUMBERS:
        table.add_column("disagree" if name == "disagreement" else name, justify="right", no_wrap=True)
    decided = any(one["verdict"] for one in answers)
    if decided:
        table.add_column("verdict", no_wrap=True)
    for one in answers:
        numbers = (f"{one[name]:.4f}" for name in NUMBERS)
        verdict = [one["verdict"]] if decided else []
        style = "yellow" if one["verdict"] == "abstain" else None
        table.add_row(escape(_short(one["input"])), escape(one["label"]), *numbers, *verdict, style=style)
    return table


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"…{text[-LONGEST:]}" if "/" in text else f"{text[:LONGEST]}…"
