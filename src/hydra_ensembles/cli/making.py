"""`build` and `search`: an ensemble from one trained model, or the best one for a price."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError
from . import common
from .common import Changes, Column, Config, Limit, Quiet, Recipe

SYNTHETIC = "synthetic"
PER_RANKING = 2  # times as many batches as a Taylor ranking reads, so that members are ranked on different ones

Data = Annotated[str | None, typer.Option(help="Held-out labelled data.")]
Ood = Annotated[list[str] | None, typer.Option(help="OOD data: [NAME=]DATA, repeatable, or synthetic.")]
Train = Annotated[str | None, typer.Option(help="Labelled training data.")]
Run = Annotated[Path | None, typer.Option("--output", "-o", help="Run folder.")]


@dataclass(frozen=True)
class Sources:
    """Inputs and output of a build or a search, as in a file of settings."""

    model: str
    output: str
    id: str | None = None
    ood: tuple[str, ...] = ()
    train: str | None = None
    validation: str | None = None  # labelled data to calibrate on; half of id if not given
    models: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    device: str = "auto"


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search; see `he.search`."""

    cost: float = 1.5
    candidates: tuple[Any, ...] | None = None
    recipe: Any = None
    familiarity: str = "mahalanobis"
    price: str = "latency"
    batch_size: int = 32
    seed: int = 0


def build(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a converted model.")] = None,
    output: Run = None,
    id: Data = None,
    ood: Ood = None,
    train: Train = None,
    members: Annotated[int | None, typer.Option("--members", "-m", help="Number of members; 3 if not given.")] = None,
    prune: Annotated[int | None, typer.Option("--prune", "-p", help="Heads each member loses.")] = None,
    strategy: Annotated[str | None, typer.Option(help="circuit, taylor, sampled, random or branches.")] = None,
    shared_layers: Annotated[int | None, typer.Option(help="First layers that all members share.")] = None,
    recipe: Recipe = None,
    distill: Annotated[
        bool | None, typer.Option("--distill", help="Members then learn back what pruning or fusing took from them.")
    ] = None,
    column: Column = None,
    limit: Limit = None,
    config: Config = None,
    changes: Changes = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = None,
    quiet: Quiet = False,
) -> None:
    """Make an ensemble from one trained model.

    Ranks heads, prunes members, trains them if asked, fuses, calibrates. Every step is kept in the run folder; an
    interrupted build resumes with the same command. The strategies circuit and sampled need --ood.

    \b
    Example:
      hydra-ensembles build my-bert --id val.csv --ood news.csv --train train.csv --recipe sst2 -o run
      hydra-ensembles build my-vit --id val/ --ood synthetic --prune 12 --shared-layers 0 -o run
      hydra-ensembles build --config settings.yaml
    """
    given = common.settings_in(locals())
    from ..pipeline.build import RESULT
    from ..pipeline.build import build as built
    from ..pipeline.settings import HydraConfig

    given["columns"] = common.named_columns(column)
    sources, hydra = common.read_settings([Sources, HydraConfig], config, given, changes)
    ensemble, sets = model_and_sets(sources, hydra)
    folder = Path(sources.output)
    made = built(ensemble, hydra, **sets, output=folder, progress=not quiet)
    print(f"{made.describe()}\n\nThe ensemble is in {folder / RESULT}.")
    print(common.next_commands(folder, "predict", "evaluate"))


def search(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Folder of the model, and of other trainings of it.")
    ] = None,
    output: Run = None,
    id: Data = None,
    ood: Ood = None,
    train: Train = None,
    cost: Annotated[float | None, typer.Option(help="Highest price, in prices of the model; 1.5 if not given.")] = None,
    candidates: Annotated[Path | None, typer.Option(help="YAML file with a list of settings of build.")] = None,
    recipe: Recipe = None,
    limit: Limit = None,
    config: Config = None,
    changes: Changes = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what the candidates would cost.")] = False,
    quiet: Quiet = False,
) -> None:
    """Find the best ensemble for a price.

    Builds candidates, judges them on held-out data, and chooses. The choice is nowhere worse than the model. Every
    step is kept; an interrupted search resumes with the same command.

    \b
    Example:
      hydra-ensembles search base --id val/ --ood other/ --train train/ --cost 1.5 -o search
      hydra-ensembles search base --id val/ --candidates candidates.yaml -o search --dry-run
    """
    given = common.settings_in(locals())
    from ..pipeline.build import RESULT
    from ..pipeline.search import search as searched
    from ..pipeline.settings import HydraConfig

    given |= {"model": models[0], "models": models[1:]} if models else {}
    given["candidates"] = None if candidates is None else common.read_yaml(candidates)
    sources, options = common.read_settings([Sources, SearchOptions], config, given, changes)
    usual = HydraConfig(recipe=options.recipe, training="apart", seed=options.seed)  # reads the training data
    ensemble, sets = model_and_sets(sources, usual)
    folder = Path(sources.output)
    more = [common.load_model(name, sources.device) for name in sources.models]
    about: dict[str, Any] = {"models": more, "output": folder, "dry_run": dry_run, "progress": not quiet}
    front = searched(ensemble, **sets, **vars(options), **about)
    print(front.table())
    if not dry_run:
        print(f"The choice is in {folder / RESULT}.")
        print(common.next_commands(folder, "predict", "evaluate"))


# --- shared by both --------------------------------------------------------------------------------------------------


def model_and_sets(sources: Sources, hydra: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and batches by role of the sets that the config needs."""
    from ..batches import class_names_in
    from ..data.dataset import TrainTransform, batches

    labelled = {name: getattr(sources, name) for name in ("id", "train", "validation")}
    ensemble = common.load_model(sources.model, sources.device)
    reading = common.Reading(ensemble, sources.columns, sources.limit)
    sets: dict[str, Any] = {}
    for role, spec in labelled.items():
        if spec is None or (role == "train" and not hydra.reads_train):
            continue
        data, transform, size = reading.data(spec), common.preprocessing_of(ensemble), reading.batch_size
        recipe = hydra.recipe if role == "train" else None
        if recipe is not None and recipe.batch_size:
            size = math.ceil(recipe.batch_size / recipe.gradient_accumulation)
        elif hydra.strategy == "taylor" and role in ("train", "id"):
            size = max(1, min(size, len(data) // (PER_RANKING * hydra.calibration_batches)))
        augment = recipe.augment or recipe.rand_augment if recipe is not None else role == "train" and hydra.distill
        if augment and ensemble.kind == "image":
            transform = TrainTransform(transform, rand_augment=None if recipe is None else recipe.rand_augment)
        sets[role] = batches(data, transform, size, shuffle=role == "train", seed=hydra.seed)
    if SYNTHETIC in sources.ood and len(sources.ood) > 1:
        raise DataError(f"ood is either {SYNTHETIC} or data that you give, not both")
    if sources.ood and hydra.extracts_circuits:
        sets["ood"] = SYNTHETIC if SYNTHETIC in sources.ood else reading.sources(sources.ood)
    if not ensemble.metadata.labels and "id" in sets:
        ensemble = ensemble.with_metadata(labels=class_names_in(sets["id"], ensemble.num_classes))
    return ensemble, sets
