"""Models and data by name (folders, files, the Hugging Face hub, timm, torchvision, suites); matching of classes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .._utils import require, require_device, warn
from ..arguments import END, Checked, Count, Range, Whole
from ..checkpoint import locate
from ..classes import a_few, are_numbers, class_names_in, class_numbers, require_as_many, same_names
from ..convert.convert import convert, table_of
from ..convert.core import MERGE
from ..convert.processors import IMAGE_SETTINGS, TEXT_SETTINGS, with_preprocessing
from ..data.dataset import AnyDataset, subset
from ..data.loading import Columns
from ..data.loading import load as load_set
from ..data.suites import SetRef, suite
from ..errors import CheckpointError, ConfigError, ConversionError, DataError
from ..files import expanded, parse_json, plain_file, read_file
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.kinds import load, require_ensemble
from ..preprocessing import Interpolation
from ..schema import from_plain
from .command import did_you_mean, option

TIMM, HUB, TORCHVISION, SUITE = "timm:", "hub:", "torchvision:", "suite:"
TRANSFORMERS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")
SEED = 0  # `limit` always keeps the same samples
USUAL_BATCH = 64


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSettings(Checked):
    """Which model, its device, and how to create it and preprocess inputs if its name does not determine that."""

    model: str = field(metadata={"help": "Folder, timm:NAME or hub:OWNER/NAME."})
    weights: str | None = option(
        None, "Weights of a timm model, a .safetensors file; its pretrained ones if not given."
    )
    model_options: Mapping[str, Any] = option({}, "Argument of timm.create_model, e.g. img_size=64, repeatable.")
    device: str = option("auto", "cpu, cuda, cuda:1; auto takes a GPU if there is one.")
    image_size: tuple[int, ...] = option(
        (), "Image size, e.g. 224 or 224,192 (height, width), instead of the library's own."
    )
    crop: float | None = option(None, "Share of the resized image to keep, from its centre.")
    mean: tuple[float, ...] = option((), "Mean to subtract from pixels in [0, 1], e.g. 0.5 or 0.485,0.456,0.406.")
    std: tuple[float, ...] = option((), "Standard deviation to divide by, in the same form.")
    interpolation: Interpolation | None = option(None, "How images are resized.")
    max_length: int | None = option(None, "Maximum length of a text, in tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("model is empty; name a folder, timm:NAME or hub:OWNER/NAME")
        for reserved in self.model_options.keys() & {"pretrained", "checkpoint_path"}:
            raise ConfigError(f"model_options cannot set {reserved}; use weights")
        if self.weights is None and "num_classes" in self.model_options:
            raise ConfigError("num_classes would put an untrained classifier on the model; give your own weights, too")
        self.place()

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing settings that were given, by their names in `convert`."""
        settings = {name: getattr(self, name) for name in (*IMAGE_SETTINGS, *TEXT_SETTINGS)}
        return {name: value for name, value in settings.items() if value not in (None, ())}

    def place(self) -> torch.device:
        """The device; `auto` is the first GPU, or the CPU without one."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return require_device(automatic if self.device == "auto" else self.device)

    @property
    def own_name(self) -> str:
        """Default name in tables: the last part of the model's name."""
        return Path(os.path.abspath(expanded(self.model))).name or self.model


def load_classifier(settings: ModelSettings) -> Ensemble:
    """Load the model as an ensemble; raise `HydraError` if it does not exist or is not a classifier."""
    return require_ensemble(load_model(settings), f"{settings.model}: this command", classifies=True)


def further(settings: ModelSettings, name: str) -> ModelSettings:
    """Settings of another training of the same model: a folder or name, or a weights file like the first one's."""
    if name.endswith(".safetensors"):
        if settings.weights is None:
            raise ConfigError(f"{name} is a file of weights; name the first model as timm:NAME with --weights FILE")
        return replace(settings, weights=name)
    if settings.weights is not None and name.startswith(TIMM):
        raise ConfigError(f"{name} would have timm's own weights; name a file instead, such as {settings.weights}")
    return replace(settings, model=name, weights=None, model_options={})


def load_further(settings: ModelSettings, labels: tuple[str, ...]) -> Ensemble:
    """Load another training from the settings of `further`; `labels` are its class names if it has none."""
    model = load_classifier(settings)
    return model if model.metadata.labels else model.with_metadata(labels=labels)


def load_model(settings: ModelSettings) -> Ensemble | DualEncoder:
    """Load a model onto its device: `timm:NAME`, or `hub:OWNER/NAME` or a folder of transformers, timm or ours."""
    name, path = settings.model, expanded(settings.model)
    if name.startswith(TIMM):
        model: Ensemble | DualEncoder = _load_timm(name.removeprefix(TIMM), settings)
    elif name.startswith(HUB):
        model = _from_hub(name.removeprefix(HUB), settings)
    elif path.is_dir():
        model = _from_folder(path, settings)
    else:
        raise CheckpointError(f"no model {name!r}{did_you_mean(path)}; give a folder, timm:NAME or hub:OWNER/NAME")
    if settings.preprocessing:
        if isinstance(model, DualEncoder):
            raise ConfigError(f"{name} is a dual encoder; its preprocessing cannot be changed here")
        model = with_preprocessing(model, settings.preprocessing)
    return model.to(settings.place())


def _from_folder(folder: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    """Load a folder written by a supported library, or the run folder of `build`."""
    path = locate(folder) / "config.json"
    if not path.is_file():
        hint = "give the folder that save_pretrained wrote, or run its build to the end"
        if (folder / "adapter_config.json").is_file():
            hint = f"it holds only adapters: {MERGE}"
        raise CheckpointError(f"{folder} has no config.json and no finished ensemble; {hint}")
    return _by_config(str(path.parent), "local-dir", path, settings)


def _from_hub(name: str, settings: ModelSettings) -> Ensemble | DualEncoder:
    hub = require("huggingface_hub", extra="transformers")
    try:
        path = Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub client also raises errors of its HTTP library
        raise CheckpointError(f"cannot fetch {name!r} from the hub: {error!r}; check name and connection") from error
    return _by_config(name, "hf-hub", path, settings)


def _by_config(source: str, timm_scheme: str, path: Path, settings: ModelSettings) -> Ensemble | DualEncoder:
    """Load a folder or hub id with the library that its `config.json` indicates."""
    content = parse_json(read_file(path), str(path), foreign=True)
    config = content if isinstance(content, dict) else {}
    ours = config.get("format") == "hydra_ensembles"
    if "architecture" in config and not ours and not (timm_scheme == "local-dir" and "model_type" in config):
        return _load_timm(f"{timm_scheme}:{source}", settings, str(config["architecture"]))
    superfluous = [name for name in ("weights", "model_options") if getattr(settings, name)]
    if superfluous:
        raise ConfigError(f"{source} brings its own weights and settings; leave out {', '.join(superfluous)}")
    if ours:
        return load(source)
    if "model_type" in config:
        return _load_transformers(source, path.parent, config)
    raise CheckpointError(f"{path} is not the config of a model of this library, transformers or timm")


def _load_timm(name: str, settings: ModelSettings, architecture: str = "") -> Ensemble:
    """Create a timm model with its pretrained weights, or with those of a file, which determine the number of classes.

    Support is checked by the architecture: the tag says who trained the weights (`openai`, `sam`), and an owner or a
    folder says even less. `architecture` is the one in a config; in a plain name it is the part before the tag.
    """
    timm = require("timm", extra="timm")
    architecture = (architecture or ("" if ":" in name else name)).partition(".")[0]
    if ":" not in name and architecture not in timm.list_models():
        raise CheckpointError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    try:
        state = None if settings.weights is None else load_file(plain_file(expanded(settings.weights)))
    except (OSError, SafetensorError, UnicodeError) as error:  # pickle files are never loaded: they can run code
        raise CheckpointError(f"the weights {settings.weights} cannot be read as safetensors: {error}") from error
    classes = [len(state[key]) for key in ("head.weight", "head.fc.weight") if state is not None and key in state]
    if architecture in timm.list_models():  # check before downloading
        with torch.device("meta"):
            table_of(type(timm.create_model(architecture)))
    options = {"num_classes": classes[0] if classes else None, **settings.model_options}
    try:
        model = timm.create_model(name, pretrained=state is None, **options).eval()
    except Exception as error:  # timm also raises errors of the model, the hub client and its HTTP library
        raise CheckpointError(f"timm could not make {name}: {error!r}; check options and connection") from error
    if state is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            reason = f"do not fit timm:{name} with these model_options: {str(error)[:400]}"
            raise CheckpointError(f"the weights {settings.weights} {reason}") from error
    return convert(model)


def _load_transformers(source: str, folder: Path, config: Mapping[str, Any]) -> Ensemble:
    """Load a classifier with its tokenizer or image processor; `folder` has the files, also those of the hub."""
    transformers = require("transformers", extra="transformers")
    _require_no_code(source, folder)
    names = [str(name) for name in config.get("architectures") or ()]
    chosen = next((name for name in names if name.endswith(TRANSFORMERS) and hasattr(transformers, name)), None)
    kind = str(config["model_type"])
    if chosen is None:
        described = " or ".join(names) or kind
        remedy = "fine-tune it by AutoModelFor…Classification, or by he.convert(model, num_labels=…) and he.finetune"
        if {"text_config", "vision_config"} <= config.keys():
            remedy = "in Python, he.zero_shot(he.convert(model, processor=…), class_names) makes a classifier of it"
        raise ConversionError(f"{source} is a {described}, which has no trained classifier; {remedy}")
    table_of(getattr(transformers, chosen))
    try:
        transformers.utils.logging.disable_progress_bar()  # loading a local file is fast
        model = getattr(transformers, chosen).from_pretrained(source, trust_remote_code=False).eval()
    except Exception as error:  # transformers can raise anything
        raise CheckpointError(f"transformers could not load {source}: {error!r}") from error
    text = chosen.endswith("ForSequenceClassification")
    reader = transformers.AutoTokenizer if text else transformers.AutoImageProcessor
    try:
        processor = reader.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        processor = None
    _require_no_code(source, folder)  # the rest of the hub's files arrived only now
    if text and processor is not None and processor.get_vocab().keys() <= set(processor.all_special_tokens):
        processor = None  # without files, transformers creates a tokenizer with an empty vocabulary
    return convert(model, processor=processor)


def _require_no_code(source: str, folder: Path) -> None:
    """Refuse a model that needs its own code: without it, the outputs may differ."""
    for path in sorted(folder.glob("*config.json")):
        content = parse_json(read_file(path), str(path), foreign=True)
        if isinstance(content, dict) and content.get("auto_map"):
            advice = "if you trust it, load it in Python and give it to he.convert(model, processor=...)"
            raise CheckpointError(f"{source} brings code of its own (auto_map), which is never run here; {advice}")


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSettings(Checked):
    """How data are read."""

    root: str | None = option(None, "Folder with the data of a suite.")
    columns: Mapping[str, str] = option(
        {}, "Column of a table, e.g. text=sentence; image, text, text_pair and label can be named."
    )
    by_position: bool = option(False, "Match classes by number, whatever their names.")
    limit: Annotated[int, Range(2, END - 1)] | None = option(
        None, "Maximum number of samples of each set, drawn at random, always the same."
    )
    batch_size: Whole | None = option(
        None, "Samples per batch; 64 if not given. If a recipe has larger batches, gradients are accumulated."
    )
    workers: Count = option(0, "Worker processes that read data.")


def load_data(spec: str, settings: DataSettings, labelled: bool = True) -> AnyDataset:
    """Load a data set from a file or folder (optionally with `:SPLIT`), the hub, torchvision or a suite."""
    source, split = existing_path(spec)
    columns = from_plain(Columns, settings.columns, "columns")
    options: dict[str, Any] = {"columns": columns, "labels": "required" if labelled else "optional"}
    if source is not None:
        data = load_set(source, split, **options)
    elif spec.startswith(SUITE):
        name, _, part = spec.removeprefix(SUITE).partition(":")
        sets = sets_of_suite(name)
        if part not in sets:
            raise DataError(f"suite {name!r} has no set {part!r}{did_you_mean(part, sets)}; it has {list(sets)}")
        data = sets[part].load(settings.root)
    elif spec.startswith(HUB):
        name, *parts = spec.removeprefix(HUB).split(":")
        if not name or len(parts) > 2:
            raise DataError(f"{spec!r} is not of the form hub:NAME[:CONFIG][:SPLIT]")
        config = parts[0] if len(parts) == 2 else None
        data = load_set(HUB + name, parts[-1] if parts else None, config=config, **options)
    elif spec.startswith(TORCHVISION):
        name, _, part = spec.removeprefix(TORCHVISION).partition(":")
        data = load_set(TORCHVISION + name, part or None, root=settings.root, **options)
    else:
        path = expanded(spec.rpartition(":")[0] or spec)
        forms = "a path, hub:NAME[:CONFIG][:SPLIT], torchvision:NAME[:SPLIT] or suite:NAME:SET"
        raise DataError(f"no data {spec!r}: there is no such file or folder{did_you_mean(path)}; give {forms}")
    if settings.limit is None or len(data) <= settings.limit:
        return data
    return subset(data, settings.limit, SEED, stratified=labelled)


def existing_path(spec: str) -> tuple[Path | None, str | None]:
    """The existing file or folder of a data spec, and the split after it; None for both if there is none."""
    if not spec.startswith((SUITE, HUB, TORCHVISION)):
        before, _, last = spec.rpartition(":")
        for name, split in ((spec, None), (before, last)):
            path = expanded(name)
            if name and path.exists():
                return path, split
    return None, None


def output_folder(output: str, *data: tuple[str, str | None]) -> Path:
    """The output folder of a command; raises if it lies inside the data, given as pairs of role and spec."""
    if not output:
        raise ConfigError("output is empty; name the folder to write to")
    folder = expanded(output)
    for role, spec in data:
        path, _ = existing_path(spec or "")
        if path is not None and folder.resolve().is_relative_to(path.resolve()):
            raise DataError(f"output is {folder}, which is among the {role} data of {path}; name a folder outside it")
    return folder


def full_name_of_data(spec: str) -> str:
    """The absolute form of a data spec: independent of the working directory, and equal for equal data."""
    path, split = existing_path(spec)
    if path is None:
        return spec
    return str(path.resolve()) if split is None else f"{path.resolve()}:{split}"


def require_different_sources(*specs: tuple[str, str | None]) -> None:
    """Raise if two settings, given as pairs of name and data spec, refer to the same data."""
    earlier: dict[object, str] = {}
    for name, spec in specs:
        full_name = full_name_of_data(spec or "")
        if spec is not None and full_name in earlier:
            raise DataError(f"{name} {spec} names the same data as {earlier[full_name]}; give each set data of its own")
        earlier[full_name] = f"{name} {spec}"


def sets_of_suite(name: str) -> dict[str, SetRef]:
    """The sets of a suite: by role, the others by name."""
    entry = suite(name)
    sets = {"test": entry.id, "circuit_ood": entry.circuit_ood, "train": entry.train, "validation": entry.validation}
    sets |= {ref.name: ref for ref in (*entry.near, *entry.far, *entry.apart, *entry.tasks)}
    return {part: ref for part, ref in sets.items() if ref is not None}


def require_preprocessing(model: Ensemble) -> None:
    """Raise if a model has no preprocessing and so cannot read files."""
    if model.metadata.preprocessing is None:
        missing = "tokenizer" if model.kind == "text" else "image processor"
        why = f" ({model.metadata.preprocessing_from})" if model.metadata.preprocessing_from else ""
        advice = f"so it reads no files; save its {missing} into its folder, or give tensors in Python"
        raise DataError(f"the model has no preprocessing{why}, {advice}")


def fit_to_model(data: AnyDataset, model: Ensemble, settings: DataSettings, labelled: bool = True) -> AnyDataset:
    """Check that a model can read a set, and renumber the classes of a labelled set to match the model's logits.

    If both have class names, they are matched by name, and the data may have fewer classes. If the model has no names,
    the data only have numbers, or `by_position` is set, they are matched by number.
    """
    if data.kind != model.kind:
        raise DataError(f"{data.name} holds {data.kind}s, but the model reads {model.kind}s; give it {model.kind}s")
    require_preprocessing(model)
    if not labelled:
        return data
    present = np.unique(data.labels).tolist()
    if len(present) < 2:
        raise DataError(f"{data.name} has samples of {len(present)} class; at least two classes are needed")
    names, labels, classes = data.class_names, model.metadata.labels, model.num_classes
    by_name = bool(names) and not settings.by_position
    numbers = class_numbers(names, labels) if by_name else {label: label for label in present}
    unknown = [names[index] for index in present if index not in numbers]
    if unknown:
        raise DataError(
            f"{data.name} has the classes {a_few(unknown)}, which the model does not have (it has {a_few(labels)})"
            f"{did_you_mean(unknown[0], labels)}; rename them, or give --by-position if their order is the model's"
        )
    numbers = {index: numbers[index] for index in present}
    new_names = names
    if settings.by_position or same_names(names, labels):
        new_names = labels or tuple(map(str, range(classes)))
    elif are_numbers(names) and names != labels:
        new_names = tuple(map(str, range(classes)))
        _warn_of_numbers(data, numbers)
    else:
        require_as_many(names, labels, classes, data.name, "if these are the first ones, give --by-position")
    if max(numbers.values()) >= classes:
        raise DataError(f"{data.name} has labels up to {max(numbers.values())}, but the model has {classes} classes")
    unchanged = new_names == names and all(old == new for old, new in numbers.items())
    return data if unchanged else data.relabel(numbers, new_names)


def _warn_of_numbers(data: AnyDataset, numbers: Mapping[int, int]) -> None:
    """Warn if classes are matched by numbers alone and these may not be the model's."""
    moved = next((index for index, number in numbers.items() if index != number), None)
    if moved is not None:
        warn(
            f"{data.name} has numbers as class names, and {numbers[moved]} is taken as the model's class of that "
            f"number, not as position {moved} of the sorted names; torchvision uses positions: for them --by-position"
        )
    elif min(numbers.values()) == 1:
        warn(f"{data.name} has no sample of class 0; if it counts classes from 1, every label is wrong by one")


def with_labels_of(model: Ensemble, data: AnyDataset) -> Ensemble:
    """The model, with the class names of the data if it has none and the numbers of classes agree."""
    names = class_names_in(data, model.num_classes)
    return model if model.metadata.labels or are_numbers(names) else model.with_metadata(labels=names)
