"""Models by name: a folder, a timm name, or an id on the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..model.clip import DualEncoder
from ..model.ensemble import Ensemble
from ..pipeline.run_folder import RESULT
from .nearest import did_you_mean
from .settings import ModelSettings, choose_device
from .timm_models import is_timm_name, load_timm, timm_names
from .transformers_models import hub_config, load_transformers

TIMM, HUB = "timm:", "hf:"
RUN_FILE = "run.json"


def load_classifier(settings: ModelSettings) -> Ensemble:
    """The model of the settings as an ensemble, on its device; see `load_model`.

    Raises:
        HydraError: There is no such model, or it is no classifier.
    """
    model = load_model(settings)
    if isinstance(model, DualEncoder):
        raise ConfigError(f"{settings.model} is a dual encoder (CLIP); this command takes classifiers")
    if not model.num_classes:
        raise ConfigError(
            f"{settings.model} has no classifier; this command needs one: fine-tune it on your classes first"
        )
    return model


def load_model(settings: ModelSettings) -> Ensemble | DualEncoder:
    """Find and load a model.

    Accepted are

    - `timm:NAME`: its pretrained weights, or `weights`, or random ones;
    - `hf:ID`: a classifier of transformers, a model of timm, or one that this library published;
    - a folder: of this library (also the run folder of `build`), of transformers, of timm;
    - a bare name: such a folder, else a timm name, else an id `owner/name` of the hub.
    """
    name = settings.model
    if name.startswith(TIMM):
        model: Ensemble | DualEncoder = load_timm(name.removeprefix(TIMM), settings)
    elif name.startswith(HUB):
        model = _from_hub(name.removeprefix(HUB), settings)
    elif Path(name).expanduser().is_dir():
        model = _from_folder(Path(name).expanduser(), settings)
    elif is_timm_name(name):
        model = load_timm(name, settings)
    elif _looks_like_hub_id(name):
        model = _from_hub(name, settings)
    else:
        raise _not_found(name)
    if settings.labels is not None and isinstance(model, Ensemble):
        model = model.with_metadata(labels=_read_labels(Path(settings.labels), model.num_classes))
    return model.to(choose_device(settings.device))


def _from_folder(folder: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    if (folder / RUN_FILE).is_file():
        if not (folder / RESULT / "config.json").is_file():
            raise CheckpointError(
                f"{folder} is a build that is not finished; run the same build again, it goes on there"
            )
        folder = folder / RESULT
    config = _read_config(folder)
    if config.get("format") == "hydra_ensembles":
        _refuse_making(settings, f"{folder} holds a saved ensemble")
        return _saved(str(folder), config)
    if "model_type" in config:
        _refuse_making(settings, f"{folder} holds a model of transformers")
        return load_transformers(str(folder), config)
    if "architecture" in config:
        return load_timm(f"local-dir:{folder}", settings)
    raise CheckpointError(
        f"{folder / 'config.json'} says neither 'format' (this library), 'model_type' (transformers) nor "
        "'architecture' (timm); give the folder that save_pretrained wrote"
    )


def _from_hub(name: str, settings: ModelSettings) -> Ensemble | DualEncoder:
    config = hub_config(name)
    if config.get("format") == "hydra_ensembles":
        return _saved(name, config)
    if "architecture" in config:
        return load_timm(f"hf-hub:{name}", settings)
    return load_transformers(name, config)


def _saved(source: str, config: dict[str, Any]) -> Ensemble | DualEncoder:
    kind = DualEncoder if config.get("kind") == "dual_encoder" else Ensemble
    return kind.from_pretrained(source)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        found = sorted(entry.name for entry in folder.iterdir())[:8]
        raise CheckpointError(
            f"{folder} is a folder without config.json (it has {', '.join(found) or 'no files'}); give the folder that "
            "save_pretrained wrote, or a timm name with --weights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); save or download the model again") from error
    return content if isinstance(content, dict) else {}


def _refuse_making(settings: ModelSettings, what: str) -> None:
    """Refuse options that only make sense for a model that is made here."""
    given = [
        flag
        for flag, value in (
            ("--weights", settings.weights),
            ("--num-classes", settings.num_classes),
            ("--model-option", settings.model_options),
            ("--random-weights", settings.random_weights),
        )
        if value
    ]
    if given:
        raise ConfigError(f"{what}, which brings its own weights and settings; leave out {', '.join(given)}")


def _read_labels(path: Path, classes: int) -> tuple[str, ...]:
    if not path.is_file():
        raise ConfigError(f"--labels {path}: there is no such file; give a text file with the class names, one a line")
    names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) != classes or len(set(names)) != len(names):
        raise ConfigError(f"{path} must name {classes} different classes, one a line; it has {len(set(names))} names")
    return names


def _looks_like_hub_id(name: str) -> bool:
    owner, _, rest = name.partition("/")
    looks_so = bool(owner and rest) and "/" not in rest and not name.startswith((".", "~"))
    return looks_so and not Path(owner).exists()  # a folder mistyped below one that is here


def _not_found(name: str) -> CheckpointError:
    path = Path(name).expanduser()
    if path.is_file():
        return CheckpointError(
            f"{name} is a file; for weights of a timm model write: timm:NAME --weights {name}, otherwise give a folder"
        )
    folders = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    known = timm_names()
    timm = "timm does not know the name" if known else "timm is not installed (pip install 'hydra-ensembles[timm]')"
    hint = did_you_mean(path.name, [*folders, *known])
    return CheckpointError(
        f"no model {name!r}: there is no such folder, {timm}, and it is not of the form owner/name of the hub{hint}"
    )
