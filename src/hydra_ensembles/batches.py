"""What a batch is, and the order in which batches are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ._utils import all_seeded, derive_seed
from .errors import DataError

Inputs = Tensor | dict[str, Tensor]
Batches = Iterable[Any]

_FORMS = "(inputs, labels), (inputs,), a mapping with 'labels', or a tensor"


def read_batch(batch: Any, name: str = "data", index: int = 0, labelled: bool = True) -> tuple[Inputs, Tensor | None]:
    """Split one batch into inputs and labels (None when there are none).

    Accepted are `(inputs, labels)`, `(inputs,)`, a mapping with or without `labels`, and a bare tensor of inputs. What
    a mapping holds besides tensors (file names, texts) is left out: no model reads it.

    Args:
        batch: What a loader gave.
        name: What an error message calls the data.
        index: Position of the batch, for error messages.
        labelled: Whether labels are wanted. If not, what stands in their place (file names, masks) is not looked
            at, and the answer has None for them: OOD data has no labels that would mean anything to the model.

    Raises:
        DataError: The batch has another form, or its labels are not whole numbers, one for each input.
    """
    where = f"batch {index} of {name}"
    labels: Any = None
    if isinstance(batch, Mapping):
        inputs: Any = {str(key): value for key, value in batch.items() if key not in ("labels", "label")}
        labels = batch.get("labels", batch.get("label"))
        if not inputs:
            raise DataError(f"{where} is a mapping without inputs; keys: {sorted(batch)}")
    elif isinstance(batch, list | tuple) and len(batch) in (1, 2):
        inputs, labels = (*batch, None)[:2]
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    elif isinstance(batch, Tensor):
        inputs = batch
    else:
        got = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__
        raise DataError(f"{where} is a {got}; expected {_FORMS}")
    if isinstance(inputs, dict) and inputs:
        inputs = _tensors_of(inputs, where)
    elif not isinstance(inputs, Tensor):
        got = "an empty mapping" if isinstance(inputs, dict) else f"a {type(inputs).__name__}"
        raise DataError(f"the inputs in {where} are {got}; expected a tensor or a mapping of tensors, in {_FORMS}")
    if labels is None or not labelled:
        return inputs, None
    return inputs, _read_labels(labels, inputs, where)


def iterate(batches: Batches, name: str = "data", labelled: bool = True) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Read all batches as `read_batch` does; an empty source is an error that names it."""
    empty = True
    for index, batch in enumerate(batches):
        empty = False
        yield read_batch(batch, name, index, labelled)
    if empty:
        raise DataError(f"{name} has no batches; check the loader, or that it was not consumed before")


def move(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Inputs on a device; floating-point ones also in `dtype`."""
    # only towards the GPU: in the other direction the host could read the copy before it has arrived
    without_waiting = device.type == "cuda"

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=without_waiting)

    return changed(inputs, moved)


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs with every tensor changed in the same way."""
    return change(inputs) if isinstance(inputs, Tensor) else {name: change(one) for name, one in inputs.items()}


def size_of(inputs: Inputs) -> int:
    """Number of samples in the inputs of one batch."""
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def require_labels(labels: Tensor | None, classes: int, name: str = "data", index: int = 0) -> Tensor:
    """Labels that exist and fit the number of classes, or an error that names the batch."""
    if labels is None:
        raise DataError(f"batch {index} of {name} has no labels; this call needs (inputs, labels)")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"batch {index} of {name} has labels from {int(labels.min())} to {int(labels.max())}; "
            f"the model has {classes} classes (0 to {classes - 1})"
        )
    return labels.long()


def _tensors_of(inputs: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
    if not tensors:
        key, value = next(iter(inputs.items()))
        raise DataError(
            f"{where} has {key!r} as a {type(value).__name__}; give tensors: from a mapping without tensors no model "
            "reads anything (let the loader's collate function preprocess the inputs)"
        )
    return tensors


def _read_labels(labels: Any, inputs: Inputs, where: str) -> Tensor:
    try:
        read = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"labels in {where} must be whole numbers [B], got a {type(labels).__name__} that is no tensor of "
            f"numbers ({error}); number the classes from 0"
        ) from error
    if read.dim() != 1 or read.is_floating_point():
        raise DataError(f"labels in {where} must be whole numbers [B], got {read.dtype} {list(read.shape)}")
    if len(read) != size_of(inputs):
        raise DataError(f"{where} has {size_of(inputs)} inputs and {len(read)} labels")
    return read


def require_rereadable(batches: Batches, name: str) -> None:
    """Refuse a one-shot iterator: training reads its data once per epoch, and again to resume."""
    if isinstance(batches, Iterator):
        raise DataError(
            f"{name} is a {type(batches).__name__}, which can be read only once; give a DataLoader, a list of batches, "
            "or any object that starts afresh with every for loop"
        )


def length_of(batches: Batches) -> int | None:
    """Number of batches in one pass, or None where the source does not know."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


@contextmanager
def borrowed(*sources: Batches | None) -> Iterator[None]:
    """Give data sources back as they came: the generators of loader and samplers, the epoch, the stream.

    Epoch and stream are put back where they can be read, as attributes `epoch` and `stream`.
    """
    with ExitStack() as restoring:
        for part in chain.from_iterable(map(parts_of, sources)):
            for name in ("epoch", "stream"):
                if hasattr(part, name) and callable(getattr(part, f"set_{name}", None)):
                    restoring.callback(_put_back, part, name, getattr(part, name))
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                restoring.callback(generator.set_state, generator.get_state())
            if hasattr(part, "generator") and isinstance(generator, torch.Generator | None):
                restoring.callback(_put_generator_back, part, generator)
        yield


@contextmanager
def epoch_of(batches: Batches, epoch: int, seed: int, device: torch.device) -> Iterator[None]:
    """Run a block in which `batches`, read from the start, gives this epoch of the stream `seed`."""
    with all_seeded(derive_seed(seed, "data", epoch), device):
        begin_epoch(batches, epoch, seed)
        yield


def begin_epoch(batches: Batches, epoch: int, seed: int) -> None:
    """Set what a source has of its own to the start of an epoch of the stream `seed`; see `borrowed`.

    The global generators, which a source may use as well, are the caller's to seed.
    """
    for part in parts_of(batches):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(seed, "order", epoch))
        if callable(getattr(part, "set_stream", None)):
            part.set_stream(seed)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def parts_of(batches: Batches | None) -> list[Any]:
    """A source with the sources, samplers and data sets inside it, each once."""
    found: list[Any] = []
    waiting: list[Any] = [batches]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in _INNER]
    return found


_INNER = ("base_dataloader", "batches", "sampler", "batch_sampler", "dataset")


def _put_back(part: Any, name: str, value: Any) -> None:
    if getattr(part, name) != value:
        getattr(part, f"set_{name}")(value)


def _put_generator_back(part: Any, generator: Any) -> None:
    if part.generator is not generator:
        part.generator = generator
