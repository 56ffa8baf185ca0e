"""Models and data by name: folders and files, the Hugging Face hub, timm, torchvision, suites; classes made to fit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .._utils import require, require_device
from ..convert.convert import convert
from ..data.dataset import AnyDataset, subset
from ..data.loading import Columns, load
from ..data.suites import SUITES, SetRef, suite
from ..errors import CheckpointError, ConfigError, ConversionError, DataError, HydraError, MissingExtraError
from ..model.clip import DualEncoder
from ..model.ensemble import Ensemble
from ..pipeline.run_folder import IDENTITY, RESULT
from ..schema import from_plain
from .command import did_you_mean, names_beside

TIMM, HUB, TORCHVISION, SUITE = "timm:", ("hub:", "hf:"), "torchvision:", "suite:"
TRANSFORMERS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")
SEED = 0  # random weights, and the samples that `limit` keeps, are the same whenever they are asked for
USUAL_BATCH = 64
SHOWN = 6  # names in an error

Role = Literal["id", "circuit_ood", "train", "validation", "test", "ood"]
UNLABELLED: tuple[Role, ...] = ("circuit_ood", "ood")


def require_at_least(settings: object, **smallest: int) -> None:
    """Refuse settings below these numbers; None is no number."""
    for name, least in smallest.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


# --- models ----------------------------------------------------------------------------------------------------------


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
        if not self.model:
            raise ConfigError("model is empty; name a folder, timm:NAME or hub:OWNER/NAME")
        if self.weights is not None and self.random_weights:
            raise ConfigError("weights and random_weights exclude each other; give one of them")
        for reserved in self.model_options.keys() & {"pretrained", "checkpoint_path"}:
            raise ConfigError(f"model_options cannot set {reserved}; use weights or random_weights")
        require_at_least(self, num_classes=2)
        self.place()

    def place(self) -> torch.device:
        """The device; `auto` is the first GPU, or else the CPU."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return require_device(automatic if self.device == "auto" else self.device)

    @property
    def own_name(self) -> str:
        """What tables call the model: the last part of its name."""
        return Path(self.model.rstrip("/")).name or self.model


def load_classifier(settings: ModelSettings) -> Ensemble:
    """The model of the settings as an ensemble; see `load_model`.

    Raises:
        HydraError: There is no such model, or it is no classifier.
    """
    model = load_model(settings)
    if isinstance(model, DualEncoder):
        raise ConfigError(f"{settings.model} is a dual encoder (CLIP); this command takes classifiers")
    if not model.num_classes:
        raise ConfigError(f"{settings.model} has no classifier; fine-tune it on your classes first")
    return model


def load_model(settings: ModelSettings) -> Ensemble | DualEncoder:
    """Find and load a model, onto its device.

    Accepted are

    - `timm:NAME`: its pretrained weights, or `weights`, or random ones;
    - `hub:OWNER/NAME` (or `hf:`): a classifier of transformers, a model of timm, or one that this library published;
    - a folder: of this library (also the run folder of `build`), of transformers, of timm;
    - a bare name: such a folder, else a timm name, else an id `owner/name` of the hub.
    """
    name, path = settings.model, Path(settings.model).expanduser()
    model: Ensemble | DualEncoder
    if name.startswith(TIMM):
        model = _load_timm(name.removeprefix(TIMM), settings)
    elif name.startswith(HUB):
        model = _from_hub(name.partition(":")[2], settings)
    elif path.is_dir():
        model = _from_folder(path, settings)
    elif path.is_file():
        raise CheckpointError(f"{name} is a file; give a folder, or a timm name with these as its weights")
    elif _is_timm_name(name):
        model = _load_timm(name, settings)
    elif _looks_like_hub_id(name):
        model = _from_hub(name, settings)
    else:
        known = _timm_names()
        timm = "timm does not know the name" if known else "timm is not installed (pip install 'hydra-ensembles[timm]')"
        near = did_you_mean(path.name, [*names_beside(path), *known])
        raise CheckpointError(
            f"no model {name!r}: there is no such folder, {timm}, and it is not of the form owner/name of the hub{near}"
        )
    if settings.labels is not None and isinstance(model, Ensemble):
        file, classes = Path(settings.labels).expanduser(), model.num_classes
        labels = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        if len(labels) != classes or len(set(labels)) != classes:
            raise ConfigError(f"{file} must name {classes} different classes, one a line; it has {len(set(labels))}")
        model = model.with_metadata(labels=labels)
    return model.to(settings.place())


def _from_folder(folder: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    is_run = (folder / IDENTITY).is_file()
    path = (folder / RESULT if is_run else folder) / "config.json"
    if is_run and not path.is_file():
        raise CheckpointError(f"{folder} has no finished ensemble; run the same build again, it goes on there")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is a folder without config.json (it has {_some(sorted(one.name for one in folder.iterdir()))}); "
            "give the folder that save_pretrained wrote, or a timm name with weights"
        )
    return _by_config(str(path.parent), "local-dir", path, settings)


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
    other = config.get("format") == "hydra_ensembles" or (timm_scheme == "local-dir" and "model_type" in config)
    if "architecture" in config and not other:
        return _load_timm(f"{timm_scheme}:{source}", settings)
    making = ("weights", "num_classes", "model_options", "random_weights")
    given = [name for name in making if getattr(settings, name)]
    if given:
        raise ConfigError(f"{source} brings its own weights and settings; leave out {', '.join(given)}")
    if config.get("format") == "hydra_ensembles":
        return (DualEncoder if config.get("kind") == "dual_encoder" else Ensemble).from_pretrained(source)
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
    return name.partition(".")[0] in _timm_names()  # without the tag that says which weights


def _load_timm(name: str, settings: ModelSettings) -> Ensemble:
    """Make a timm model, with its pretrained weights, those of a file, or random ones."""
    timm = require("timm", extra="timm")
    if ":" not in name and not _is_timm_name(name):
        raise CheckpointError(f"timm has no model {name!r}{did_you_mean(name, _timm_names())}")
    state = None if settings.weights is None else _read_weights(Path(settings.weights).expanduser())
    pretrained = state is None and not settings.random_weights
    options = dict(settings.model_options)
    if not pretrained:
        stored = (len(state[key]) for key in ("head.weight", "head.fc.weight") if state is not None and key in state)
        options = {"num_classes": settings.num_classes or next(stored, None), **options}
    elif settings.num_classes is not None:
        raise ConfigError(
            f"num_classes={settings.num_classes} would put an untrained classifier on {name}; give the weights of your "
            "fine-tuned model, or random_weights to try things out"
        )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = timm.create_model(name, pretrained=pretrained, **options).eval()
    except HydraError:
        raise
    except Exception as error:  # timm raises whatever its model, the hub client or the HTTP library does
        hint = "check the connection, or give a file of weights" if pretrained else "check model_options"
        raise CheckpointError(f"timm could not make {name}: {_first_line(error)}; {hint}") from error
    if state is not None:
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
    chosen = next((name for name in names if name.endswith(TRANSFORMERS) and hasattr(transformers, name)), None)
    if chosen is None:
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
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first or 'no further details'}"


def _looks_like_hub_id(name: str) -> bool:
    owner, _, rest = name.partition("/")
    looks_so = bool(owner and rest) and "/" not in rest and not name.startswith((".", "~"))
    return looks_so and not Path(owner).exists()  # a folder mistyped below one that is here


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSettings:
    """How data are read.

    Attributes:
        root: Folder that the data of a suite lie in.
        columns: Column of a table, as text=sentence; image, text, text_pair and label can be named.
        by_position: Match classes by number, whatever their names.
        limit: Use at most so many samples of each set, drawn for good.
        batch_size: Samples a batch; 64 if not given.
        workers: Worker processes that read data.
    """

    root: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    by_position: bool = False
    limit: int | None = None
    batch_size: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        require_at_least(self, limit=2, batch_size=1, workers=0)


def load_data(spec: str, role: Role, settings: DataSettings) -> AnyDataset:
    """Load a data set.

    Args:
        spec: A file or folder (with `:SPLIT` behind it, if need be), `hub:NAME[:CONFIG][:SPLIT]` (or `hf:`),
            `torchvision:NAME[:SPLIT]`, `suite:NAME:SET`, or the name of a suite, which stands for its set of this role.
        role: What it is for; OOD data need no labels.
        settings: Columns, root and limit.

    Raises:
        DataError: It is not there, or not as described; the message says what was tried.
    """
    source, split = existing_path(spec)
    options: dict[str, Any] = {"columns": from_plain(Columns, settings.columns, "columns")}
    options["labels"] = "optional" if role in UNLABELLED else "required"
    if source is not None:
        data = load(source, split, **options)
    elif spec.startswith(SUITE) or spec in SUITES:
        name, _, part = spec.removeprefix(SUITE).partition(":")
        sets, part = sets_of_suite(name), part or ("validation" if role == "id" else role)  # the test set is sealed
        if part not in sets:
            raise DataError(f"suite {name!r} has no set {part!r}{did_you_mean(part, sets)}; it has {list(sets)}")
        data = sets[part].load(settings.root)
    elif spec.startswith(HUB):
        name, *parts = spec.partition(":")[2].split(":")
        if not name or len(parts) > 2:
            raise DataError(f"{spec!r} is not of the form hub:NAME[:CONFIG][:SPLIT]")
        config = parts[0] if len(parts) == 2 else None
        data = load(f"hub:{name}", parts[-1] if parts else None, config=config, **options)
    elif spec.startswith(TORCHVISION):
        name, _, part = spec.removeprefix(TORCHVISION).partition(":")
        data = load(TORCHVISION + name, part or None, root=settings.root, **options)
    else:
        path = Path(spec.rpartition(":")[0] or spec).expanduser()
        raise DataError(
            f"no data {spec!r}: there is no such file or folder, and no such suite"
            f"{did_you_mean(path.name, [*names_beside(path), *SUITES])}; give a path, hub:NAME[:CONFIG][:SPLIT], "
            "torchvision:NAME, suite:NAME:SET, or the name of a suite"
        )
    if settings.limit is None or len(data) <= settings.limit:
        return data
    return subset(data, settings.limit, SEED, stratified=role not in UNLABELLED)


def existing_path(spec: str) -> tuple[Path | None, str | None]:
    """The file or folder that a name of data stands for, and the split behind it; None where there is none."""
    if not spec.startswith((SUITE, *HUB, TORCHVISION)):
        before, _, last = spec.rpartition(":")
        for name, split in ((spec, None), (before, last)):
            path = Path(name).expanduser()
            if name and path.exists():
                return path, split
    return None, None


def require_different(*named: tuple[str, str | None]) -> None:
    """Refuse settings (the name of each, and the data it names) two of which stand for the same data.

    Raises:
        DataError: They name the same file or folder, or are written alike.
    """
    seen: dict[object, str] = {}
    for name, spec in named:
        path, split = existing_path(spec or "")
        if spec is None or (path is None and spec.removeprefix(SUITE) in SUITES):  # a suite has a set for each role
            continue
        place = spec if path is None else (path.resolve(), split)
        if place in seen:
            raise DataError(f"{name} {spec} names the same data as {seen[place]}; give each set data of its own")
        seen[place] = f"{name} {spec}"


def sets_of_suite(name: str) -> dict[str, SetRef]:
    """The sets of a suite: by what they are for, and the others by name."""
    found = suite(name)
    sets = {"test": found.id, "circuit_ood": found.circuit_ood, "train": found.train, "validation": found.validation}
    sets |= {ref.name: ref for ref in (*found.near, *found.far, *found.apart, *found.tasks)}
    return {part: ref for part, ref in sets.items() if ref is not None}


def fit_to_model(data: AnyDataset, role: Role, model: Ensemble, settings: DataSettings) -> AnyDataset:
    """Check that a model can read a set, and number the classes of a labelled one as the model's logits.

    Where both name their classes, names decide, and the data may have fewer classes. Where the model has no names,
    or the data only numbers, or `by_position` is set, numbers decide.

    Raises:
        DataError: Images for a text model or the other way round, classes that the model does not have, or
            fewer than two of them.
    """
    if data.kind != model.kind:
        raise DataError(f"{data.name} holds {data.kind}s, but the model reads {model.kind}s; give it {model.kind}s")
    if model.metadata.preprocessing is None:
        raise DataError(
            f"the model does not know how {model.kind} inputs are preprocessed; for a model of transformers, save its "
            f"{'tokenizer' if model.kind == 'text' else 'image processor'} into the same folder"
        )
    if role in UNLABELLED:
        return data
    present = np.unique(data.labels).tolist()
    if len(present) < 2:
        raise DataError(
            f"{data.name} has samples of {len(present)} class; at least two classes are needed: check that it has a "
            "folder for each class, or the right label column"
        )
    names, labels = data.class_names, model.metadata.labels
    if settings.by_position or names == labels:
        return _numbered(data, model, {label: label for label in present}, names)
    if labels and not (_are_numbers(names) and set(names).isdisjoint(labels)):
        unknown = [names[index] for index in present if names[index] not in labels]
        if unknown:
            raise DataError(
                f"{data.name} has the classes {_some(unknown)}, which the model does not have (it has {_some(labels)})"
                f"{did_you_mean(unknown[0], labels)}; rename them, or set by_position if they are in the model's order"
            )
        return data.relabel({index: labels.index(names[index]) for index in present}, labels)
    if _are_numbers(names):  # called 0, 1, 10, 2: the names are the numbers, not their order
        numbers = {label: int(names[label]) if names else label for label in present}
        return _numbered(data, model, numbers, [str(index) for index in range(model.num_classes)])
    if len(names) != model.num_classes:
        raise DataError(
            f"{data.name} has {len(names)} classes ({_some(names)}), the model {model.num_classes} without names; give "
            "their names as labels (a file, one a line), or, if the classes are the first ones, set by_position"
        )
    return data


def with_labels_of(model: Ensemble, data: AnyDataset) -> Ensemble:
    """The model, with the class names of the data where it has none and the numbers of classes agree."""
    names = data.class_names
    if model.metadata.labels or len(names) != model.num_classes or _are_numbers(names):
        return model
    return model.with_metadata(labels=names)


def _numbered(data: AnyDataset, model: Ensemble, numbers: Mapping[int, int], names: Sequence[str]) -> AnyDataset:
    largest, classes = max(numbers.values()), model.num_classes
    if largest >= classes:
        raise DataError(
            f"{data.name} has labels up to {largest}, but the model has {classes} classes (0 to {classes - 1}); give "
            "the data the model was trained for"
        )
    unchanged = all(old == new for old, new in numbers.items()) and tuple(names) == data.class_names
    return data if unchanged else data.relabel(dict(numbers), names)


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
