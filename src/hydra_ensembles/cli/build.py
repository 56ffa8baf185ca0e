"""`hydra-ensembles build` and `search`: an ensemble from one trained model, or the best one for a price."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .._distributed import launched_rank
from ..data.batching import TrainTransform, batches
from ..errors import ConfigError, DataError
from ..files import expanded, locked, read_json, write_atomically
from ..metrics.distance import FamiliarityName
from ..model.ensemble import Ensemble
from ..pipeline.build import build as build_ensemble
from ..pipeline.search import search as run_search
from ..pipeline.search_result import Price
from ..pipeline.settings import HydraConfig
from ..report.table import to_markdown, to_rich
from ..run_folder import IDENTITY, RESULT, SETTINGS, require_own_folder
from ..schema import to_plain
from ..training.recipe import DataRecipe, Recipe, read_recipe
from . import sources as source
from .command import Json, Quiet, command, emit, emit_json, option, read_yaml, write_settings
from .evaluations import grouped_specs
from .predict_info import next_commands, preprocessing_of
from .sources import USUAL_BATCH, DataSettings, ModelSettings

# roles of the data sets
LABELLED = ("id", "train", "validation", "judge_id")
OOD_ROLES = ("ood", "judge_ood")
SYNTHETIC = "synthetic"
SUMMARY = "summary.json"
VARIETY = 2  # times as many batches as a ranking reads, so that members are ranked on different ones


@dataclass(frozen=True)
class BuildSources(DataSettings, ModelSettings):
    """Inputs and output folder of a build; the other settings are in `HydraConfig`."""

    output: str = option(..., "Run folder.")
    id: str | None = option(None, "Held-out labelled data.")
    ood: tuple[str, ...] = option(
        (), "Data unlike the training data, for circuits: [NAME=]DATA, once per source, or synthetic."
    )
    train: str | None = option(None, "Labelled training data, for fine-tuning and Taylor rankings.")
    validation: str | None = option(None, "Held-out labelled data for calibration; half of --id if not given.")

    def __post_init__(self) -> None:
        super().__post_init__()
        source.output_folder(self.output)
        ood_data = [("ood", data) for _, data in ood_sources(self.ood)]
        for name in ("id", "train", "validation"):
            source.require_different_sources((name, getattr(self, name)), *ood_data)


def ood_sources(specs: tuple[str, ...]) -> list[tuple[str | None, str]]:
    """Name (None: the data's own) and data of each given OOD source; empty for `synthetic`, which must stand alone."""
    if SYNTHETIC in specs and len(specs) > 1:
        raise DataError(f"ood is either {SYNTHETIC} or data that you give, not both; got {', '.join(specs)}")
    return [(name, data) for _, name, data in grouped_specs([spec for spec in specs if spec != SYNTHETIC])]


@command
def build(sources: BuildSources, hydra: HydraConfig, quiet: Quiet = False, as_json: Json = False) -> None:
    """Make an ensemble from one trained model: pruned members, as in the paper, or branches made by training alone.

    Ranks heads, prunes a copy per member, fine-tunes if asked, fuses, calibrates. Members that are pruned but not
    trained lose accuracy: prune few heads, and give --train and --recipe. Every stage leaves its product in the run
    folder; an interrupted build resumes with the same command.

    MODEL is a folder, timm:NAME or hub:OWNER/NAME. Data are a folder of images with one sub-folder per class, a
    Parquet, CSV or JSONL file, hub:NAME:SPLIT or suite:NAME:SET. The circuit strategies need --ood, once per source,
    or --ood synthetic, which makes such data from --id; taylor and random do not.

    Examples:
      hydra-ensembles build my-bert/ --id val.csv --ood news.csv --train train.csv --recipe sst2 -o run
      hydra-ensembles build my-vit/ --id val/ --ood odd/ --train train/ --recipe imagenet -p 4 --shared-layers 0 -o run
      hydra-ensembles build timm:vit_small_patch16_224 --weights mine.safetensors --id val/ --ood synthetic -o run
      hydra-ensembles build my-bert/ --id val.csv --strategy taylor --prune 12 --shared-layers 0 -o run
      hydra-ensembles build --config run/config.yaml
    """
    folder = source.output_folder(sources.output)
    fitted = replace(hydra, recipe=in_batches_of(hydra.recipe, sources.batch_size))
    model, sets, size = model_and_sets(sources, fitted, folder, "build")
    written = to_plain(asdict(replace(sources, batch_size=size)) | asdict(hydra))  # also defaults of later fields
    with with_settings(folder, written, "build"):
        ensemble = build_ensemble(model, fitted, **sets, output=folder, device=sources.place(), progress=not quiet)
    if as_json:
        emit_json(read_json(folder / SUMMARY))
        return
    print(f"{ensemble.describe()}\npreprocessing  {preprocessing_of(ensemble)}")
    print(f"\nThe ensemble is in {folder / RESULT}, how it was made in {folder / SUMMARY}. Next:")
    print(next_commands(folder, ensemble.kind, "predict", "evaluate"))


# --- search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchSources(DataSettings, ModelSettings):
    """Inputs, output folder and settings of a search; see `search` for details."""

    output: str = option(..., "Folder of the search.")
    id: str = option(..., "Held-out labelled data; half of it is used to judge.")
    ood: tuple[str, ...] = option(
        (),
        "Data unlike the training data, half of it used to judge: [NAME=]DATA, once per source, or synthetic, "
        "the default, which makes such data from --id.",
    )
    train: str | None = option(None, "Labelled training data; without it no candidate is trained.")
    cost: float = option(1.5, "The highest price, as a multiple of the model's.")
    candidates: str | None = option(None, "YAML file with a list of candidates, each with settings of build.")
    models: tuple[str, ...] = option(
        (), "Another training of the model, a folder or a file like --weights, repeatable."
    )
    recipe: Recipe | None = option(None, "How to train candidates that have no recipe of their own.")
    judge_id: str | None = option(None, "Labelled data to judge on, instead of half of --id.")
    judge_ood: tuple[str, ...] = option(
        (), "OOD data to judge on, instead of half of --ood: [NAME=]DATA, once per set."
    )
    familiarity: FamiliarityName = option(
        "mahalanobis", "Feature score to judge by, in addition to the maximum softmax probability."
    )
    first: float = option(0.1, "Share of the training after which candidates are first compared.")
    tolerance: float = option(0.0, "How much worse than the model the choice may be in accuracy, AURC and AUROC.")
    price: Price = option("latency", "How cost is measured.")
    latency_batch: int = option(32, "Batch size for measuring latency.")
    compile: bool = option(False, "Measure compiled models.")
    seed: int = option(0, "Seed for drawing halves, batches and members.")

    def __post_init__(self) -> None:
        super().__post_init__()
        source.output_folder(self.output)
        if SYNTHETIC in self.judge_ood:
            raise ConfigError(f"judge_ood is {SYNTHETIC}; give that for ood, half of which then judges")
        labelled = [(name, getattr(self, name)) for name in ("id", "train", "judge_id")]
        ood_data = [("ood", data) for _, data in (*ood_sources(self.ood), *ood_sources(self.judge_ood))]
        source.require_different_sources(*labelled, *ood_data)


@command
def search(
    sources: SearchSources,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what the candidates would cost.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the best ensemble for a price.

    Builds candidates (trunks of different depth, heads pruned or not, trained in different ways), drops those that
    cannot win, judges the others on held-out data, and chooses the best that costs at most COST times as much as the
    model and is not worse in any measure. An interrupted search resumes with the same command.

    Examples:
      hydra-ensembles search my-vit/ --id val/ --ood other/ --train train/ --cost 1.5 --output search
      hydra-ensembles search my-vit/ --id val/ --ood other/ --candidates candidates.yaml --output search --dry-run
      hydra-ensembles search my-vit/ --id val/ --ood other/ --models seed-1/ --models seed-2/ --cost 3 -o search
    """
    folder = source.output_folder(sources.output)
    training: Any = None if sources.train is None else "together"
    hydra = HydraConfig(training=training, recipe=sources.recipe if training else None, seed=sources.seed)
    fitted = in_batches_of(hydra.recipe, sources.batch_size)
    recipe = sources.recipe if fitted == hydra.recipe else fitted
    hydra = replace(hydra, recipe=fitted)
    candidates = None if sources.candidates is None else _read_candidates(sources, sources.candidates)
    names = ("cost", "familiarity", "tolerance", "price", "seed")
    trainings = [source.further(sources, name) for name in sources.models]
    model, sets, size = model_and_sets(sources, hydra, folder, "search")
    written = to_plain(asdict(replace(sources, batch_size=size)))
    with nullcontext() if dry_run else with_settings(folder, written, "search"):
        front = run_search(
            model,
            **sets,
            **{name: getattr(sources, name) for name in names},
            recipe=recipe,
            candidates=candidates,
            models=[source.load_further(one, model.metadata.labels) for one in trainings],
            batch_size=sources.latency_batch,
            optimize={"compile": True} if sources.compile else None,
            output=folder,
            device=sources.place(),
            dry_run=dry_run,
            progress=not quiet,
        )
    if not dry_run:
        write_atomically(folder / "table.md", to_markdown(front.table()).encode())
        write_atomically(folder / "front.svg", front.figure().encode())
    if as_json:
        emit_json(to_plain(replace(front, ensemble=None)))
        return
    emit(to_rich(front.table()), None)
    if not dry_run:
        print(f"\nThe choice is in {folder / RESULT}, the front in {folder / 'front.svg'}, all numbers in "
              f"{folder / 'search.json'}. Next:")  # fmt: skip
        print(next_commands(folder, model.kind, "evaluate"))


def _read_candidates(settings: DataSettings, file: str) -> list[dict[str, Any]]:
    """Settings of candidates from a file; a recipe may be the name of a preset."""
    path = expanded(file)
    listed = read_yaml(path)
    if not isinstance(listed, list) or not all(isinstance(raw, Mapping) for raw in listed):
        raise ConfigError(f"{path} must hold a list of candidates, each with settings of build: '- shared_layers: 8'")
    candidates = [dict(raw) for raw in listed]
    for candidate in candidates:
        if "recipe" in candidate:
            candidate["recipe"] = in_batches_of(read_recipe(candidate["recipe"]), settings.batch_size)
    return candidates


# --- shared by both --------------------------------------------------------------------------------------------------


@contextmanager
def with_settings(folder: Path, settings: Mapping[str, Any], name: str) -> Iterator[None]:
    """Write the settings, then work in the folder; if two commands start in it at once, the second one raises."""
    read_only = (folder / IDENTITY).exists() and not os.access(folder, os.W_OK)  # as a finished run may be
    writes = launched_rank() == 0 and not read_only
    with locked(folder, name, file=SETTINGS) if writes else nullcontext():
        if writes and not (folder / IDENTITY).exists():  # otherwise keep those of the run, which may differ
            write_settings(folder / SETTINGS, settings, name)
        yield


def in_batches_of(recipe: DataRecipe | None, most: int | None) -> DataRecipe | None:
    """A recipe with batches of at most `most` samples, accumulating gradients to keep the samples per update.

    It trains the same in less memory. A recipe without a batch size, or with batches that are small enough, is
    returned unchanged.
    """
    if recipe is None or recipe.batch_size is None or most is None or _samples_of(recipe) <= most:
        return recipe
    batch = max(size for size in range(1, most + 1) if recipe.batch_size % size == 0)
    return replace(recipe, gradient_accumulation=recipe.batch_size // batch)


def _samples_of(recipe: DataRecipe) -> int:
    """Samples per batch of a recipe with a batch size."""
    return max(1, (recipe.batch_size or 1) // recipe.gradient_accumulation)


def model_and_sets(
    sources: Any, hydra: HydraConfig, folder: Path, name: str
) -> tuple[Ensemble, dict[str, Any], int | None]:
    """The model, batches by role of the sets that the config needs, and the batch size to write into the settings.

    The batch size is None if none was given and the recipe has its own: a written 64 would limit the recipe. `folder`
    is the output of the command called `name`: it must not belong to another command, or lie inside the data.
    """
    require_own_folder(folder, f"a {name}")
    specs = {role: getattr(sources, role, None) for role in LABELLED}
    ood_data = {role: ood_sources(getattr(sources, role, ())) for role in OOD_ROLES}
    if not (folder / IDENTITY).exists():  # check before anything is written
        every = [(role, data) for role, listed in ood_data.items() for _, data in listed]
        source.output_folder(sources.output, *specs.items(), *every)
    model = source.load_classifier(sources)
    recipe = hydra.recipe if isinstance(hydra.recipe, DataRecipe) else None
    if not hydra.reads_train:
        del specs["train"]
    sets = {role: source.load_data(spec, sources) for role, spec in specs.items() if spec is not None}
    if "id" in sets:
        model = source.with_labels_of(model, sets["id"])
    size, train_size = _batch_sizes(sources, hydra, {role: len(data) for role, data in sets.items()})
    sets = {role: source.fit_to_model(data, model, sources) for role, data in sets.items()}
    train = sets.pop("train", None)
    prepare: Any = model.metadata.preprocessing
    in_batches = partial(batches, num_workers=sources.workers)
    by_role: dict[str, Any] = {role: in_batches(data, prepare, size) for role, data in sets.items()}
    if hydra.extracts_circuits:
        for role, listed in ood_data.items():
            named: dict[str, Any] = {}
            for key, spec in listed:
                data = source.fit_to_model(source.load_data(spec, sources, False), model, sources, labelled=False)
                if (key or data.name) in named:
                    raise DataError(f"two OOD sources are called {key or data.name!r}; rename one as NAME={spec}")
                named[key or data.name] = in_batches(data, prepare, size)
            if listed:
                by_role[role] = named if len(named) > 1 else next(iter(named.values()))
            elif SYNTHETIC in getattr(sources, role, ()):
                by_role[role] = SYNTHETIC
    if train is not None:
        transform = prepare
        if recipe is not None and (recipe.augment or recipe.rand_augment) and model.kind == "image":
            transform = TrainTransform.matching(prepare, rand_augment=recipe.rand_augment)
        by_role["train"] = in_batches(train, transform, train_size, shuffle=True, seed=hydra.seed)
    recipe_decides = train is not None and recipe is not None and recipe.batch_size is not None
    return model, by_role, sources.batch_size if recipe_decides else size


def _batch_sizes(sources: DataSettings, hydra: HydraConfig, samples: dict[str, int]) -> tuple[int, int]:
    """Batch sizes for held-out and for training data.

    A Taylor ranking reads some batches of the training data, or else of the held-out data. There must be more batches
    than it reads, or all members would get the same ranking.
    """

    def enough(role: str) -> int:
        few = hydra.strategy == "taylor" and role in samples
        return max(1, min(USUAL_BATCH, samples[role] // (VARIETY * hydra.calibration_batches))) if few else USUAL_BATCH

    size = sources.batch_size or (USUAL_BATCH if "train" in samples else enough("id"))
    if isinstance(hydra.recipe, DataRecipe) and hydra.recipe.batch_size is not None:
        return size, _samples_of(hydra.recipe)
    return size, enough("train") if hydra.strategy == "taylor" else size
