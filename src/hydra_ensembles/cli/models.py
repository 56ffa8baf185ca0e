"""`convert`, `info`, `calibrate`, `fuse`, `export` and `bench`: commands that take models and make folders or files."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import CheckpointError, ConfigError, HydraError
from . import common
from .common import Column, Device, Json, Limit, Model, Models, Output

TOKENS = 128  # length of the texts in `bench`, unless the model's maximum is smaller

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder, timm:NAME or hub:OWNER/NAME.")]


# --- convert ---------------------------------------------------------------------------------------------------------


def convert(
    source: Source,
    output: Output,
    weights: Annotated[Path | None, typer.Option(help="Weights of a timm model, a .safetensors file.")] = None,
    labels: Annotated[str | None, typer.Option(help="Class names: a,b,c or a file with one per line.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Argument of timm.create_model, as img_size=64.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of preprocessing, as crop_fraction=1 or mean=[0.5,0.5,0.5].", metavar="NAME=VALUE"),
    ] = None,
) -> None:
    """Make a folder of a model of another library.

    Takes timm, transformers and sentence-transformers. Its answers are equal to the original's, or it is refused.

    \b
    Example:
      hydra-ensembles convert my-bert/ -o base
      hydra-ensembles convert timm:vit_small_patch16_224 --weights mine.safetensors --labels cat,dog -o base
    """
    from ..convert.convert import convert as converted
    from ..convert.folders import opened_source
    from ..settings import from_plain, to_plain

    folder = common.new_folder(output)
    try:
        foreign, processor, _ = opened_source(source, weights, common.named_values(option))
    except HydraError:
        raise
    except Exception as error:  # libraries also raise errors of the model, the hub client and its HTTP library
        raise CheckpointError(f"{source} could not be loaded with these weights and options: {error!r:.400}") from error
    model = converted(foreign, processor=processor)
    if changes:
        known = model.metadata.preprocessing
        if known is None:
            raise ConfigError("the preprocessing of this model is not known: convert it in Python, with processor=")
        settings = {**to_plain(known), **common.named_values(changes)}
        model = model.with_metadata(preprocessing=from_plain(type(known), settings, "set"))
    if labels is not None:
        names = Path(labels).read_text().splitlines() if Path(labels).is_file() else labels.split(",")
        model = model.with_metadata(labels=tuple(name.strip() for name in names if name.strip()))
    model.save_pretrained(folder)
    print(f"{_described(source, model)}\n\nThe model is in {folder}. {common.next_commands(folder, 'calibrate')}")


# --- info ------------------------------------------------------------------------------------------------------------


def info(model: Model, as_json: Json = False) -> None:
    """Show what is in a model; --json has everything.

    \b
    Example:
      hydra-ensembles info my-model
    """
    from ..model.ensemble import Answering

    loaded = common.load_model(model, "cpu", classifies=False)
    towers = {model: loaded} if isinstance(loaded, Answering) else {"image": loaded.image, "text": loaded.text}
    if as_json:
        facts = {name: _facts(tower) for name, tower in towers.items()}
        print(json.dumps(facts if len(towers) > 1 else facts[model], indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(_described(name, tower) for name, tower in towers.items()))


def _facts(ensemble: Any) -> dict[str, Any]:
    """Everything about an ensemble, as plain data."""
    from ..model.ensemble import stored_metadata
    from ..settings import to_plain

    counts, metadata = ensemble.describe(), stored_metadata(ensemble.metadata)[0]
    (metadata["preprocessing"] or {}).pop("tokenizer", None)  # a whole vocabulary
    return {
        "kind": ensemble.kind,
        "members": ensemble.num_members,
        "trunk": ensemble.front.config.trunk,
        "classes": ensemble.num_classes,
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "parameters": counts.parameters,
        "multiply_adds": counts.multiply_adds,
        **metadata,
        "config": to_plain(ensemble.config),
    }


def _described(title: str, ensemble: Any) -> str:
    """What a model is, its heads, and how it was made."""
    known = ensemble.metadata
    fitted = {"preprocessing": known.preprocessing, "calibration": known.calibration, "familiarity": known.familiarity}
    has = ", ".join(name for name, value in fitted.items() if value is not None) or "no preprocessing, no thresholds"
    about = f"{ensemble.kind} model with {ensemble.num_classes} classes: {', '.join(known.labels) or 'no names'}"
    return "\n".join([title, about, f"has {has}", str(ensemble.describe()), *known.history])


# --- calibrate, fuse, export -----------------------------------------------------------------------------------------


def calibrate(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="Held-out labelled data, not used in training.")],
    output: Output,
    risk: Annotated[
        list[str] | None, typer.Option(help="Largest share of wrong answers among accepted ones, or LABEL=SHARE.")
    ] = None,
    confidence: Annotated[str, typer.Option(help="Probability that this holds; none: on average only.")] = "0.95",
    share: Annotated[float | None, typer.Option(help="Share to accept instead of a risk; else 0.95.")] = None,
    unfamiliar: Annotated[float, typer.Option(help="Largest share of such inputs declined as unfamiliar.")] = 0.05,
    train: Annotated[str | None, typer.Option(help="Other labelled data for the fits: all of --data certify.")] = None,
    groups: Annotated[Path | None, typer.Option(help="File with the group of each row of --data, a line each.")] = None,
    score: Annotated[str, typer.Option(help="Score for how unsure an answer is.")] = "msp",
    familiarity: Annotated[str, typer.Option(help="Score for how familiar an input is; none for none.")] = "auto",
    column: Column = None,
    limit: Limit = None,
    device: Device = "auto",
) -> None:
    """Teach a trained model when not to answer.

    With --risk, at most that share of the accepted answers on inputs like these is wrong. Half of the data, which must
    be held out, fits a temperature and the familiarity; the other half certifies.

    \b
    Example:
      hydra-ensembles calibrate base --data val/ --risk 0.02 -o safe
      hydra-ensembles calibrate my-bert --data val.csv --share 0.9 -o safe
    """
    from ..batches import class_names_in
    from ..calibrate import calibrate as calibrated

    folder = common.new_folder(output)
    ensemble = common.load_model(model, device)
    reading = common.Reading(ensemble, columns=common.named_columns(column), limit=limit)
    held_out = reading.batches(data)
    if not ensemble.metadata.labels:
        ensemble = ensemble.with_metadata(labels=class_names_in(held_out, ensemble.num_classes))
    risks: dict[str, list[Any]] = {}
    for label, _, value in (one.rpartition("=") for one in risk or []):
        risks.setdefault(label, []).append(common.parse_yaml(value, "risk"))
    options: dict[str, Any] = {
        "risk": risks[""] if set(risks) == {""} else risks or None,
        "confidence": None if confidence == "none" else common.parse_yaml(confidence, "confidence"),
        "share": share,
        "unfamiliar": unfamiliar,
        "train": None if train is None else reading.batches(train),
        "groups": None if groups is None else groups.read_text().splitlines(),
        "score": score,
        "familiarity": None if familiarity == "none" else familiarity,
    }
    made: Any = calibrated(ensemble, held_out, **options)
    for promise in made.metadata.calibration.promises:
        print(f"Promise: {promise}.")
    _save(made, folder, "predict", "evaluate")


def fuse(
    models: Models,
    output: Output,
    how: Annotated[
        Literal["hydra", "soup", "stack", "cascade"], typer.Option("--as", help="What to make of them.")
    ] = "hydra",
    average: Annotated[str, typer.Option(help="First layers to average: a number, or a share below 1.")] = "0",
    mlp: Annotated[Literal["mean", "separate"], typer.Option(help="How the MLPs above are fused.")] = "mean",
    adapter: Annotated[
        list[str] | None, typer.Option(help="Folder of an adapter of peft, repeatable; MODEL is then its model.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Of a cascade: held-out labelled data.")] = None,
    ask: Annotated[
        list[float] | None, typer.Option(help="Of a cascade: share of rows that goes on, for each model but the last.")
    ] = None,
    distill: Annotated[
        str | None, typer.Option("--distill", help="Of a hydra: data, without labels, to learn its models back from.")
    ] = None,
    column: Column = None,
    limit: Limit = None,
) -> None:
    """Fuse several trainings of one model.

    A hydra runs in one pass, a soup is their mean, a stack is a Deep Ensemble. Fine-tunings of one model differ in
    every layer: average 0.8 with separate MLPs averages the first four fifths of the layers, which then run once.
    With --distill its members then learn to answer like the models that they came from; stopped, the same command
    resumes. A cascade, of any models from cheap to good, asks the next one where it is unsure; it needs --data.

    \b
    Example:
      hydra-ensembles fuse seed-0 seed-1 seed-2 --average 0.8 --mlp separate --distill train/ -o my-hydra
      hydra-ensembles fuse small large --as cascade --data val/ --ask 0.1 -o chain
      hydra-ensembles fuse my-llama/ --adapter lora-0 --adapter lora-1 -o members
    """
    from ..cascade import Cascade, CascadeSettings, cascade
    from ..fuse import fuse as fused
    from ..fuse import soup
    from ..model.ensemble import Ensemble

    folder = common.new_folder(output)
    loaded = [] if adapter else [common.load_model(name, "auto" if distill else "cpu") for name in models]
    if adapter:
        made = fused(models[0], adapters=adapter)
    elif how == "hydra":
        made = fused(loaded, average=common.parse_yaml(average, "average"), mlp=mlp)
    elif how == "cascade":
        if data is None:
            raise ConfigError("a cascade needs held-out labelled data: --data")
        nothing = (1.0,) * (len(loaded) - 1)
        reading = common.Reading(
            Cascade(loaded, CascadeSettings(nothing, nothing)), columns=common.named_columns(column), limit=limit
        )
        made = cascade(loaded, reading.batches(data), ask=ask[0] if ask and len(ask) == 1 else ask)
    else:
        made = soup(loaded) if how == "soup" else Ensemble.stack(loaded)
    if distill is None:
        _save(made, folder, "calibrate")
        return
    from ..data.dataset import TrainTransform, batches
    from ..files import remove
    from ..training.distill import distill as distilled

    reading = common.Reading(made, columns=common.named_columns(column), limit=limit)
    rows, prepare = reading.data(distill, labelled=False), common.preprocessing_of(made)
    if made.kind == "image":
        prepare = TrainTransform(made.metadata.preprocessing, rand_augment=None)
    state = folder.with_name(f"{folder.name}.training")
    lessons = batches(rows, prepare, reading.batch_size, shuffle=True)
    _save(distilled(made, loaded, lessons, output=state), folder, "calibrate")
    remove(state)


def _save(model: Any, folder: Path, *commands: str) -> None:
    """Save a model; print what it is, its last history entry, its folder, and commands to try next."""
    model.save_pretrained(folder)
    print(f"{model.describe()}\n{model.metadata.history[-1]}\n\nThe model is in {folder}.")
    print(common.next_commands(folder, *commands))


def export(
    model: Model,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, NAME.onnx.")],
    tolerance: Annotated[float, typer.Option(help="How much answers may differ.")] = 5e-5,
) -> None:
    """Write a model as an ONNX file that runs elsewhere.

    It runs without this library; its answers are compared before it is kept.

    \b
    Example:
      hydra-ensembles export safe model.onnx
    """
    from ..serve.export import export as exported

    path = exported(common.load_model(model, "cpu"), file, tolerance=tolerance)
    print(f"wrote {path}, with class names and preprocessing beside it")


# --- bench -----------------------------------------------------------------------------------------------------------


def bench(
    model: Model,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    baseline: Annotated[Literal["single", "deep"], typer.Option(help="One model, or as many as members.")] = "single",
    optimize: Annotated[bool, typer.Option("--optimize", help="Optimize both for inference.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 20,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON for `report`, too.")] = None,
    device: Device = "auto",
) -> None:
    """Measure what a model costs.

    Beside it runs the same architecture with all heads; both take turns on the same inputs.

    \b
    Example:
      hydra-ensembles bench my-hydra --batch 1,8,32 --baseline deep
    """
    from ..model.cost import measure_costs
    from ..report.compare import save_costs

    ensemble = common.load_model(model, device)
    if ensemble.raw:
        raise ConfigError("the stages of this cascade read their inputs differently: give them to bench one by one")
    ensemble.by_share = True  # of a cascade, as blank inputs say nothing of the rows that go on
    members = 1 if baseline == "single" else ensemble.num_members
    measured = {baseline: _whole(ensemble, members), Path(model).name or model: ensemble}
    if optimize:
        measured = {name: one.optimize() for name, one in measured.items()}
    costs = [
        cost for size in batch.split(",") for cost in measure_costs(measured, _inputs(ensemble, size), repeats=repeats)
    ]
    if output is not None:
        save_costs(output, costs)
    print(f"on {costs[0].device}, medians of {repeats} runs\n")
    print(f"{'model':<24}{'batch':>6}{'ms':>10}{'ratio':>8}{'inputs/s':>10}")
    for cost in costs:
        per_second = cost.batch / cost.latency_ms * 1e3
        print(f"{cost.name:<24}{cost.batch:>6}{cost.latency_ms:>10.2f}{cost.latency_ratio:>7.2f}×{per_second:>10,.0f}")


def _whole(ensemble: Any, members: int) -> Any:
    """Randomly initialised models of the same architecture with all heads; cost does not depend on the weights."""
    import torch

    from ..model.config import EnsembleConfig
    from ..model.ensemble import Ensemble

    config = ensemble.front.config
    with torch.random.fork_rng(), torch.device(ensemble.device):
        fresh = Ensemble(EnsembleConfig(config.stem, config.encoder, config.readout, ((),) * members))
    return fresh.to(ensemble.dtype).eval()


def _inputs(ensemble: Any, size: str) -> Any:
    """Blank inputs: the cost does not depend on what they show."""
    import torch

    from ..model.config import PatchStemConfig

    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(f"batch takes whole numbers, such as 1,8,32; got {size!r}")
    stem, place = ensemble.front.config.stem, ensemble.device
    if isinstance(stem, PatchStemConfig):
        return torch.zeros(int(size), stem.channels, *stem.image_size, dtype=ensemble.dtype, device=place)
    return torch.zeros(int(size), min(TOKENS, stem.max_tokens), dtype=torch.long, device=place)
