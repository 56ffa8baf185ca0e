"""Data by name: a path, a set of the hub, of torchvision or of a suite; with classes numbered as the model's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data.dataset import AnyDataset, subset
from ..data.loading import Columns, load
from ..data.suites import SUITES, SetRef, Suite, suite
from ..errors import ConfigError, DataError
from ..model.ensemble import Ensemble
from ..schema import from_plain
from .command import did_you_mean, names_beside

SUITE, HUB = "suite:", ("hub:", "hf:")
TORCHVISION = "torchvision:"
FORMS = "a path, hub:NAME[:CONFIG][:SPLIT], torchvision:NAME, suite:NAME:SET, or the name of a suite"
SEED = 0  # which samples `limit` keeps
USUAL_BATCH = 64
SHOWN = 6  # names in an error

Role = Literal["id", "circuit_ood", "train", "validation", "test", "ood"]
UNLABELLED: tuple[Role, ...] = ("circuit_ood", "ood")


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
        for name, least in (("limit", 2), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")


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
    found, split = existing_path(spec)
    prefix, _, rest = spec.partition(":")
    if found is not None:
        data = _load(found, split, role, settings)
    elif spec.startswith(SUITE) or spec in SUITES:
        return load_reference(_reference(spec.removeprefix(SUITE), role), role, settings)
    elif spec.startswith(HUB):
        name, *parts = rest.split(":")
        if not name or len(parts) > 2:
            raise DataError(f"{spec!r} is not of the form hub:NAME[:CONFIG][:SPLIT]")
        config = parts[0] if len(parts) == 2 else None
        data = _load(f"hub:{name}", parts[-1] if parts else None, role, settings, config=config)
    elif spec.startswith(TORCHVISION):
        name, _, part = rest.partition(":")
        data = _load(f"{prefix}:{name}", part or None, role, settings, root=settings.root)
    else:
        path = Path(spec.rpartition(":")[0] or spec).expanduser()
        hint = did_you_mean(path.name, [*names_beside(path), *SUITES])
        raise DataError(f"no data {spec!r}: there is no such file or folder, and no such suite{hint}; give {FORMS}")
    return _limited(data, role, settings)


def _load(name: str | Path, split: str | None, role: Role, settings: DataSettings, **options: Any) -> AnyDataset:
    columns = from_plain(Columns, settings.columns, "columns")
    return load(name, split, columns=columns, labels="optional" if role in UNLABELLED else "required", **options)


def existing_path(spec: str) -> tuple[Path | None, str | None]:
    """The file or folder that a name of data stands for, and the split behind it; None where there is none."""
    path = Path(spec).expanduser()
    if not spec or spec.startswith((SUITE, *HUB, TORCHVISION)):
        return None, None
    if path.exists():
        return path, None
    before, _, split = spec.rpartition(":")
    path = Path(before).expanduser()
    return (path, split) if before and path.exists() else (None, None)


def require_different(*named: tuple[str, str | None]) -> None:
    """Refuse settings (the name of each, and the data it names) two of which stand for the same data.

    Raises:
        DataError: They name the same file or folder, or are written alike.
    """
    seen: dict[object, str] = {}
    for name, spec in named:
        path, split = (None, None) if spec is None else existing_path(spec)
        if spec is None or (path is None and spec.removeprefix(SUITE) in SUITES):  # a suite has a set for each role
            continue
        place = spec if path is None else (path.resolve(), split)
        if place in seen:
            raise DataError(f"{name} {spec} names the same data as {seen[place]}; give each set data of its own")
        seen[place] = f"{name} {spec}"


def set_of_suite(found: Suite, role: Role) -> SetRef | None:
    """The set a suite has for a role; None where it has none, or several.

    What a build reads as `id` is the validation set: the test set is for `evaluate`.
    """
    sets = {"circuit_ood": found.circuit_ood, "train": found.train, "test": found.id, "ood": None}
    return sets.get(role, found.validation)


def _reference(name: str, role: Role) -> SetRef:
    """`SUITE:SET`, or of `SUITE` alone the set for the role."""
    name, _, part = name.partition(":")
    found = suite(name)
    named = {ref.name: ref for ref in (*found.near, *found.far, *found.apart, *found.tasks)}
    sets = {"test": found.id, "circuit_ood": found.circuit_ood, "train": found.train, "validation": found.validation}
    sets |= named
    ref = sets.get(part) if part else set_of_suite(found, role)
    if ref is None:
        known = [key for key, one in sets.items() if one is not None]
        raise DataError(f"suite {name!r} has no set {part or role!r}{did_you_mean(part, known)}; it has {known}")
    return ref


def load_reference(ref: SetRef, role: Role, settings: DataSettings) -> AnyDataset:
    """Load a set of a suite."""
    return _limited(ref.load(settings.root), role, settings)


def _limited(data: AnyDataset, role: Role, settings: DataSettings) -> AnyDataset:
    """At most `limit` samples; labelled sets keep the proportions of their classes."""
    if settings.limit is None or len(data) <= settings.limit:
        return data
    return subset(data, settings.limit, SEED, stratified=role not in UNLABELLED)


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
        return _named(data, labels, present)
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


def _named(data: AnyDataset, labels: Sequence[str], present: Sequence[int]) -> AnyDataset:
    number = {label: index for index, label in enumerate(labels)}
    unknown = [data.class_names[index] for index in present if data.class_names[index] not in number]
    if unknown:
        raise DataError(
            f"{data.name} has the classes {_some(unknown)}, which the model does not have (it has {_some(labels)})"
            f"{did_you_mean(unknown[0], labels)}; rename them, or set by_position if they are in the model's order"
        )
    return data.relabel({index: number[data.class_names[index]] for index in present}, labels)


def _numbered(data: AnyDataset, model: Ensemble, numbers: Mapping[int, int], names: Sequence[str]) -> AnyDataset:
    largest = max(numbers.values())
    if largest >= model.num_classes:
        raise DataError(
            f"{data.name} has labels up to {largest}, but the model has {model.num_classes} classes (0 to "
            f"{model.num_classes - 1}); give the data the model was trained for"
        )
    unchanged = all(old == new for old, new in numbers.items()) and tuple(names) == data.class_names
    return data if unchanged else data.relabel(dict(numbers), names)


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
