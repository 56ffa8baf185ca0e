"""Models by name: a folder, a timm name, or an id on the Hugging Face hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .._utils import require, require_device
from ..convert.convert import convert
from ..errors import CheckpointError, ConfigError, ConversionError, HydraError, MissingExtraError
from ..model.clip import DualEncoder
from ..model.ensemble import Ensemble
from ..pipeline.run_folder import IDENTITY, RESULT
from .command import did_you_mean, names_beside

TIMM, HUB = "timm:", ("hub:", "hf:")
TRANSFORMERS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")
SEED = 0  # random weights are the same whenever they are asked for
SHOWN = 6  # names in an error


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is made where its name alone does not say so.

    Attributes:
        model: Folder, timm:NAME, hub:OWNER/NAME, or a bare timm name.
        weights: Weights of a timm model, a .safetensors file.
        num_classes: Classes of the timm model; read off the weights if not given.
        labels: Text file with the class names, one a line, in the order of the logits.
        model_options: Argument of timm.create_model, as img_size=64, once for each.
        random_weights: An untrained timm model, to try things out.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
    """

    model: str
    weights: str | None = None
    num_classes: int | None = None
    labels: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    random_weights: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        if self.weights is not None and self.random_weights:
            raise ConfigError("weights and random_weights exclude each other; give one of them")
        reserved = sorted(self.model_options.keys() & {"pretrained", "checkpoint_path"})
        if reserved:
            raise ConfigError(f"model_options cannot set {reserved[0]}; use weights or random_weights")
        if self.num_classes is not None and self.num_classes < 2:
            raise ConfigError(f"num_classes must be at least 2, got {self.num_classes}")
        self.place()

    def place(self) -> torch.device:
        """The device; `auto` is the first GPU, or else the CPU."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return require_device(automatic if self.device == "auto" else self.device)


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
    - `hub:OWNER/NAME` (or `hf:`): a classifier of transformers, a model of timm, or one that this library published;
    - a folder: of this library (also the run folder of `build`), of transformers, of timm;
    - a bare name: such a folder, else a timm name, else an id `owner/name` of the hub.
    """
    name = settings.model
    folder = Path(name).expanduser()
    if name.startswith(TIMM):
        model: Ensemble | DualEncoder = _load_timm(name.removeprefix(TIMM), settings)
    elif name.startswith(HUB):
        model = _from_hub(name.partition(":")[2], settings)
    elif folder.is_dir():
        model = _from_folder(folder, settings)
    elif _is_timm_name(name):
        model = _load_timm(name, settings)
    elif _looks_like_hub_id(name):
        model = _from_hub(name, settings)
    else:
        raise _not_found(name)
    if settings.labels is not None and isinstance(model, Ensemble):
        model = model.with_metadata(labels=_read_labels(Path(settings.labels).expanduser(), model.num_classes))
    return model.to(settings.place())


def _from_folder(folder: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    if (folder / IDENTITY).is_file():
        folder = folder / RESULT
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder.parent} has no finished ensemble; run the same build again, it goes on there, or name the "
                "folder of a model"
            )
    path = folder / "config.json"
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:SHOWN]
        raise CheckpointError(
            f"{folder} is a folder without config.json (it has {', '.join(found) or 'no files'}); give the folder that "
            "save_pretrained wrote, or a timm name with weights"
        )
    return _by_config(str(folder), "local-dir", path, settings)


def _from_hub(name: str, settings: ModelSettings) -> Ensemble | DualEncoder:
    hub = require("huggingface_hub", extra="transformers")
    try:
        path = Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub client raises whatever its HTTP library does
        raise CheckpointError(
            f"there is no folder {name!r} here, and the hub did not give such a model ({_first_line(error)}); check "
            "the name (owner/name) and the connection, or give a folder"
        ) from error
    return _by_config(name, "hf-hub", path, settings)


def _by_config(source: str, timm_scheme: str, path: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    """Load a folder or hub id by what its `config.json` says of the library that wrote it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); save or download the model again") from error
    config = content if isinstance(content, dict) else {}
    if "architecture" in config:
        return _load_timm(f"{timm_scheme}:{source}", settings)
    making = ("weights", "num_classes", "model_options", "random_weights")
    given = [name for name in making if getattr(settings, name)]
    if given:
        raise ConfigError(f"{source} brings its own weights and settings; leave out {', '.join(given)}")
    if config.get("format") == "hydra_ensembles":
        kind = DualEncoder if config.get("kind") == "dual_encoder" else Ensemble
        return kind.from_pretrained(source)
    if "model_type" in config:
        return _load_transformers(source, config)
    raise CheckpointError(
        f"{path} says neither 'format' (this library), 'model_type' (transformers) nor 'architecture' (timm); give the "
        "folder that save_pretrained wrote"
    )


def _timm_names() -> list[str]:
    """Every name that timm knows; none where it is not installed."""
    try:
        return list(require("timm", extra="timm").list_models())
    except MissingExtraError:
        return []


def _is_timm_name(name: str) -> bool:
    """Whether timm knows a model of this name; a tag after a point is looked past."""
    return name.partition(".")[0] in _timm_names()


def _load_timm(name: str, settings: ModelSettings) -> Ensemble:
    """Make a timm model, with its pretrained weights, those of a file, or random ones."""
    timm = require("timm", extra="timm")
    if ":" not in name and not _is_timm_name(name):
        raise CheckpointError(f"timm has no model {name!r}{did_you_mean(name, _timm_names())}")
    pretrained = settings.weights is None and not settings.random_weights
    if pretrained and settings.num_classes is not None:
        raise ConfigError(
            f"num_classes={settings.num_classes} would put an untrained classifier on {name}; give the weights of your "
            "fine-tuned model, or random_weights to try things out"
        )
    state = {} if settings.weights is None else _read_weights(Path(settings.weights).expanduser())
    options = dict(settings.model_options)
    if not pretrained:
        stored = (len(state[name]) for name in ("head.weight", "head.fc.weight") if name in state)
        options = {"num_classes": settings.num_classes or next(stored, None), **options}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = timm.create_model(name, pretrained=pretrained, **options).eval()
    except HydraError:
        raise
    except Exception as error:  # timm raises whatever its model, the hub client or the HTTP library does
        hint = (
            "its pretrained weights may not exist or not be reachable: check the connection, or give a file of weights"
            if pretrained
            else "check model_options and num_classes"
        )
        raise CheckpointError(f"timm could not make {name}: {_first_line(error)}; {hint}") from error
    if settings.weights is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights {settings.weights} do not fit timm:{name}; check the name, num_classes and model_options "
                f"(img_size, patch_size, ...): {str(error)[:400]}"
            ) from error
    converted: Ensemble = convert(model)
    return converted


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"the weights {path} are not a .safetensors file, and no other kind is read because others can run code; "
            "save the model with safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights {path} cannot be read: {error}") from error


def _load_transformers(source: str, config: Mapping[str, Any]) -> Ensemble:
    """Load a classifier with its tokenizer or image processor, from a folder or the hub."""
    transformers = require("transformers", extra="transformers")
    names = [str(name) for name in config.get("architectures") or ()]
    chosen = next((name for name in names if name.endswith(TRANSFORMERS)), None)
    if chosen is None or not hasattr(transformers, chosen):
        raise ConversionError(
            f"{source} is a {' or '.join(names) or config['model_type']}, which has no trained classifier; give a "
            "model for image or sequence classification"
        )
    try:
        transformers.utils.logging.disable_progress_bar()  # loading a local file takes no time worth a bar
        model = getattr(transformers, chosen).from_pretrained(source).eval()
    except Exception as error:  # the library raises whatever it meets
        raise CheckpointError(f"transformers could not load {source}: {_first_line(error)}") from error
    text = chosen.endswith("ForSequenceClassification")
    try:
        processor = (transformers.AutoTokenizer if text else transformers.AutoImageProcessor).from_pretrained(source)
    except (OSError, ValueError):
        processor = None
    if text and processor is not None and processor.get_vocab().keys() <= set(processor.all_special_tokens):
        processor = None  # without files, transformers makes a tokenizer that knows no word
    converted: Ensemble = convert(model, processor=processor)
    return converted


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no further details'}"


def _read_labels(path: Path, classes: int) -> tuple[str, ...]:
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
        return CheckpointError(f"{name} is a file; give a folder, or a timm name with these as its weights")
    known = _timm_names()
    timm = "timm does not know the name" if known else "timm is not installed (pip install 'hydra-ensembles[timm]')"
    return CheckpointError(
        f"no model {name!r}: there is no such folder, {timm}, and it is not of the form owner/name of the hub"
        f"{did_you_mean(path.name, [*names_beside(path), *known])}"
    )
