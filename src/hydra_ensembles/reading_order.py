"""The same batches in the same order, every time an epoch of a data source is read for one purpose.

A shuffling loader draws its order from a generator of its own or from torch's global one, and augmentation that
runs in this process draws from the generators of torch, Python or NumPy. All of them are seeded before each epoch
with a seed made of what the data are read for (recipe seed and member, say) and the epoch, and put back afterwards.
A source that draws otherwise can follow too: where it, its samplers or its data set have a method
`set_epoch(epoch)`, it is told the epoch, and where they have `set_stream(seed)`, as `data.batches` has, for whom.
So an epoch can be read again from the start, which is how a run that stopped in its middle finds its place.

Workers that outlive an epoch (`persistent_workers=True`) keep their random state where nobody can seed it: with
random augmentation in such workers, only runs that are not interrupted are reproducible.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .batches import Batches
from .errors import DataError
from .randomness import all_seeded, derive_seed


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
def borrowed(batches: Batches) -> Iterator[None]:
    """Give a source back as it came: the generators of loader and samplers, the epoch, the stream.

    Epoch and stream are put back where they can be read, as attributes `epoch` and `stream`.
    """
    with ExitStack() as restoring:
        for part in parts_of(batches):
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


def parts_of(batches: Batches) -> list[Any]:
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
