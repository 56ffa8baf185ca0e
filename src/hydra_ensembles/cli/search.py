"""`hydra-ensembles search`: the best ensemble for a price."""

import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..files import read_file, write_atomically
from ..metrics.distance import FamiliarityName
from ..pipeline.candidates import search as run_search
from ..pipeline.choice import Price
from ..pipeline.settings import HydraConfig
from ..report.compare import to_markdown, to_rich
from ..run_folder import RESULT
from ..schema import to_plain
from ..training.recipe import Recipe
from . import sources as source
from .build import SYNTHETIC, ood_sources, prepared, resumable, with_settings
from .command import Json, command, emit, emit_json, parse_yaml, read_recipe
from .sources import DataSettings, ModelSettings


@dataclass(frozen=True)
class SearchSources(DataSettings, ModelSettings):
    """What goes into a search and where it comes out; `search` says more of each.

    Attributes:
        output: Folder of the search.
        id: Held-out labelled data, of which a half judges.
        ood: Data unlike the training data, of which a half judges, once for each source, as [NAME=]DATA.
        train: Labelled training data; without them no candidate is trained.
        cost: The highest price, as a multiple of that of the model.
        candidates: YAML file with a list of candidates, each with settings of build.
        models: Folder of a further training of the model, once for each.
        recipe: How candidates train that bring no recipe of their own.
        judge_id: Labelled data to judge on, instead of a half of id.
        judge_ood: OOD data to judge on, instead of a half of ood, once for each set, as [NAME=]DATA.
        familiarity: The score of features that judges besides the maximum softmax probability.
        first: Share of the training after which candidates are compared for the first time.
        tolerance: How far AURC and AUROCs of the choice may lie behind those of the model.
        price: What costs.
        latency_batch: Inputs of the batch whose time is measured.
        compile: Measure compiled models.
        seed: Draws halves, batches and members.
    """

    output: str = field(kw_only=True)
    id: str = field(kw_only=True)
    ood: tuple[str, ...] = field(kw_only=True)
    train: str | None = None
    cost: float = 1.3
    candidates: str | None = None
    models: tuple[str, ...] = ()
    recipe: Recipe | None = None
    judge_id: str | None = None
    judge_ood: tuple[str, ...] = ()
    familiarity: FamiliarityName = "mahalanobis"
    first: float = 0.1
    tolerance: float = 0.0
    price: Price = "latency"
    latency_batch: int = 32
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        ModelSettings.__post_init__(self)
        DataSettings.__post_init__(self)
        if not self.output:
            raise ConfigError("output is empty; name the folder that the search goes to")
        if not self.ood or SYNTHETIC in (*self.ood, *self.judge_ood):
            raise ConfigError(
                f"ood is {', '.join(self.ood) or 'empty'}; candidates are judged on OOD data that you give"
            )
        labelled = [(name, getattr(self, name)) for name in ("id", "train", "judge_id")]
        foreign = [("ood", data) for _, data in (*ood_sources(self.ood), *ood_sources(self.judge_ood))]
        source.require_different(*labelled, *foreign)


@command
def search(
    sources: SearchSources,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the candidates would cost.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
    as_json: Json = False,
) -> None:
    """Find the best ensemble for a price.

    Builds candidates (trunks of different depth, heads pruned or not, trained in different ways), gives up those that
    cannot win, judges the others on held-out data, and chooses the best that costs at most COST times the model and is
    no worse in any number. A search that was interrupted goes on when the same command is given again.

    Examples:
      hydra-ensembles search my-vit/ --id val/ --ood other/ --train train/ --cost 1.3 --output search
      hydra-ensembles search my-vit/ --id val/ --ood other/ --candidates candidates.yaml --output search --dry-run
      hydra-ensembles search my-vit/ --id val/ --ood other/ --models seed-1/ --models seed-2/ --cost 3 -o search
    """
    folder = Path(sources.output).expanduser()
    training: Any = None if sources.train is None else "together"
    hydra = HydraConfig(training=training, recipe=sources.recipe if training else None, seed=sources.seed)
    listed = None if sources.candidates is None else _read_candidates(Path(sources.candidates).expanduser())
    names = ("cost", "recipe", "familiarity", "first", "tolerance", "price", "seed")
    with resumable(folder, "search"):
        model, sets, size = prepared(sources, hydra, folder, "search")
        written = to_plain(replace(sources, batch_size=size))
        with nullcontext() if dry_run else with_settings(folder, written, "search"):
            found = run_search(
                model,
                **sets,
                **{name: getattr(sources, name) for name in names},
                candidates=listed,
                models=[_further(sources, name, model.metadata.labels) for name in sources.models],
                batch_size=sources.latency_batch,
                optimize={"compile": True} if sources.compile else None,
                output=folder,
                device=sources.place(),
                dry_run=dry_run,
                progress=not quiet,
            )
    if not dry_run:
        write_atomically(folder / "table.md", to_markdown(found.table()).encode())
        write_atomically(folder / "front.svg", found.figure().encode())
    if as_json:
        emit_json(to_plain(replace(found, ensemble=None)))
        return
    emit(to_rich(found.table()), None)
    if not dry_run:
        print(f"\nThe choice is in {folder / RESULT}, the front in {folder / 'front.svg'}, all numbers in "
              f"{folder / 'search.json'}. Next:")  # fmt: skip
        print(f"  hydra-ensembles info {shlex.quote(str(folder))}")
        print(f"  hydra-ensembles evaluate {shlex.quote(str(folder))} --id DATA --ood near:NAME=DATA")


def _further(sources: SearchSources, name: str, labels: tuple[str, ...]) -> Any:
    """Another training of the model, with its class names where it has none."""
    found = source.load_classifier(replace(sources, model=name, weights=None, model_options={}))
    return found if found.metadata.labels else found.with_metadata(labels=labels)


def _read_candidates(path: Path) -> list[dict[str, Any]]:
    """Settings of candidates from a file; a recipe may be the name of a preset, as everywhere."""
    listed = parse_yaml(read_file(path), str(path))
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        raise ConfigError(f"{path} must hold a list of candidates, each with settings of build: '- shared_layers: 8'")
    return [{**one, "recipe": read_recipe(one["recipe"])} if "recipe" in one else dict(one) for one in listed]
