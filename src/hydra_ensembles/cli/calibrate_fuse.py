"""`hydra-ensembles calibrate` and `fuse`: teach a trained model when to abstain; fuse several models into one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import Checked, Count, PositiveShare, Rate
from ..calibrate import calibrate as calibrate_ensemble
from ..data.batching import batches
from ..errors import ConfigError
from ..fuse import Fusion, StemFusion
from ..fuse import fuse as fuse_models
from ..metrics.distance import FamiliarityChoice
from ..model.ensemble import Ensemble
from ..prediction import ScoreName
from . import sources as source
from .command import command, option
from .predict_info import next_commands, preprocessing_of
from .sources import USUAL_BATCH, DataSettings, ModelSettings


@dataclass(frozen=True)
class CalibrateSettings(DataSettings, ModelSettings):
    """Inputs, output and settings of `calibrate`; see there for details."""

    output: str = option(..., "New folder for the calibrated model.")
    id: str = option(..., "Held-out labelled data, not used in training.")
    share: PositiveShare = option(0.95, "Share of inputs like these that each threshold accepts.")
    score: ScoreName = option("msp", "Score for how unsure an answer is.")
    per_member: bool = option(False, "One temperature per member instead of one for all.")
    temperature: bool = option(True, "Fit a temperature.")
    familiarity: FamiliarityChoice | None = option("auto", "Feature score for how familiar an input is.")


@command
def calibrate(settings: CalibrateSettings) -> None:
    """Teach a trained model when not to answer.

    Fits a temperature, a threshold for unsure answers and one for unfamiliar inputs, on held-out labelled data; nothing
    is trained or pruned. All other commands accept the output as a model.

    Examples:
      hydra-ensembles calibrate my-vit/ --id val/ --output my-model
      hydra-ensembles calibrate timm:vit_small_patch16_224 --weights mine.safetensors --id val/ --output my-model
      hydra-ensembles calibrate my-hydra/ --id val/ --share 0.9 --output my-hydra-90
      hydra-ensembles calibrate my-bert/ --id val.csv --output my-model
    """
    folder = _new_folder(settings.output, settings.id)
    model, data = source.load_classifier(settings), source.load_data(settings.id, settings)
    model = source.with_labels_of(model, data)
    data = source.fit_to_model(data, model, settings)
    size = settings.batch_size or USUAL_BATCH
    transform: Any = model.metadata.preprocessing
    names = ("share", "score", "per_member", "temperature", "familiarity")
    calibrated = calibrate_ensemble(
        model,
        batches(data, transform, size, num_workers=settings.workers),
        **{name: getattr(settings, name) for name in names},
    )
    _save(calibrated, folder, "predict", "evaluate")


@dataclass(frozen=True)
class FuseSettings(Checked):
    """Output and settings of `fuse`; see there for details."""

    output: str = option(..., "New folder for the fused model.")
    average: Count | Rate = option(
        0, "Average the stem and this many first layers of all models, or, below 1, this share of the layers."
    )
    stem: StemFusion = option("shared", "How the stems are fused.")
    mlp: Fusion = option("mean", "How the MLPs are fused.")
    norms: Fusion = option("separate", "How the norms are fused.")
    readout: Fusion = option("separate", "How poolers and classifiers are fused.")
    trunk: Count | None = option(None, "Maximum number of equal first layers to store once; all if not given.")


@command
def fuse(
    first: ModelSettings,
    fusion: FuseSettings,
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="More models like the first, or files like its weights."),
    ] = None,
) -> None:
    """Fuse several fine-tunings of one model into an ensemble.

    Fine-tunings of one pretrained model differ in every layer: --average 0.8 --mlp separate averages the first four
    fifths of the layers, which then run once; every model keeps its own layers above. Calibrate the result.

    Examples:
      hydra-ensembles fuse seed-0/ seed-1/ seed-2/ --average 0.8 --mlp separate --output my-hydra
      hydra-ensembles fuse seed-0/ seed-1/ --average 10 --mlp separate --output my-hydra
      hydra-ensembles fuse timm:NAME --weights a.safetensors b.safetensors --average 0.8 --mlp separate -o my-hydra
    """
    folder = _new_folder(fusion.output)
    further = [source.further(first, name) for name in others or ()]
    model = source.load_classifier(first)
    models = [model, *(source.load_further(one, model.metadata.labels) for one in further)]
    names = ("stem", "mlp", "norms", "readout", "trunk", "average")
    fused: Ensemble = fuse_models(models, **{name: getattr(fusion, name) for name in names})
    _save(fused, folder, "calibrate")


def _new_folder(output: str, data: str | None = None) -> Path:
    """The output folder: outside the data, and new, empty, or with nothing but hidden leftovers of a killed run."""
    folder = source.output_folder(output, ("id", data))
    if folder.exists() and not (folder.is_dir() and all(entry.name.startswith(".") for entry in folder.iterdir())):
        raise ConfigError(f"output is {folder}, where something is already; name a new folder")
    return folder


def _save(model: Ensemble, folder: Path, *commands: str) -> None:
    """Save a model; print its description, its last history entry, its folder, and commands to try next."""
    model.save_pretrained(folder)
    print(f"{model.describe()}\npreprocessing  {preprocessing_of(model)}\n{model.metadata.history[-1]}")
    print(f"\nThe model is in {folder}. Next:")
    print(next_commands(folder, model.kind, *commands))
