"""`hydra-ensembles predict`, `info` and `bench`: what a model answers, contains and costs."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from .._utils import few_digits
from ..data.dataset import IMAGE_SUFFIXES, AnyDataset, decode_image, images_below, read_image
from ..data.loading import TABLE_SUFFIXES, Columns, load
from ..errors import ConfigError, DataError
from ..files import expanded, read_file
from ..model.config import GROUPS, EnsembleConfig, PatchStemConfig
from ..model.cost import Cost, measure_costs
from ..model.ensemble import Ensemble
from ..model.metadata import ACCEPTS_ALL, Calibration
from ..prediction import Prediction
from ..preprocessing import TextPreprocessing
from ..report.compare import FORMAT as COSTS
from ..report.compare import save_costs
from ..report.table import csv_text
from ..schema import from_plain, to_plain
from ..serve.rows import LINES
from .command import Json, NamedColumns, assign, command, did_you_mean, emit, emit_json, require_replaceable
from .sources import USUAL_BATCH, ModelSettings, load_classifier, load_model, require_preprocessing

NUMBERS = ("confidence", "epistemic", "entropy", "disagreement", "score", "familiarity")  # in `prediction.OUTPUTS`
IN_TABLE = ("confidence", "epistemic", "familiarity")  # those that fit into a terminal
LONGEST = 60  # maximum number of characters of an input in a table
KEPT, PRUNED = "■", "·"
SHOWN = 12  # maximum number of list items to print
TOKENS = 128  # length of the texts in `bench`, unless the model's maximum is smaller

NamedItem = tuple[str, Callable[[], Any]]
"""One input: its name in the output, and a function that reads its content."""
Baseline = Literal["single", "deep"]  # models that `bench` also measures
OutputFormat = Literal["table", "jsonl", "csv"]


# --- predict ---------------------------------------------------------------------------------------------------------


@command
def predict(
    model: ModelSettings,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Images, folders, text files, tables; - for standard input."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", "-t", help="A text to label, repeatable.")] = None,
    format: Annotated[OutputFormat, typer.Option("--format", "-f", help="Format of the output.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Abstain if the score is above this.")] = None,
    column: NamedColumns = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = USUAL_BATCH,
) -> None:
    """Label images or texts, or abstain.

    The verdict is accept or abstain, from the thresholds that calibrate or build stored with the model; the reason is
    unsure (--threshold overrides its threshold) or unfamiliar. A model without a threshold gives no verdict.

    Examples:
      hydra-ensembles predict run photo.jpg more-photos/
      hydra-ensembles predict run photos/ --format jsonl --output predictions.jsonl
      hydra-ensembles predict my-hydra-bert --text "a fine film" --text "two hours too long"
      cat reviews.txt | hydra-ensembles predict my-hydra-bert - --format csv
    """
    require_replaceable(output, inputs=inputs or ())
    ensemble = load_classifier(model)
    require_preprocessing(ensemble)
    if threshold is not None:
        stored = ensemble.metadata.calibration or Calibration()
        ensemble = ensemble.with_metadata(calibration=replace(stored, threshold=threshold))
    items = find_inputs(ensemble.kind, inputs or (), text or (), named_columns(column))
    order = list(range(len(items)))
    if ensemble.kind == "text":  # texts of similar length form a batch: padding costs as much as text
        order.sort(key=lambda index: _length(items[index]))
    found: dict[int, dict[str, Any] | DataError] = {}
    for start in range(0, len(items), batch_size):
        chosen = order[start : start + batch_size]
        found |= zip(chosen, _answered(ensemble, [items[index] for index in chosen]), strict=True)
    in_order = [found[index] for index in range(len(items))]
    problems = [answer for answer in in_order if isinstance(answer, DataError)]
    answers = [answer for answer in in_order if not isinstance(answer, DataError)]
    if not answers:
        raise problems[0]
    emit(_formatted(answers, format), output)
    if answers[0]["verdict"] is None:
        print("no verdict: this model has no calibrated threshold; calibrate stores one, or give --threshold",
              file=sys.stderr)  # fmt: skip
    if problems:
        missing = f"{len(problems)} of {len(items)} inputs have no answer, the others do"
        raise DataError(f"{missing}; the first: {problems[0]}") from problems[0]


def named_columns(pairs: Iterable[str] | None) -> Columns:
    """The columns of a table from `ROLE=NAME`."""
    columns: dict[str, Any] = {}
    for pair in pairs or ():
        assign(columns, pair, get_type_hints(Columns))
    return from_plain(Columns, columns, "columns")


def find_inputs(kind: str, inputs: Sequence[str], texts: Sequence[str], columns: Columns) -> list[NamedItem]:
    """The inputs that the arguments name, in order, for a model of this kind; `texts` come last.

    Arguments are files, folders, and `-` for standard input (one image, or lines of text). `columns` are for tables.
    """
    if kind == "image" and texts:
        raise DataError("got a text, but the model reads images; give image files or folders")
    items: list[NamedItem] = []
    for argument in inputs:
        path = expanded(argument)
        if argument == "-" and sys.stdin is None:
            raise DataError("- is the standard input, which is closed; open it, or name files")
        if argument != "-" and not path.exists():
            hint = f"; for a text write --text {argument!r}" if kind == "text" else ""
            raise DataError(f"{path} does not exist{did_you_mean(path)}{hint}")
        if path.is_file() and path.suffix.lower() in TABLE_SUFFIXES:
            data = load(path, columns=columns, labels="optional")
            if data.kind != kind:
                raise DataError(f"{path} holds {data.kind}s, but the model reads {kind}s")
            items += [(f"{path}:{row}", partial(_content, data, row)) for row in range(len(data))]
        elif kind == "image" and argument == "-":
            items.append((argument, partial(decode_image, sys.stdin.buffer.read(), "standard input")))
        elif kind == "image":
            images = images_below(path) if path.is_dir() else [path]
            if not images:
                raise DataError(f"{path} has no images in it (suffixes read: {', '.join(IMAGE_SUFFIXES)})")
            items += [(str(file), partial(read_image, file)) for file in images]
        else:
            items += [(line, partial(str, line)) for line in _texts(argument, path)]
    items += [(text, partial(str, text)) for text in texts]
    if not items:
        remedy = "image files or folders" if kind == "image" else 'texts: --text "...", a file, or - for standard input'
        raise DataError(f"got nothing to predict; give {remedy}")
    return items


def _content(data: AnyDataset, row: int) -> Any:
    return data[row][0]


def _length(item: NamedItem) -> int:
    """Characters of a text; 0 if it cannot be read, which is reported when it is to be answered."""
    try:
        return len(str(item[1]()))
    except DataError:
        return 0


def _texts(argument: str, path: Path) -> list[str]:
    """The lines of a file or of standard input; blank lines are skipped, and reported if other lines follow."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, but the model reads text; give a file with one text per line")
    if argument != "-" and path.suffix.lower() not in ("", LINES):
        known = f"{', '.join(TABLE_SUFFIXES)}, or {LINES} for one text per line"
        raise DataError(f"{path} is no file of texts by its suffix; accepted are {known}. Rename it")
    source = "standard input" if argument == "-" else path
    try:
        content = sys.stdin.read() if argument == "-" else read_file(path, most=None).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 text ({error})") from error
    plain = content.removeprefix("\ufeff").rstrip()  # the UTF-8 byte order mark is not text
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", plain)]
    texts = [line for line in lines if line]
    if not texts:
        raise DataError(f"{source} has no text; give one text per line")
    if len(texts) < len(lines):
        print(f"{len(lines) - len(texts)} blank lines of {source} were skipped", file=sys.stderr)
    return texts


def _answered(ensemble: Ensemble, items: Sequence[NamedItem]) -> list[dict[str, Any] | DataError]:
    """Answers to a batch; if it fails, each input is tried alone, and has an answer or its error."""
    try:
        return [*_answers([name for name, _ in items], ensemble.predict([read() for _, read in items]))]
    except DataError as error:
        return [error] if len(items) == 1 else [answer for item in items for answer in _answered(ensemble, [item])]


def _answers(names: Sequence[str], prediction: Prediction) -> list[dict[str, Any]]:
    """Rows of the output; without class names a label is a class index; uncertainties are in nats."""
    plain = prediction.to_dict()
    words = {None: None, True: "accept", False: "abstain"}
    columns = {
        "input": names,
        "label": [str(label) for label in plain["label"]],
        **{name: plain[name] for name in NUMBERS},
        "verdict": [words[accepted] for accepted in plain["accept"]],
        "reason": plain["reason"],
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _formatted(answers: Sequence[dict[str, Any]], format: OutputFormat) -> str | Table:
    if format == "jsonl":
        return "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    if format == "csv":
        return csv_text(answers, list(answers[0]))
    table = Table(box=SIMPLE, padding=(0, 1), collapse_padding=True)
    for name in ("input", "label"):
        table.add_column(name, overflow="fold")
    shown = [name for name in IN_TABLE if answers[0][name] is not None]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for answer in answers:
        numbers = (f"{answer[name]:.3f}" for name in shown)
        style = "yellow" if answer["verdict"] == "abstain" else None
        verdict = answer["verdict"] or "–" if answer["reason"] is None else f"{answer['verdict']}: {answer['reason']}"
        table.add_row(escape(_short(answer["input"])), escape(answer["label"]), *numbers, verdict, style=style)
    return table


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"…{text[-LONGEST:]}" if "/" in text else f"{text[:LONGEST]}…"  # of a path, the end


def next_commands(folder: Path, kind: str, *commands: str) -> str:
    """Suggested commands for a model in this folder: `info`, and the given ones."""
    arguments = {"info": "", "calibrate": " --id DATA --output FOLDER", "evaluate": " --id DATA --ood near:NAME=DATA"}
    arguments["predict"] = " IMAGE..." if kind == "image" else " --text TEXT"
    place = shlex.quote(str(folder))
    return "\n".join(f"  hydra-ensembles {name} {place}{arguments[name]}" for name in ("info", *commands))


# --- info ------------------------------------------------------------------------------------------------------------


@command
def info(model: ModelSettings, as_json: Json = False) -> None:
    """Show what is in a model, with a map of its heads.

    Examples:
      hydra-ensembles info run
      hydra-ensembles info my-hydra --json
      hydra-ensembles info timm:vit_base_patch16_224
    """
    loaded = load_model(model)
    towers = {model.model: loaded} if isinstance(loaded, Ensemble) else {"image": loaded.image, "text": loaded.text}
    if as_json:
        facts = {name: _facts(tower) for name, tower in towers.items()}
        emit_json(facts if len(towers) > 1 else facts[model.model])
    else:
        print("\n\n".join(_described(name, tower) for name, tower in towers.items()))


def _facts(ensemble: Ensemble) -> dict[str, Any]:
    """Everything about an ensemble, as plain data."""
    fitted, calibration = ensemble.metadata.familiarity, ensemble.metadata.calibration
    calibration = calibration and calibration.brief
    description = ensemble.describe()
    metadata = to_plain(replace(ensemble.metadata.plain, calibration=calibration))
    if isinstance(ensemble.metadata.preprocessing, TextPreprocessing):
        metadata["preprocessing"]["tokenizer"] = bool(metadata["preprocessing"]["tokenizer"])  # not the vocabulary
    return {
        "kind": ensemble.kind,
        "members": ensemble.num_members,
        "trunk": ensemble.config.trunk,
        "classes": ensemble.num_classes,
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "parameters": description.parameters,
        "multiply_adds": description.multiply_adds,
        **metadata,
        "familiarity": None if fitted is None else to_plain(replace(fitted.settings, reference=None, rows=())),
        "config": to_plain(ensemble.config),
    }


def _described(title: str, ensemble: Ensemble) -> str:
    """The facts as text, and the map of heads."""
    facts, config = _facts(ensemble), ensemble.config
    encoder = config.encoder
    shared = ", ".join(group for group in GROUPS if getattr(config.sharing, group))
    common = f", shared by all members: {shared or 'nothing'}, layers that run once: {config.trunk}"
    counts = f"{few_digits(facts['parameters'] / 1e6)} M, {few_digits(facts['multiply_adds'] / 1e9)} G multiply-adds"
    rows = [
        ("source", facts["source"] or "unknown"),
        ("members", f"{facts['members']}{common if ensemble.num_members > 1 else ''}"),
        ("encoder", f"{encoder.layers} layers of {encoder.heads} heads, width {encoder.width}, {facts['dtype']}"),
        ("classes", f"{facts['classes']}: {_value(facts['labels'] or 'without names')}"),
        ("parameters", counts),
        ("preprocessing", preprocessing_of(ensemble)),
        ("calibration", _value(facts["calibration"] or "none: predictions come without a verdict")),
        ("familiarity", _value(facts["familiarity"] or "not fitted: no input is called unfamiliar")),
        *(("metric", f"{name} = {value:.4g}") for name, value in facts["metrics"].items()),
        *(("" if index else "history", line) for index, line in enumerate(facts["history"])),
    ]
    kept, total = sum(len(layer) for member in config.heads for layer in member), sum(config.head_counts)
    heads = f"heads kept: {kept} of {facts['members'] * total} ({KEPT} kept, {PRUNED} pruned)"
    heads += "" if config.pooling is None else "; the last row is the attention that pools"
    lines = (f"  {name:<14} {value}" for name, value in rows)
    return "\n".join([title, *lines, "", heads, *_head_map(config.heads, config.head_counts)])


def preprocessing_of(ensemble: Ensemble) -> str:
    """The preprocessing of raw inputs and its origin, as text."""
    facts = _facts(ensemble)
    origin = ensemble.metadata.preprocessing_from
    if facts["preprocessing"] is None:
        return f"unknown: the model takes {ensemble.kind} tensors only" + (f" ({origin})" if origin else "")
    return _value(facts["preprocessing"]) + (f" (from: {origin})" if origin else "")


def _value(value: Any) -> str:
    """Plain data as text, without empty values; long lists are shortened."""
    if isinstance(value, Mapping):
        items = {name: item for name, item in value.items() if name != "kind" and item is not None and item != []}
        return ", ".join(f"{name} {_value(item)}" for name, item in items.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value[:SHOWN])) + (", ..." if len(value) > SHOWN else "")
    if isinstance(value, float):
        return f"{value:.4g}" if value < ACCEPTS_ALL else "that nothing exceeds"
    return str(value)


def _head_map(heads: Sequence[Sequence[Sequence[int]]], counts: Sequence[int]) -> list[str]:
    """A map of the heads each member keeps, from `[member][layer]` indices: one row per layer, one block per member."""
    column = max(*counts, len(f"member {len(heads) - 1}")) + 2
    lines = ["layer  " + "".join(f"member {member}".ljust(column) for member in range(len(heads)))]
    for layer, members in enumerate(zip(*heads, strict=True)):
        cells = ("".join(KEPT if head in kept else PRUNED for head in range(counts[layer])) for kept in members)
        lines.append(f"{layer:>5}  {''.join(cell.ljust(column) for cell in cells)}")
    return [line.rstrip() for line in lines]


# --- bench -----------------------------------------------------------------------------------------------------------


@command
def bench(
    model: ModelSettings,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Batch sizes.")] = "1,8",
    baseline: Annotated[
        list[Baseline] | None, typer.Option(help="What to compare with, repeatable; single if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the table calls the model.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each model.")] = 20,
    optimize: Annotated[bool, typer.Option("--optimize", help="Measure the optimized ensemble, too.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the costs as JSON, too.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what a model costs, compared with baselines.

    Measures latency, throughput, parameters and memory. The baseline single is the same architecture with one member
    and all heads, deep as many such models as the ensemble has members. All take turns on the same random inputs;
    ratios are to the first baseline. compare and report read the file of --output, and use its last batch size.

    Examples:
      hydra-ensembles bench run
      hydra-ensembles bench run --batch 1,8,32 --baseline single --baseline deep --output evaluations/costs.json
    """
    sizes = batch.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,4}", size) for size in sizes):
        raise ConfigError(f"batch takes positive whole numbers of up to 5 digits, such as 1,8,32; got {batch}")
    require_replaceable(output, COSTS)
    ensemble = load_classifier(model)
    title = name or model.own_name
    members = {"single": 1, "deep": ensemble.num_members}
    measured: dict[str, Callable[[Any], Any]] = {}
    for kind in baseline or ["single"]:
        measured[kind] = _whole(ensemble, members[kind])
    if title in measured:
        raise ConfigError(f"the model and a baseline are both called {title!r}; give the model another name")
    measured[title] = ensemble
    if optimize:
        measured[f"{title}, optimized"] = ensemble.optimize()
    costs: list[Cost] = []
    for size in sizes:
        costs += measure_costs(measured, _inputs(ensemble, int(size)), repeats=repeats)
    if output is not None:
        save_costs(output, costs)
    if as_json:
        emit_json(to_plain(tuple(costs)))
        return
    Console().print(_cost_table(costs))
    if output is not None:
        print(f"wrote {output}")


def _whole(ensemble: Ensemble, members: int) -> Ensemble:
    """Randomly initialised models of the same architecture with all heads; cost does not depend on the weights."""
    config = ensemble.config
    with torch.random.fork_rng(), torch.device(ensemble.device):
        heads = config.encoder.all_heads(members)
        fresh = Ensemble(EnsembleConfig(config.stem, config.encoder, config.readout, heads))
    return fresh.to(ensemble.dtype).eval()


def _inputs(ensemble: Ensemble, size: int) -> Tensor:
    stem = ensemble.config.stem
    generator = torch.Generator().manual_seed(0)
    if isinstance(stem, PatchStemConfig):
        images = torch.randn(size, stem.channels, *stem.image_size, generator=generator)  # [B, channels, H, W]
        return images.to(ensemble.device, ensemble.dtype)
    length = min(TOKENS, stem.max_tokens)
    return torch.randint(0, stem.vocabulary, (size, length), generator=generator).to(ensemble.device)  # [B, T]


def _cost_table(costs: list[Cost]) -> Table:
    table = Table("model", title=f"on {costs[0].device}, medians of {costs[0].repeats} runs", title_justify="left")
    for heading in ("batch", "latency (ms)", "ratio", "inputs/s", "params (M)", "peak (MB)"):
        table.add_column(heading, justify="right")
    for index, cost in enumerate(costs):
        table.add_row(
            cost.name,
            str(cost.batch),
            f"{cost.latency_ms:.2f}",
            f"{cost.latency_ratio:.2f}×",
            f"{cost.batch / cost.latency_ms * 1e3:,.0f}",
            _millions(cost.parameters),
            _millions(cost.peak_memory_bytes),
            end_section=index + 1 < len(costs) and costs[index + 1].batch != cost.batch,
        )
    return table


def _millions(value: int | None) -> str:
    return "–" if value is None else few_digits(value / 1e6)
