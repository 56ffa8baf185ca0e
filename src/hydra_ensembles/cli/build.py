"""`hydra-ensembles build`: a Hydra Ensemble from one trained model."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..batches import Batches
from ..data.batching import TrainTransform, batches
from ..data.dataset import AnyDataset
from ..errors import ConfigError, DataError
from ..model.ensemble import Ensemble
from ..pipeline.chain import build as build_ensemble
from ..pipeline.run_folder import IDENTITY, RESULT, SETTINGS, require_own_folder
from ..pipeline.settings import HydraConfig
from ..preprocessing import ImagePreprocessing
from ..schema import to_plain
from .command import command, write_settings
from .sources import (
    USUAL_BATCH,
    DataSettings,
    ModelSettings,
    Role,
    existing_path,
    fit_to_model,
    load_classifier,
    load_data,
    require_at_least,
    require_different,
    sets_of_suite,
    with_labels_of,
)

VARIETY = 2  # times as many batches as a ranking reads, so that members are ranked on different ones


@dataclass(frozen=True)
class BuildSources(DataSettings, ModelSettings):
    """What goes into a build and where it comes out; the rest is `HydraConfig`.

    Attributes:
        output: Run folder.
        id: Held-out labelled data.
        ood: Data unlike the training data, for circuits.
        train: Labelled training data, for fine-tuning and Taylor rankings.
        validation: Held-out labelled data for calibration; half of `id` if not given.
        suite: A suite that gives the sets not named here.
        augment: Random crops and flips of training images (and RandAugment, where the recipe has it); if not
            given, where the recipe has RandAugment.
        train_batch_size: Samples a training batch; if not given, the recipe's, else `batch_size`.
    """

    output: str = field(kw_only=True)
    id: str | None = None
    ood: str | None = None
    train: str | None = None
    validation: str | None = None
    suite: str | None = None
    augment: bool | None = None
    train_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        ModelSettings.__post_init__(self)
        DataSettings.__post_init__(self)
        if not self.output:
            raise ConfigError("output is empty; name the folder that the build goes to")
        require_at_least(self, train_batch_size=1)
        for name in ("id", "train", "validation"):
            require_different((name, getattr(self, name)), ("ood", self.ood))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output).expanduser()


@command
def build(
    sources: BuildSources,
    hydra: HydraConfig,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Make a Hydra Ensemble from one trained model.

    Ranks heads, prunes a copy per member, fine-tunes if asked, fuses, calibrates. Every stage leaves its product in the
    run folder, together with config.yaml. A build that was interrupted goes on where it stopped when the same command
    is given again.

    MODEL is a folder, timm:NAME or hub:OWNER/NAME. Data are a folder of images with a sub-folder per class, a Parquet,
    CSV or JSONL file, hub:NAME:SPLIT, or a suite. The circuit strategies need --ood; taylor and random do not.

    Examples:
      hydra-ensembles build timm:vit_base_patch16_224 --id val/ --ood other/ --prune 24 --output run
      hydra-ensembles build timm:vit_small_patch16_224 --weights mine.safetensors --id val/ --ood other/ -p 12 -o run
      hydra-ensembles build my-bert/ --id val.csv --strategy taylor --prune 12 --output run
      hydra-ensembles build my-bert/ --id val.csv --ood news.csv --train train.csv --recipe sst2 -p 12 -o run
      hydra-ensembles build --config run/config.yaml
    """
    folder = sources.folder
    try:
        made = _build(sources, hydra, progress=not quiet)
    except KeyboardInterrupt as error:
        if not (folder / SETTINGS).exists():
            raise
        kept = "nothing is finished; to start over"
        if (folder / IDENTITY).exists():
            kept = f"finished stages are kept in {folder}; to go on there"
        again = f"hydra-ensembles build --config {shlex.quote(str(folder / SETTINGS))}"
        raise KeyboardInterrupt(f"{kept}: {again}") from error
    print(made.describe())
    calibration = made.metadata.calibration
    if calibration is not None and calibration.threshold is not None:
        print(f"abstains       where {calibration.score} is above {calibration.threshold:.4g}, calibrated to accept "
              f"{hydra.accepted_share:.0%} of held-out data")  # fmt: skip
    print(f"\nThe ensemble is in {folder / RESULT}, how it was made in {folder / 'summary.json'}. Next:")
    quoted = shlex.quote(str(folder))
    print(f"  hydra-ensembles info {quoted}")
    print(f"  hydra-ensembles predict {quoted} {'IMAGE...' if made.kind == 'image' else '--text TEXT'}")
    print(f"  hydra-ensembles evaluate {quoted} --id DATA --ood near:NAME=DATA")


def _build(sources: BuildSources, hydra: HydraConfig, progress: bool) -> Ensemble:
    """Load model and data, write the settings down, build."""
    folder = sources.folder
    require_own_folder(folder)
    for role in ("id", "ood", "train", "validation"):  # before anything is written
        data, _ = existing_path(getattr(sources, role) or "")
        if data is not None and not (folder / IDENTITY).exists() and folder.resolve().is_relative_to(data.resolve()):
            raise DataError(f"output is {folder}, which is among the {role} data of {data}; name a folder outside it")
    model = load_classifier(sources)
    sets = _load_sets(sources, hydra)
    if "id" in sets:
        model = with_labels_of(model, sets["id"])
    sources = _with_batch_sizes(sources, hydra, {role: len(data) for role, data in sets.items()})
    sets = {role: fit_to_model(data, role, model, sources) for role, data in sets.items()}
    settings = {**to_plain(sources), **to_plain(hydra)}
    if not (folder / IDENTITY).exists():  # the settings of another build stay until `build` refused the folder
        write_settings(folder / SETTINGS, settings, "build")
    preprocessing: Any = model.metadata.preprocessing
    size = sources.batch_size or USUAL_BATCH
    held_out = {role: batches(data, preprocessing, size, num_workers=sources.workers) for role, data in sets.items()}
    made = build_ensemble(
        model,
        hydra,
        train=_training_batches(sets["train"], model, sources, hydra) if "train" in sets else None,
        id=held_out.get("id"),
        ood=held_out.get("circuit_ood"),
        validation=held_out.get("validation"),
        output=folder,
        device=sources.place(),
        progress=progress,
    )
    write_settings(folder / SETTINGS, settings, "build")
    return made


def _load_sets(sources: BuildSources, hydra: HydraConfig) -> dict[Role, AnyDataset]:
    """The sets that the build has a use for; those that are not named come from the suite."""
    wanted: dict[Role, tuple[str | None, str]] = {  # what is named, and the part of the suite that stands in for it
        "id": (sources.id, "validation"),
        "validation": (sources.validation, ""),
    }
    if hydra.extracts_circuits:
        wanted["circuit_ood"] = sources.ood, "circuit_ood"
    if hydra.recipe is not None or hydra.strategy == "taylor":
        wanted["train"] = sources.train, "train"
    known = {} if sources.suite is None else sets_of_suite(sources.suite)
    found: dict[Role, AnyDataset] = {}
    for role, (spec, part) in wanted.items():
        if spec is not None or part in known:
            found[role] = load_data(f"suite:{sources.suite}:{part}" if spec is None else spec, role, sources)
    return found


def _with_batch_sizes(sources: BuildSources, hydra: HydraConfig, samples: dict[Role, int]) -> BuildSources:
    """The settings with every batch size filled in, so that members differ and few samples suffice.

    A Taylor ranking reads some batches of the training data, or else of the held-out data; there must be more of
    them than it reads, or all members would be ranked alike.
    """

    def enough(role: Role) -> int:
        few = hydra.strategy == "taylor" and role in samples
        return max(1, min(USUAL_BATCH, samples[role] // (VARIETY * hydra.calibration_batches))) if few else USUAL_BATCH

    batch = sources.batch_size or (USUAL_BATCH if "train" in samples else enough("id"))
    training = batch
    if hydra.recipe is not None and hydra.recipe.batch_size is not None:
        training = max(1, hydra.recipe.batch_size // hydra.recipe.gradient_accumulation)
    elif hydra.strategy == "taylor" and "train" in samples:
        training = enough("train")
    return replace(sources, batch_size=batch, train_batch_size=sources.train_batch_size or training)


def _training_batches(data: AnyDataset, model: Ensemble, sources: BuildSources, hydra: HydraConfig) -> Batches:
    """Shuffled batches of the training data, augmented where that is asked for."""
    wanted = None if hydra.recipe is None else hydra.recipe.rand_augment
    transform: Any = model.metadata.preprocessing
    if sources.augment or (sources.augment is None and wanted is not None):
        if not isinstance(transform, ImagePreprocessing):
            raise ConfigError("augment crops and flips images, but the model reads text; leave it out")
        transform = TrainTransform.matching(transform, rand_augment=wanted)
    size, workers = sources.train_batch_size or USUAL_BATCH, sources.workers
    return batches(data, transform, size, shuffle=True, seed=hydra.seed, num_workers=workers)
