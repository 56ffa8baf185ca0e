"""Batch formats, the order in which batches are read, and the classes of their labels.

Names of classes decide. A set whose classes all have a name among the model's is numbered as the model is; a set
without names, or a model without any, is taken as it is numbered; anything else is refused: guessing would mix them up.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ._utils import all_seeded, derive_seed
from .errors import DataError
from .settings import short

Inputs = Tensor | dict[str, Tensor]
Batches = Iterable[Any]
Sources = Batches | Mapping[str, Batches]

READ: dict[Literal["image", "text"], tuple[str, ...]] = {
    "image": ("pixel_values",),
    "text": ("input_ids", "attention_mask", "token_type_ids"),
}
"""Names of model inputs, as processors and tokenizers call them; the main input first."""

_ALL_READ = {*READ["image"], *READ["text"]}
_INNER = ("base_dataloader", "batches", "sampler", "batch_sampler", "dataset")
_KEPT = ("epoch", "stream", "generator")
_FORMS = "(inputs, labels), (inputs,), a mapping with 'labels', or a tensor"
_RAW = "preprocess texts and images first: data.batches(data, model.metadata.preprocessing), or in collate_fn"

_NAMES = ("class_names", "classes")  # attributes of data sets
_WAYS = "dataset.with_classes(names) for ours, target_transform= for torchvision, model.with_metadata(labels=names)"


# --- one batch -----------------------------------------------------------------------------------------------


def read_batch(
    batch: Any, name: str = "data", index: int = 0, labelled: bool = True, raw: bool = False
) -> tuple[Any, Tensor | None]:
    """Split one batch into inputs and labels (None if there are none); raise a `DataError` for any other format.

    Accepted are `(inputs, labels)`, `(inputs,)`, a mapping with or without `labels`, and a bare tensor of inputs. Other
    entries of a mapping, and with `labelled=False` whatever is in the place of the labels, are ignored. With
    `raw`, inputs may also be a list of texts or pictures. `name` and `index` are for messages.
    """
    where = f"batch {index} of {name}"
    labels: Any = None
    if isinstance(batch, Mapping):
        inputs: Any = {str(key): value for key, value in batch.items() if key not in ("labels", "label")}
        labels = batch.get("labels", batch.get("label"))
    elif isinstance(batch, list | tuple) and len(batch) in (1, 2):
        inputs, labels = (*batch, None)[:2]
    elif isinstance(batch, Tensor):
        inputs = batch
    else:
        got = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__
        raise DataError(f"{where} is a {got}; expected {_FORMS}")
    if isinstance(inputs, Mapping):
        inputs = _tensors_of(inputs, where)
    elif raw and isinstance(inputs, list | tuple):
        inputs = list(inputs)
    elif not isinstance(inputs, Tensor):
        raise DataError(f"the inputs in {where} are a {type(inputs).__name__}; expected tensors, in {_FORMS} ({_RAW})")
    if not inputs if isinstance(inputs, dict | list) else not inputs.dim():
        raise DataError(f"the inputs in {where} have no tensor with an axis of samples; {_RAW}")
    if labels is None or not labelled:
        return inputs, None
    return inputs, read_labels(labels, size_of(inputs), where)


def _tensors_of(mapping: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """The tensors of a mapping, and arrays and lists under the names of model inputs."""
    found = {name: value for name, value in mapping.items() if isinstance(value, Tensor)}
    for name, value in mapping.items():
        if name in _ALL_READ - found.keys() and value is not None:
            try:
                found[name] = torch.from_numpy(np.stack([np.asarray(row) for row in value]))
            except (TypeError, ValueError) as error:
                problem = f"{name} of {where} is a {type(value).__name__} that cannot be made a tensor ({error})"
                raise DataError(f"{problem}; give one tensor (tokenizers: padding=True), or leave it out") from error
    return found


def read_labels(labels: Any, samples: int, where: str) -> Tensor:
    """Labels `[B]` of any integer type, one per sample; their range is not checked yet. `where` is for messages."""
    try:
        plain = np.array(labels) if hasattr(labels, "iloc") else labels  # a pandas Series
        tensor = plain if isinstance(plain, Tensor) else torch.as_tensor(plain, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"labels in {where} must be whole numbers [B] from 0, got {short(labels)} ({error})") from error
    not_whole = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    if tensor.shape != (samples,) or not_whole:
        problem = f"labels in {where} must be class numbers [{samples}], got {tensor.dtype} {list(tensor.shape)}"
        raise DataError(f"{problem}: .squeeze(1) columns, .argmax(1) one-hot rows, .long() floats")
    return tensor


def require_labels(labels: Tensor | None, classes: int, name: str = "data", index: int = 0) -> Tensor:
    """Require labels that fit the number of classes; the error names the batch."""
    if labels is None:
        raise DataError(f"batch {index} of {name} has no labels; this call needs a list of (inputs, labels)")
    return within_classes(labels, classes, f"batch {index} of {name}")


def within_classes(labels: Tensor, classes: int, where: str) -> Tensor:
    """Labels as int64, checked against the number of classes; `where` is for messages."""
    labels = labels.long()  # before comparing: not every integer type supports it
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        found = f"{where} has labels from {int(labels.min())} to {int(labels.max())}"
        raise DataError(f"{found}, valid are 0 to {classes - 1}; check that model and data have the same classes")
    return labels


def move(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Move inputs to a device, and floating-point ones also to `dtype`."""

    def moved(tensor: Tensor) -> Tensor:
        # Non-blocking only towards the GPU: in the other direction the host could read the copy before it has arrived.
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=device.type == "cuda")

    return changed(inputs, moved)


def changed(inputs: Tensor | Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to every tensor of the inputs."""
    return change(inputs) if isinstance(inputs, Tensor) else {name: change(tensor) for name, tensor in inputs.items()}


def size_of(inputs: Any) -> int:
    """Number of samples in the inputs of one batch, whose tensors all have a batch axis; a list has one item each."""
    return len(inputs if isinstance(inputs, Tensor | list) else next(iter(inputs.values())))


# --- a source of batches -------------------------------------------------------------------------------------


def iterate(
    batches: Batches, name: str = "data", labelled: bool = True, raw: bool = False
) -> Iterator[tuple[int, Any, Tensor | None]]:
    """Read all batches with `read_batch`, each with its number in the source; raise an error that names an empty one.

    Batches without samples are skipped.
    """
    require_batches(batches, name)
    empty = True
    for index, batch in enumerate(batches):
        inputs, labels = read_batch(batch, name, index, labelled, raw)
        if size_of(inputs):
            empty = False
            yield index, inputs, labels
    if empty:
        raise DataError(f"{name} has no samples; check the loader, or that it was not consumed before")


def labelled(batches: Batches, classes: int, name: str = "data") -> Iterator[tuple[int, Inputs, Tensor]]:
    """Read all batches with `iterate`, and require labels that fit the number of classes."""
    for index, inputs, labels in iterate(batches, name):
        yield index, inputs, require_labels(labels, classes, name, index)


def named_sources(sources: Sources, name: str) -> dict[str, Batches]:
    """Sources of batches by their name in messages: the single source given, or the entries of a mapping."""
    if not isinstance(sources, Mapping):
        return {name: sources}
    return {f"{name}[{key!r}]": batches for key, batches in sources.items()}


def require_batches(batches: Any, name: str) -> None:
    """Refuse a single batch, such as a tensor or `(inputs, labels)`, and what cannot be iterated."""
    pair = isinstance(batches, list | tuple) and len(batches) == 2 and getattr(batches[1], "ndim", 0) == 1  # labels
    one = pair or isinstance(batches, Mapping | Tensor)
    if one or isinstance(batches, str) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        got = f"one batch, a {type(batches).__name__}" if one else short(batches)
        raise DataError(f"{name} must be batches: a DataLoader, or a list ([batch] for one); got {got}")


def require_rereadable(batches: Batches, name: str) -> None:
    """Refuse a one-shot iterator: training reads its data once per epoch, and again when it resumes."""
    require_batches(batches, name)
    if isinstance(batches, Iterator):
        raise DataError(f"{name} is an iterator, which can be read only once; give a DataLoader or a list of batches")


def length_of(batches: Batches) -> int | None:
    """Number of batches in one pass, or None if the source has no length."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


@contextmanager
def restored(*sources: Batches | None) -> Iterator[None]:
    """Restore data sources afterwards: their generators, and `epoch` and `stream` where they can be read."""
    parts = [part for source in sources for part in parts_of(source)]
    saved = [(part, name, getattr(part, name)) for part in parts for name in _KEPT if hasattr(part, name)]
    states = [(value, value.get_state()) for _, _, value in saved if isinstance(value, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for part, name, value in saved:
            setter = getattr(part, f"set_{name}", None)
            if name == "generator" and isinstance(value, torch.Generator | None) and part.generator is not value:
                part.generator = value
            elif callable(setter) and getattr(part, name) != value:
                setter(value)


@contextmanager
def epoch_of(batches: Batches, epoch: int, seed: int, device: torch.device) -> Iterator[None]:
    """Run a block in which `batches`, read from the start, yields epoch `epoch` of the stream `seed`."""
    with all_seeded(derive_seed(seed, "data", epoch), device):
        begin_epoch(batches, epoch, seed)
        yield


@contextmanager
def first_epoch(batches: Batches, seed: int) -> Iterator[None]:
    """Read a source from its start, on the CPU, in the order given by a seed; its state is restored afterwards."""
    with restored(batches), epoch_of(batches, 0, seed, torch.device("cpu")):
        yield


def begin_epoch(batches: Batches, epoch: int, seed: int) -> None:
    """Set a source's own state (not the global generators) to the start of an epoch of the stream `seed`."""
    for part in parts_of(batches):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(seed, "order", epoch))
        if callable(getattr(part, "set_stream", None)):
            part.set_stream(seed)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
        if isinstance(part, DataLoader):  # persistent workers keep the generators and the data set of earlier epochs
            part._iterator = None


def parts_of(batches: Batches | None, joined: bool = False) -> list[Any]:
    """A source and all sources, samplers and data sets nested in it, each once; `joined`: also in `ConcatDataset`s."""
    found: list[Any] = []
    waiting: list[Any] = [batches]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in _INNER]
        inner = getattr(part, "datasets", None)
        waiting += inner if joined and isinstance(inner, list | tuple) else []
    return found


# --- the classes of labels -----------------------------------------------------------------------------------


def renumbered(sets: Mapping[str, Batches | None], labels: Sequence[str], classes: int | None) -> dict[str, Any]:
    """Labelled sets that are used together, with classes numbered as in the model; `classes` is their number, if known.

    If the model has no names, those of the first set that has some apply to all. Names are read from data sets of ours,
    of torchvision or of `datasets` inside a source. Data sets of ours, alone or in a `BatchLoader`, are renumbered;
    loaders of other libraries in another order are refused.
    """
    owner, reference = "the model", tuple(labels)
    result = dict[str, Any](sets)
    for name, source in sets.items():
        for names in class_names_of(source):
            if not reference:
                if classes is not None and len(names) != classes:
                    problem = f"{name} has {len(names)} classes ({a_few(names)}), but the model has {classes}"
                    raise DataError(f"{problem} without names; name them all: {_WAYS}")
                if all(map(str.isdecimal, names)):  # folders sort as 0, 1, 10, 2
                    raise DataError(f"{name} has the classes {a_few(names)}, not in their places; order them: {_WAYS}")
                owner, reference = name, names
            numbers = same_names(names, reference)
            moved = next((place for place in range(len(names)) if numbers.get(place) != place), None)
            if moved is None:
                continue
            if not hasattr(result[name], "with_classes"):
                where = f"class {moved} of {name} is {names[moved]!r}, which {owner} has as class {numbers.get(moved)}"
                raise DataError(f"{where}; number them in the order {a_few(reference)}: {_WAYS}")
            result[name] = result[name].with_classes(reference)
    return result


def in_model_order(batches: Any, name: str, model: Any) -> Any:
    """One labelled set, called `name` in messages, with classes numbered as in an ensemble; see `renumbered`."""
    return renumbered({name: batches}, model.metadata.labels, model.num_classes)[name]


def same_names(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """Map the place of each class name to that of the same name in `labels`; names without a match are left out.

    Case, surrounding spaces and the encoding of accents do not matter, unless two names differ in nothing else. A label
    that occurs twice only matches in the same place.
    """
    # macOS decomposes accents
    alike = [[unicodedata.normalize("NFKC", name).strip().casefold() for name in some] for some in (names, labels)]
    loses = any(len({*read}) < len({*some}) for read, some in zip(alike, (names, labels), strict=True))
    ours, theirs = (list(names), list(labels)) if loses else alike
    found = {place: theirs.index(name) for place, name in enumerate(ours) if theirs.count(name) == 1}
    return found | {place: place for place, both in enumerate(zip(ours, theirs, strict=False)) if both[0] == both[1]}


def class_names_in(batches: Batches, classes: int | None) -> tuple[str, ...]:
    """The names of `classes` classes that a source has; empty if it has none, or several different ones."""
    distinct = {*class_names_of(batches)}
    names = distinct.pop() if len(distinct) == 1 else ()
    return names if len({*names}) == len(names) == classes else ()


def class_names_of(batches: Batches | None) -> Iterator[tuple[str, ...]]:
    """Class names, in the order of their numbers, of every data set inside a source that has some.

    Numbers in their places (0, 1, 2) are no names; in other places (0, 1, 10, 2) they are refused where they matter.
    """
    for part in parts_of(batches, joined=True):
        features = getattr(part, "features", None)  # of the `datasets` library
        columns = features if isinstance(features, Mapping) else {}
        column = columns.get("labels", columns.get("label"))
        given = (*(getattr(part, name, None) for name in _NAMES), getattr(column, "names", None))
        names = next((tuple(map(str, one)) for one in given if isinstance(one, list | tuple) and one), ())
        if names and names != tuple(map(str, range(len(names)))) and getattr(part, "target_transform", None) is None:
            yield names


def a_few(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
