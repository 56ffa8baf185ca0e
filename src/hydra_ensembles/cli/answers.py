"""`predict`, `score`, `serve`, `evaluate`, `report` and `demo`: what a model answers, and how good that is."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import DataError
from . import common
from .common import BATCH, BatchSize, Changes, Column, Config, Device, File, Limit, Model, Quiet

IN_TABLE = ("confidence", "epistemic", "familiarity")  # those that fit into a terminal
LONGEST = 60  # maximum number of characters of an input in a table
PASSES = 16  # batches of inputs that are read at a time: those of similar length share a batch
GROUPS = ("near", "far", "apart")
EVALUATION, COSTS = "hydra_ensembles evaluation", "hydra_ensembles costs"  # how the `format` of a file begins


# --- predict, score, serve -------------------------------------------------------------------------------------------


def predict(
    model: Model,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT...", help="Images, folders, tables, texts; - for standard input."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", "-t", help="A text to label, repeatable.")] = None,
    format: Annotated[Literal["table", "jsonl", "csv"], typer.Option("--format", "-f", help="Format.")] = "table",
    output: File = None,
    column: Column = None,
    batch_size: BatchSize = BATCH,
    device: Device = "auto",
) -> None:
    """Label images or texts, or abstain.

    If some inputs have no answer, the others do, and the exit code is 2.

    \b
    Example:
      hydra-ensembles predict safe photo.jpg more-photos/
      cat reviews.txt | hydra-ensembles predict my-bert - --format csv
    """
    from ..files import expanded, write_atomically
    from ..serve.batcher import Runner
    from ..serve.protocol import Served

    ensemble = common.load_model(model, device)
    served, runner = Served(ensemble, model), Runner(ensemble, batch_size)
    reader, answers, problems = served.reader, list[dict[str, Any]](), list[str]()
    reader.require_preprocessing()
    found = _inputs(ensemble.kind, inputs or (), text or (), column)
    while items := [item for item, _ in zip(found, range(PASSES * batch_size), strict=False)]:
        rows = [reader.read(content) for _, content in items]
        for (name, _), answer in zip(items, runner.answers(rows), strict=True):
            if isinstance(answer, Exception):
                problems.append(f"{name}: {answer}")
            else:
                told = served.plain(answer)
                scalars = {key: value for key, value in told.items() if key not in ("index", "top", "members")}
                answers.append({"input": name, **scalars})
    if not answers and not problems:
        raise DataError("got nothing to predict; give files or folders, texts by --text, or - for standard input")
    if answers:
        if output is None:
            print(_formatted(answers, format), end="", flush=True)
        else:
            write_atomically(expanded(output), _formatted(answers, format).encode())
        if answers[0]["accept"] is None or ensemble.metadata.calibration is None:
            print("no verdict: this model has no threshold; hydra-ensembles calibrate makes one", file=sys.stderr)
    if problems:
        raise DataError(f"{len(problems)} of {len(problems) + len(answers)} inputs have no answer; {problems[0]}")


def _inputs(kind: str, inputs: Sequence[str], texts: Sequence[str], column: Any) -> Iterator[tuple[str, Any]]:
    """Name and content of every input: files, folders, `-` for standard input (one image, or lines of text), texts."""
    from ..serve.rows import sources

    columns = common.named_columns(column)
    for argument in inputs:
        if argument == "-" and kind == "image":
            yield "standard input", sys.stdin.buffer.read()
        elif argument == "-":
            lines = sys.stdin.buffer.read().decode("utf-8-sig").splitlines()
            yield from ((line, line) for line in map(str.strip, lines) if line)
        else:
            for source in sources(argument, kind, columns):
                for item in source:
                    if item.error:
                        raise DataError(f"{item.name}: {item.error}")
                    yield item.content if argument.endswith(".txt") else item.name, item.content
    yield from ((text, text) for text in texts)


def _formatted(answers: Sequence[dict[str, Any]], format: str) -> str:
    if format == "jsonl":
        return "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    if format == "csv":
        from ..report.compare import csv_text

        return csv_text(answers, list(answers[0]))
    shown = [name for name in IN_TABLE if name in answers[0]]
    rows = [("input", "label", *shown, "verdict")]
    for answer in answers:
        name, declined = answer["input"], f"abstain: {answer['reason']}"
        verdict = "–" if answer["accept"] is None else "accept" if answer["accept"] else declined
        short = name if len(name) <= LONGEST else f"…{name[-LONGEST:]}" if "/" in name else f"{name[:LONGEST]}…"
        rows.append((short, answer["label"], *(f"{answer[number]:.3f}" for number in shown), verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def score(
    model: Model,
    source: Annotated[str, typer.Argument(metavar="IN", help="Folder, file, pattern as 'photos/*.tar', or URL.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for the rows, or the URL of one.")],
    column: Column = None,
    keep: Annotated[list[str] | None, typer.Option(help="Column of tables to copy to the output, repeatable.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Write probabilities and member logits, too.")] = False,
    precision: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode; one for each core if not given.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Ray cluster that does it: auto, local.")] = None,
    batch_size: BatchSize = BATCH,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Label an archive of any size.

    Writes Parquet files with one row for every item; after an interruption the same command resumes.

    \b
    Example:
      hydra-ensembles score safe photos/ -o scores
      hydra-ensembles score my-bert reviews.parquet -o scores --column text=review --keep id
      hydra-ensembles score safe s3://bucket/photos -o s3://bucket/scores --ray auto
    """
    from ..serve.scoring import score as scored

    how: dict[str, Any] = {"precision": precision, "workers": workers, "ray": ray}
    settings: dict[str, Any] = {
        "columns": common.named_columns(column),
        "keep": keep or (),
        "wide": wide,
        "batch_size": batch_size,
    }
    ensemble = common.load_model(model, device if ray is None else "cpu")
    found = scored(ensemble, source, output, **settings, **how, progress=not quiet)
    print(found)
    if found.alarms:
        print(f"alarm: {', '.join(found.alarms)} changed; {output}/monitor.json says where", file=sys.stderr)
    if found.rows and found.unreadable == found.rows:
        raise DataError(f"nothing in {source} could be read")


def monitor(
    model: Model,
    answers: Annotated[list[Path], typer.Argument(metavar="ANSWERS...", help="Files of answers that score wrote.")],
    right: Annotated[str | None, typer.Option(help="Column with right labels of a random sample, empty else.")] = None,
    state: Annotated[Path | None, typer.Option(help="File that keeps the evidence from call to call.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known as JSON.")] = False,
) -> None:
    """Watch answers: have inputs changed, is the promise kept?

    Give each row once, in its order. The exit code is 3 after an alarm.

    \b
    Example:
      hydra-ensembles monitor safe scores/rows/*.parquet --state watch.json
      hydra-ensembles monitor safe scores/rows/*.parquet --right kept_label
    """
    from ..files import expanded
    from ..monitor import Monitor
    from ..serve.scoring import read_answers

    loaded = common.load_model(model, "cpu")
    keep = None if state is None else expanded(state)
    watch = Monitor(loaded) if keep is None or not keep.exists() else Monitor.load(keep, loaded)
    names = loaded.class_names
    for file in answers:
        scores, audited = read_answers(file, watch, right, names)
        watch.update_scores(scores)
        if audited is not None:
            watch.audit_labels(audited[0], audited[1], audited[2])
    if keep is not None:
        watch.save(keep)
    if as_json:
        print(json.dumps(watch.summary(), indent=1))
    else:
        rate = watch.error_rate
        print(watch if rate is None else f"{watch}\nerror rate {rate}")
    if watch.alarm:
        raise typer.Exit(3)


def serve(
    model: Model,
    host: Annotated[str | None, typer.Option(help="Address to listen on, as 0.0.0.0; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8000 if not given.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Samples that the model sees at once.")] = None,
    max_wait: Annotated[float | None, typer.Option(help="Milliseconds that a sample waits for others.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    watch: Annotated[Path | None, typer.Option(help="Folder that keeps the evidence of a monitor.")] = None,
    webhook: Annotated[str | None, typer.Option(help="URL that is told of an alarm.")] = None,
    config: Config = None,
    changes: Changes = None,
    device: Device = "auto",
) -> None:
    """Answer requests over HTTP.

    A page to try it is at /, JSON at /v1/predict, the Open Inference Protocol at /v2, all of it at /docs. Clients must
    send the key in HYDRA_API_KEY if it is set. SIGTERM and Ctrl-C end it once all requests are answered. Of a folder
    of models all are served, by the names of their folders.

    \b
    Example:
      hydra-ensembles serve safe
      HYDRA_API_KEY=... hydra-ensembles serve safe --host 0.0.0.0 --max-batch 32 --watch watch/
    """
    given = common.settings_in(locals())
    from ..serve.app import load_all
    from ..serve.app import serve as serving
    from ..serve.batcher import ServeSettings

    name_or_folder, place = given.pop("model"), common.place_of(given.pop("device"))
    (settings,) = common.read_settings([ServeSettings], config, given, changes)
    serving(load_all(name_or_folder, place), settings)


# --- evaluate, report, demo ------------------------------------------------------------------------------------------


def evaluate(
    model: Model,
    id: Annotated[str, typer.Option("--id", help="Labelled in-distribution test set.")],
    ood: Annotated[list[str] | None, typer.Option(help="OOD set, repeatable: near:NAME=DATA, far:, apart:.")] = None,
    shift: Annotated[list[str] | None, typer.Option(help="Labelled set under shift, repeatable: NAME=DATA.")] = None,
    score: Annotated[str, typer.Option(help="Score that detects OOD inputs.")] = "msp",
    name: Annotated[
        str | None, typer.Option(help="What tables call the model; its folder's name if not given.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the evaluation.")] = Path("evaluations"),
    column: Column = None,
    limit: Limit = None,
    batch_size: BatchSize = BATCH,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure a model on its task and on OOD data.

    Writes a file for `report`; after an interruption the same command resumes.

    \b
    Example:
      hydra-ensembles evaluate safe --id test/ --ood near:cars=cars/ --ood far:digits=digits.parquet
      hydra-ensembles evaluate safe --id hub:uoft-cs/cifar100:test
    """
    from ..evaluation.evaluate import evaluate as evaluated
    from ..files import expanded, remove

    ensemble = common.load_model(model, device)
    title = name or expanded(model).resolve().name
    slug = "-".join(re.findall(r"[\w.]+", title)).lower()
    file = expanded(output) / f"{slug}.json"
    reading = common.Reading(ensemble, common.named_columns(column), limit, batch_size)
    test = reading.batches(id)
    groups: dict[str, dict[str, Any]] = {}
    for group, one, spec in _grouped(ood or ()):
        if one in groups.setdefault(group, {}):
            raise DataError(f"two OOD sets are called {one!r}; rename one as near:NAME=DATA")
        groups[group][one] = reading.batches(spec, labelled=False)
    flat = groups.get("", groups)
    shifts = {one: reading.batches(spec) for one, spec in map(common.split_name, shift or ())}
    kept = file.with_suffix(".run")
    how: dict[str, Any] = {"name": title, "score": score, "output": kept, "progress": not quiet}
    evaluation = evaluated(ensemble, test, flat, shifts, **how)
    evaluation.save(file)
    remove(kept)
    print(f"{evaluation}\nwrote {file}; hydra-ensembles report {output} compares all in that folder")


def _grouped(specs: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Group, name and data of each `[GROUP:][NAME=]DATA`."""
    split = [spec.partition(":") if spec.partition(":")[0] in GROUPS else ("", "", spec) for spec in specs]
    if len({bool(group) for group, _, _ in split}) > 1:
        raise DataError(
            f"some OOD sets have no group but others do; write near:, far: or apart: before each of {specs}"
        )
    yield from ((group, *common.split_name(rest)) for group, _, rest in split)


def report(
    paths: Annotated[list[Path], typer.Argument(help="Saved evaluations and costs, or folders that hold them.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="An .html, .md or .csv file.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The method to compare with; the first if not given.")] = None,
    focus: Annotated[str | None, typer.Option(help="The method it is about; the last if not given.")] = None,
) -> None:
    """Compare saved evaluations.

    In a table here, or in a page or a file. Equal names are runs of one method.

    \b
    Example:
      hydra-ensembles report evaluations/
      hydra-ensembles report evaluations/ --output report.html --baseline single
    """
    from ..evaluation.evaluation import Evaluation
    from ..files import read_object
    from ..model.cost import Cost
    from ..report.compare import compare, load_costs
    from ..report.html import write_report

    evaluations, costs = list[Evaluation](), list[Cost]()
    for file in [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]:
        kind = str(read_object(file).get("format"))
        if kind.startswith(EVALUATION):
            evaluations.append(Evaluation.load(file))
        elif kind.startswith(COSTS):
            costs += load_costs(file)
    if not evaluations:
        raise DataError(f"no saved evaluation in {', '.join(map(str, paths))}; hydra-ensembles evaluate writes one")
    if output is None:
        print(compare(evaluations, costs))
        return
    named: dict[str, Any] = {"baseline": baseline, "focus": focus}
    print(f"wrote {write_report(evaluations, output, costs=costs, **named)}")


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("hydra-demo"),
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0,
    quiet: Quiet = False,
) -> None:
    """See how it works, offline, in minutes.

    Makes an ensemble of an embedded model, and leaves a report and a model to try.

    \b
    Example:
      hydra-ensembles demo
    """
    from ..demo.run import run_demo

    folder = output.expanduser()
    table = run_demo(folder, seed=seed, progress=not quiet)
    print(f"{table}\nReport  {folder / 'report.html'}\nModel   {folder / 'model'}\n")
    print(common.next_commands(folder / "model", "info", "predict", "serve"))
