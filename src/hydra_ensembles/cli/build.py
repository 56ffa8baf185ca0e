"""`hydra-ensembles build`: a Hydra Ensemble from one trained model."""

import os
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .._distributed import launched_rank
from ..data.batching import TrainTransform, batches
from ..data.dataset import AnyDataset
from ..errors import ConfigError, DataError
from ..files import locked
from ..model.ensemble import Ensemble
from ..pipeline.chain import build as build_ensemble
from ..pipeline.run_folder import IDENTITY, RESULT, SETTINGS, require_own_folder
from ..pipeline.settings import HydraConfig
from ..schema import to_plain
from . import sources as source
from .command import command, write_settings
from .evaluations import read_named
from .sources import USUAL_BATCH, DataSettings, ModelSettings

OOD = "ood "  # before the name of a source
SYNTHETIC = "synthetic"
VARIETY = 2  # times as many batches as a ranking reads, so that members are ranked on different ones


@dataclass(frozen=True)
class BuildSources(DataSettings, ModelSettings):
    """What goes into a build and where it comes out; the rest is `HydraConfig`.

    Attributes:
        output: Run folder.
        id: Held-out labelled data.
        ood: Data unlike the training data, for circuits, once for each source, as [NAME=]DATA, or synthetic.
        train: Labelled training data, for fine-tuning and Taylor rankings.
        validation: Held-out labelled data for calibration; half of `id` if not given.
    """

    output: str = field(kw_only=True)
    id: str | None = None
    ood: tuple[str, ...] = ()
    train: str | None = None
    validation: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        ModelSettings.__post_init__(self)
        DataSettings.__post_init__(self)
        if not self.output:
            raise ConfigError("output is empty; name the folder that the build goes to")
        if SYNTHETIC in self.ood and len(self.ood) > 1:
            raise DataError(f"ood is {SYNTHETIC} data, or data that you give; got {', '.join(self.ood)}")
        for name in ("id", "train", "validation"):
            source.require_different((name, getattr(self, name)), *(("ood", data) for _, data in self.ood_sources))

    @property
    def ood_sources(self) -> list[tuple[str | None, str]]:
        """Name (None: the data's own) and data of each OOD source that is given."""
        paths = [(None, spec) for spec in self.ood if source.existing_path(spec)[0] is not None]  # also one with "="
        others = [spec for spec in self.ood if spec != SYNTHETIC and (None, spec) not in paths]
        return [*paths, *((name, data) for _, name, data in read_named(others))]


@command
def build(
    sources: BuildSources,
    hydra: HydraConfig,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Make a Hydra Ensemble from one trained model.

    Ranks heads, prunes a copy per member, fine-tunes if asked, fuses, calibrates. Every stage leaves its product in the
    run folder; a build that was interrupted goes on where it stopped when the same command is given again.

    MODEL is a folder, timm:NAME or hub:OWNER/NAME. Data are a folder of images with a sub-folder per class, a Parquet,
    CSV or JSONL file, hub:NAME:SPLIT or suite:NAME:SET. The circuit strategies need --ood, given once for each source,
    or --ood synthetic, which makes such data from --id; taylor and random do not.

    Examples:
      hydra-ensembles build timm:vit_base_patch16_224 --id val/ --ood other/ --prune 24 --output run
      hydra-ensembles build timm:vit_small_patch16_224 --weights mine.safetensors --id val/ --ood other/ -p 12 -o run
      hydra-ensembles build my-bert/ --id val.csv --strategy taylor --prune 12 --output run
      hydra-ensembles build my-bert/ --id val.csv --ood news.csv --train train.csv --recipe sst2 -p 12 -o run
      hydra-ensembles build --config run/config.yaml
    """
    folder = Path(sources.output).expanduser()
    try:
        made = _build(sources, hydra, folder, progress=not quiet)
    except KeyboardInterrupt as error:
        if not (folder / SETTINGS).exists():
            raise
        kept = "nothing is finished; to start over"
        if (folder / IDENTITY).exists():
            kept = f"finished stages are kept in {folder}; to go on there"
        again = f"hydra-ensembles build --config {shlex.quote(str(folder / SETTINGS))}"
        raise KeyboardInterrupt(f"{kept}: {again}") from error
    print(made.describe())
    print(f"\nThe ensemble is in {folder / RESULT}, how it was made in {folder / 'summary.json'}. Next:")
    quoted = shlex.quote(str(folder))
    print(f"  hydra-ensembles info {quoted}")
    print(f"  hydra-ensembles predict {quoted} {'IMAGE...' if made.kind == 'image' else '--text TEXT'}")
    print(f"  hydra-ensembles evaluate {quoted} --id DATA --ood near:NAME=DATA")


def _build(sources: BuildSources, hydra: HydraConfig, folder: Path, progress: bool) -> Ensemble:
    """Load model and data, write the settings down, build; of two that start at once in one folder, one is told."""
    begun = (folder / IDENTITY).exists()
    require_own_folder(folder)
    given = [(role, getattr(sources, role)) for role in ("id", "train", "validation")]
    for role, spec in (*given, *(("ood", data) for _, data in sources.ood_sources)):  # before anything is written
        data, _ = source.existing_path(spec or "")
        if data is not None and not begun and folder.resolve().is_relative_to(data.resolve()):
            raise DataError(f"output is {folder}, which is among the {role} data of {data}; name a folder outside it")
    model = source.load_classifier(sources)
    sets = _load_sets(sources, hydra)
    if "id" in sets:
        model = source.with_labels_of(model, sets["id"])
    size, train_size = _batch_sizes(sources, hydra, {role: len(data) for role, data in sets.items()})
    sources = replace(sources, batch_size=size)
    sets = {
        role: source.fit_to_model(data, model, sources, labelled=not role.startswith(OOD))
        for role, data in sets.items()
    }
    transform: Any = model.metadata.preprocessing
    workers, train = sources.workers, sets.pop("train", None)
    held_out: dict[str, Any] = {
        role: batches(data, transform, size, num_workers=workers) for role, data in sets.items()
    }
    if train is not None:
        if hydra.recipe is not None and hydra.recipe.rand_augment is not None:
            transform = TrainTransform.matching(transform, rand_augment=hydra.recipe.rand_augment)
        held_out["train"] = batches(train, transform, train_size, shuffle=True, seed=hydra.seed, num_workers=workers)
    ood = {role.removeprefix(OOD): held_out.pop(role) for role in [*held_out] if role.startswith(OOD)}
    if ood:
        held_out["ood"] = ood if len(ood) > 1 else next(iter(ood.values()))
    elif SYNTHETIC in sources.ood:
        held_out["ood"] = SYNTHETIC
    writes = launched_rank() == 0 and (not begun or os.access(folder, os.W_OK))  # a finished one can be read anywhere
    with locked(folder, "build", file=SETTINGS) if writes else nullcontext():
        if writes and not (folder / IDENTITY).exists():  # else those of the run stay, which may be another one
            write_settings(folder / SETTINGS, {**to_plain(sources), **to_plain(hydra)}, "build")
        return build_ensemble(model, hydra, **held_out, output=folder, device=sources.place(), progress=progress)


def _load_sets(sources: BuildSources, hydra: HydraConfig) -> dict[str, AnyDataset]:
    """The sets that are given and that the build has a use for: by their role, and OOD sources by name."""
    wanted = {"id": True, "validation": True, "train": hydra.reads_train}
    specs = {role: getattr(sources, role) for role, used in wanted.items() if used}
    sets = {role: source.load_data(spec, sources) for role, spec in specs.items() if spec is not None}
    for name, spec in sources.ood_sources if hydra.extracts_circuits else ():
        data = source.load_data(spec, sources, labelled=False)
        name = name or data.name
        if OOD + name in sets:
            raise DataError(f"two OOD sources are called {name!r}; name them apart, as NAME={spec}")
        sets[OOD + name] = data
    return sets


def _batch_sizes(sources: BuildSources, hydra: HydraConfig, samples: dict[str, int]) -> tuple[int, int]:
    """Samples a batch, of held-out and of training data.

    A Taylor ranking reads some batches of the training data, or else of the held-out data; there must be more of
    them than it reads, or all members would be ranked alike.
    """

    def enough(role: str) -> int:
        few = hydra.strategy == "taylor" and role in samples
        return max(1, min(USUAL_BATCH, samples[role] // (VARIETY * hydra.calibration_batches))) if few else USUAL_BATCH

    size = sources.batch_size or (USUAL_BATCH if "train" in samples else enough("id"))
    if hydra.recipe is not None and hydra.recipe.batch_size is not None:
        return size, max(1, hydra.recipe.batch_size // hydra.recipe.gradient_accumulation)
    return size, enough("train") if hydra.strategy == "taylor" else size
