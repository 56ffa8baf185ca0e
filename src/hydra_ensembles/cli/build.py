"""`hydra-ensembles build`: a Hydra Ensemble from one trained model."""

from pathlib import Path
from typing import Annotated

import typer

from ..circuit.scores import Method
from ..fuse import Fusion, StemFusion
from ..heads.taylor import Scope
from ..pipeline.settings import Strategy
from . import options
from .build_run import run_build
from .build_settings import resolve_build
from .errors import one_line_errors
from .yaml_file import settings_given

EXAMPLES = """\b
Examples:
  hydra-ensembles build timm:vit_base_patch16_224 --id val/ --ood other/ --prune 24 --output run
  hydra-ensembles build timm:vit_small_patch16_224 --weights mine.safetensors --id val/ --ood other/ --prune 12 -o run
  hydra-ensembles build my-bert/ --id val.csv --strategy taylor --prune 12 --output run
  hydra-ensembles build --config run/config.yaml

MODEL is a folder, timm:NAME or hf:ID. Data are a folder of images with a sub-folder per class, a Parquet, CSV or
JSONL file, hf:NAME:SPLIT, or a suite. The circuit strategies need --ood; taylor and random do not.
"""

DataOption = str | None


@one_line_errors
def build(
    model: options.OptionalModelArgument = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings; flags win.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Run folder.", metavar="FOLDER")] = None,
    id: Annotated[DataOption, typer.Option("--id", help="Held-out labelled data.", metavar="DATA")] = None,
    ood: Annotated[DataOption, typer.Option("--ood", help="Unlike data, for circuits.", metavar="DATA")] = None,
    train: Annotated[DataOption, typer.Option("--train", help="Labelled training data.", metavar="DATA")] = None,
    validation: Annotated[
        DataOption, typer.Option("--validation", help="For calibration; half of --id if not given.", metavar="DATA")
    ] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Suite that gives the sets not named.")] = None,
    members: Annotated[int | None, typer.Option("--members", "-m", help="Number of members; 3 if not given.")] = None,
    prune: Annotated[int | None, typer.Option("--prune", "-p", help="Heads each member loses.")] = None,
    strategy: Annotated[Strategy | None, typer.Option("--strategy", help="How heads are chosen.")] = None,
    method: Annotated[Method | None, typer.Option("--method", help="How circuits are extracted.")] = None,
    pool: Annotated[int | None, typer.Option("--pool", help="Heads to draw members from.")] = None,
    taylor_scope: Annotated[Scope | None, typer.Option("--taylor-scope", help="Compare heads within a layer.")] = None,
    calibration_batches: Annotated[
        int | None, typer.Option("--calibration-batches", help="Batches a Taylor ranking reads.")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Preset for fine-tuning; none leaves it out.")] = None,
    recipe_option: Annotated[
        list[str] | None, typer.Option("--recipe-option", help="Setting of the recipe.", metavar="NAME=VALUE")
    ] = None,
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="Random crops and flips of training images.")
    ] = None,
    shared_layers: Annotated[int | None, typer.Option("--shared-layers", help="Layers that members share.")] = None,
    stem: Annotated[StemFusion | None, typer.Option("--stem", help="How the stem is fused.")] = None,
    mlp: Annotated[Fusion | None, typer.Option("--mlp", help="How MLPs are fused.")] = None,
    norms: Annotated[Fusion | None, typer.Option("--norms", help="How norms are fused.")] = None,
    readout: Annotated[Fusion | None, typer.Option("--readout", help="How readouts are fused.")] = None,
    calibrate: Annotated[
        bool | None, typer.Option("--calibrate/--no-calibrate", help="Fit temperature and threshold at the end.")
    ] = None,
    per_member_temperature: Annotated[
        bool | None, typer.Option("--per-member-temperature", help="A temperature for each member.")
    ] = None,
    accepted_share: Annotated[
        float | None, typer.Option("--accepted-share", help="Share of held-out data to accept; 0.95 if not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Draws halves, batches and members.")] = None,
    train_batch_size: Annotated[
        int | None, typer.Option("--train-batch-size", help="Samples a training batch.")
    ] = None,
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
    """Make a Hydra Ensemble: rank heads, prune a copy per member, fine-tune if asked, fuse, calibrate.

    Every stage leaves its product in the run folder, together with config.yaml. A build that was interrupted goes on
    where it stopped when the same command is given again.
    """
    pairs = {"model_option": "model_options", "recipe_option": "recipe_options", "column": "columns"}
    flags = settings_given(locals(), pairs, leave_out=("config", "quiet", "pairs"))
    run_build(resolve_build(config, flags), progress=not quiet)
