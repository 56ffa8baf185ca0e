"""Running a build: model and data are loaded, the settings written down, the result shown."""

import shlex
from pathlib import Path

from ..batches import Batches
from ..data.batching import Preprocess, RandAugment, TrainTransform, batches
from ..errors import ConfigError, DataError, HydraError
from ..model.ensemble import Ensemble
from ..pipeline.chain import build as build_ensemble
from ..pipeline.run_folder import RESULT, SETTINGS, require_own_folder
from ..pipeline.settings import HydraConfig, Strategy
from ..preprocessing import ImagePreprocessing
from .build_settings import BuildSettings, BuildSources
from .class_labels import AnyDataset, with_labels_of
from .datasets import (
    Role,
    existing_path,
    find_suite,
    fit_to_model,
    load_data,
    load_reference,
    require_different,
    suite_set,
)
from .errors import InterruptedRunError
from .models import RUN_FILE, load_classifier
from .settings import USUAL_BATCH, choose_device
from .yaml_file import write_yaml

_WAYS_TO_DIFFER: dict[Strategy, str] = {
    "circuit": "--prune N, more --id and --ood data, or --strategy sampled",
    "taylor": "--calibration-batches N, --batch-size N, --taylor-scope global, --prune N",
    "sampled": "--pool N, --prune N, --members N",
    "random": "--prune N, --members N",
}


def run_build(settings: BuildSettings, progress: bool) -> Ensemble:
    """Run a build, or go on with one that was interrupted; print what came out.

    Raises:
        InterruptedRunError: Ctrl-C; the message says how to go on.
    """
    folder = Path(settings.sources.output).expanduser()
    try:
        hydra = _run(settings, folder, progress)
    except KeyboardInterrupt as error:
        raise InterruptedRunError(_how_to_resume(folder)) from error
    except HydraError as error:
        if "would be identical" in str(error):  # what the library proposes, in flags
            raise type(error)(f"{error}: {_WAYS_TO_DIFFER[settings.hydra.strategy]}") from error
        raise
    _print_result(hydra, folder, settings.hydra)
    return hydra


def _run(settings: BuildSettings, folder: Path, progress: bool) -> Ensemble:
    _require_free(folder, settings.sources)
    _require_unlike(settings.sources)
    model = load_classifier(settings.sources)
    sets = _load_sets(settings)
    if "id" in sets:
        model = with_labels_of(model, sets["id"])
    settings = settings.with_batch_sizes(
        len(sets["id" if "id" in sets else "validation"]), len(sets["train"]) if "train" in sets else None
    )
    sets = {role: fit_to_model(data, role, model, settings.sources) for role, data in sets.items()}
    if not (folder / RUN_FILE).exists():  # the settings of another build stay until `build` has refused the folder
        _write_settings(folder, settings)
    hydra = build_ensemble(
        model,
        settings.hydra,
        train=_training_batches(sets, model, settings),
        id=_held_out_batches(sets.get("id"), model, settings),
        ood=_held_out_batches(sets.get("circuit_ood"), model, settings),
        validation=_held_out_batches(sets.get("validation"), model, settings),
        output=folder,
        device=choose_device(settings.sources.device),
        progress=progress,
    )
    _write_settings(folder, settings)
    return hydra


def _require_free(folder: Path, sources: BuildSources) -> None:
    """Refuse, before anything is written, a folder with other things in it, or one among the data."""
    named = {"id": sources.id, "ood": sources.ood, "train": sources.train, "validation": sources.validation}
    for role, spec in named.items():
        data = None if spec is None else existing_path(spec)[0]
        if data is None or (folder / RUN_FILE).exists():  # an earlier build was let in
            continue
        if folder.resolve().is_relative_to(data.resolve()):
            raise DataError(
                f"output is {folder}, which is among the {role} data of {data}, where a build would be taken for "
                "data; name a folder outside it"
            )
    require_own_folder(folder)


def _require_unlike(sources: BuildSources) -> None:
    for flag, spec in (("--id", sources.id), ("--train", sources.train), ("--validation", sources.validation)):
        require_different((flag, spec), ("--ood", sources.ood))


def _write_settings(folder: Path, settings: BuildSettings) -> None:
    heading = "Resolved settings of a build; run it again with: hydra-ensembles build --config THIS_FILE"
    write_yaml(folder / SETTINGS, settings.plain(), heading)


def _load_sets(settings: BuildSettings) -> dict[Role, AnyDataset]:
    """The sets that the build has a use for, by role."""
    sources, hydra = settings.sources, settings.hydra
    named: dict[Role, str | None] = {
        "id": sources.id,
        "circuit_ood": sources.ood,
        "train": sources.train,
        "validation": sources.validation,
    }
    trains = hydra.recipe is not None or hydra.strategy == "taylor"
    used = {"id": True, "circuit_ood": hydra.extracts_circuits, "train": trains, "validation": True}
    found: dict[Role, AnyDataset] = {}
    for role, spec in named.items():
        if spec is not None and used[role]:
            found[role] = load_data(spec, role, sources)
    if sources.suite is not None:
        suite = find_suite(sources.suite)
        missing: list[Role] = [role for role in ("id", "circuit_ood", "train") if used[role] and role not in found]
        for role in missing:
            ref = suite_set(suite, role)
            if ref is not None:
                found[role] = load_reference(ref, role, sources)
    _require_sets(found, hydra, sources.suite)
    return found


def _require_sets(found: dict[Role, AnyDataset], hydra: HydraConfig, suite: str | None) -> None:
    """Say which flag is missing before the library says which argument."""
    beside = "" if suite is None else f" (suite {suite} has no such set)"
    if "id" not in found and ("validation" not in found or hydra.extracts_circuits):
        raise DataError(f"build needs held-out labelled data{beside}; give them with --id DATA")
    if hydra.extracts_circuits and "circuit_ood" not in found:
        raise DataError(
            f"strategy {hydra.strategy} needs data unlike the training data{beside}; give them with --ood DATA, or "
            "use --strategy taylor, which needs none"
        )
    if hydra.recipe is not None and "train" not in found:
        raise DataError(f"a recipe fine-tunes, which needs training data{beside}; give them with --train DATA")


def _held_out_batches(data: AnyDataset | None, model: Ensemble, settings: BuildSettings) -> Batches | None:
    if data is None:
        return None
    sources = settings.sources
    return batches(data, _preprocessing(model), sources.batch_size or USUAL_BATCH, num_workers=sources.workers)


def _training_batches(sets: dict[Role, AnyDataset], model: Ensemble, settings: BuildSettings) -> Batches | None:
    if "train" not in sets:
        return None
    return batches(
        sets["train"],
        _training_transform(model, settings),
        settings.sources.train_batch_size or USUAL_BATCH,
        shuffle=True,
        seed=settings.hydra.seed,
        num_workers=settings.sources.workers,
    )


def _training_transform(model: Ensemble, settings: BuildSettings) -> Preprocess:
    recipe, augment = settings.hydra.recipe, settings.sources.augment
    wanted = None if recipe is None else recipe.rand_augment
    if augment is False or (augment is None and wanted is None):
        return _preprocessing(model)
    preprocessing = model.metadata.preprocessing
    if not isinstance(preprocessing, ImagePreprocessing):
        raise ConfigError("augment crops and flips images, but the model reads text; leave it out")
    drawn = None if wanted is None else RandAugment(wanted.operations, wanted.magnitude)
    return TrainTransform.matching(preprocessing, rand_augment=drawn)


def _preprocessing(model: Ensemble) -> Preprocess:
    preprocessing = model.metadata.preprocessing
    assert preprocessing is not None  # fit_to_model has seen to it
    return preprocessing


def _how_to_resume(folder: Path) -> str:
    command = f"hydra-ensembles build --config {shlex.quote(str(folder / SETTINGS))}"
    if not (folder / RUN_FILE).exists():
        return f"nothing was finished yet; to start over: {command}"
    return f"finished stages are kept in {folder}; to go on there: {command}"


def _print_result(hydra: Ensemble, folder: Path, config: HydraConfig) -> None:
    print(hydra.describe())
    calibration = hydra.metadata.calibration
    if calibration is not None and calibration.threshold is not None:
        print(f"abstains       where {calibration.score} is above {calibration.threshold:.4g}, calibrated to accept "
              f"{config.accepted_share:.0%} of held-out data")  # fmt: skip
    print(f"\nThe ensemble is in {folder / RESULT}, how it was made in {folder / 'summary.json'}. Next:")
    quoted = shlex.quote(str(folder))
    print(f"  hydra-ensembles info {quoted}")
    print(f"  hydra-ensembles predict {quoted} {'IMAGE...' if hydra.kind == 'image' else '--text TEXT'}")
    print(f"  hydra-ensembles evaluate {quoted} --id DATA --ood near:NAME=DATA")
