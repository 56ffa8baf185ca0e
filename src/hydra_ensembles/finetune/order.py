"""The same batches in the same order, every time an epoch of a member is read.

A shuffling loader draws its order from a generator of its own or from torch's global one, and augmentation that
runs in this process draws from the generators of torch, Python or NumPy. All of them are seeded before each epoch
with a seed made of recipe seed, member and epoch, and put back afterwards. So an epoch can be read again from the
start, which is how a run that stopped in its middle finds its place.

Workers that outlive an epoch (`persistent_workers=True`) keep their random state where nobody can seed it: with
random augmentation in such workers, only runs that are not interrupted are reproducible.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..batches import Batches, read_batch
from ..errors import DataError
from ..randomness import all_seeded, derive_seed


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
    """Give the generators of a loader and its samplers back in the state they came in."""
    before = [(part, part.generator) for part in _parts(batches) if hasattr(part, "generator")]
    states = [None if generator is None else generator.get_state() for _, generator in before]
    try:
        yield
    finally:
        for (part, generator), state in zip(before, states, strict=True):
            if part.generator is not generator:
                part.generator = generator
            if generator is not None and state is not None:
                generator.set_state(state)


@contextmanager
def epoch_of(batches: Batches, epoch: int, seed: int, device: torch.device) -> Iterator[None]:
    """Run a block in which `batches`, read from the start, gives this epoch of the stream `seed`."""
    with all_seeded(derive_seed(seed, "data", epoch), device):
        for part in _parts(batches):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derive_seed(seed, "order", epoch))
            for target in (part, getattr(part, "dataset", None)):
                if callable(getattr(target, "set_epoch", None)):
                    target.set_epoch(epoch)  # type: ignore[union-attr]
        yield


def content_of(batch: Any, name: str) -> dict[str, Tensor]:
    """The tensors of a batch by name, labels among them."""
    inputs, labels = read_batch(batch, name)
    tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    return tensors if labels is None else {**tensors, "labels": labels}


def fingerprint(
    batches: Batches, name: str, seed: int, content: Callable[[Any, str], Mapping[str, Tensor]] = content_of
) -> str:
    """A short name for a data source: its length and the content of the first batch it gives."""
    digest = hashlib.sha256(f"{length_of(batches)}".encode())
    with borrowed(batches), epoch_of(batches, 0, seed, torch.device("cpu")):
        first = next(iter(batches), None)
    if first is None:
        raise DataError(f"{name} has no batches; check the loader")
    for key, tensor in sorted(content(first, name).items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _parts(batches: Any) -> list[Any]:
    """A loader and the samplers inside it, each once."""
    found: list[Any] = []
    waiting = [batches]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in ("base_dataloader", "sampler", "batch_sampler")]
    return found
