"""Several processes as one: rank, share of the work, and exchange between them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, sampler

from ._utils import warn
from .errors import ConfigError, DataError, HydraError
from .files import locked

T = TypeVar("T")
# another order in every epoch
RANDOM_SAMPLERS = (sampler.RandomSampler, sampler.SubsetRandomSampler, sampler.WeightedRandomSampler)
_LOADING = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


@dataclass(frozen=True)
class Ranks:
    """This process among its likes; with one process nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, so that each rank gets as many of the cheap and of the expensive ones."""
        return list(items[self.rank :: self.size])

    def share_batches(self, batches: Any) -> Any:
        """The batches this rank reads: every `size`-th, as many for each; a loader that is split already is left alone.

        Batches that are left over are not read; where nothing shuffles them, a warning says so.
        """
        if self.size == 1 or is_sharded(batches):
            return batches
        count = length_hint(batches)  # 0 where nobody knows
        left = count % self.size
        shuffled = is_drawn_by(batches, RANDOM_SAMPLERS) or getattr(batches, "shuffle", False) is True
        if left and self.rank == 0 and not shuffled:
            warn(
                f"train has {count} batches for {self.size} processes, which read equally many each: the last {left} "
                f"are never trained on; shuffle train, or give a multiple of {self.size} batches"
            )
        loader = batches if isinstance(batches, DataLoader) else None
        if loader is None or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return EveryNth(batches, self.rank, self.size)
        return drawing(loader, EveryNth(loader.batch_sampler, self.rank, self.size))

    def gather(self, item: T, error: Exception | None = None) -> list[T]:
        """The items of all ranks, in their order; where one failed and says so with its error, the others stop too."""
        message = None if error is None else f"{type(error).__name__}: {error}"
        everything: list[Any] = [(None, item)]
        if self.size > 1:
            everything = [None] * self.size
            dist.all_gather_object(everything, (message, item if error is None else None))
        if error is not None:
            raise error
        for rank, (problem, _) in enumerate(everything):
            if problem is not None:
                raise DataError(f"process {rank} of {self.size} failed, so process {self.rank} stops too: {problem}")
        return [item for _, item in everything]

    def total(self, numbers: Tensor) -> Tensor:
        """Sum of a tensor over all ranks."""
        if self.size == 1:
            return numbers
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank; they may differ in the number of rows."""
        return [tensor] if self.size == 1 else [part.to(tensor.device) for part in self.gather(tensor.cpu())]

    def wait(self) -> None:
        """Go on when all ranks have come this far."""
        if self.size > 1:
            dist.barrier()

    def together(self, make: Callable[[], T]) -> T:
        """What `make` gives on this rank, once no other has failed at it; where one has, all stop."""
        results: list[T] = []
        problem = None
        try:
            results.append(make())
        except HydraError as error:
            problem = error
        self.gather(None, problem)
        return results[0]

    @contextmanager
    def locked(self, folder: Path, what: str, file: str | None = None) -> Iterator[None]:
        """No other run works in `folder`, or on a `file` there: rank 0 has the lock for all, as of `files.locked`."""
        with ExitStack() as stack:
            self.together(
                lambda: stack.enter_context(locked(folder, what, file=file) if self.rank == 0 else nullcontext())
            )
            yield

    def common(self, read: Callable[[], T], batches: Any) -> T:
        """What stands for batches on all ranks, as read off them: of a loader that is split already, off rank 0's part.

        So it is of batches that are others whenever they are read, as by random changes that no seed reaches.
        """
        own = read()
        parts = self.gather(own)
        if all(part == parts[0] for part in parts):
            return own
        return parts[0] if any(self.gather(is_sharded(batches) or read() != own)) else own

    def require_same(self, item: object, what: str, advice: str = "all ranks must be given the same") -> None:
        """Refuse to go on where ranks disagree."""
        items = self.gather(item)
        different = [rank for rank, other in enumerate(items) if other != items[0]]
        if different:
            raise HydraError(f"rank {different[0]} has other {what} than rank 0; {advice}")

    def require_same_data(self, item: object, what: str) -> None:
        """The same of data, which may split themselves between ranks: nothing but their samples shows it."""
        itself = "where a data set splits itself between processes (as by datasets.distributed), leave that out"
        self.require_same(item, what, f"give all ranks all of them, whose batches are shared out here; {itself}")


ALONE = Ranks()


@dataclass(frozen=True)
class EveryNth:
    """Items number `start`, `start + step`, … of a source, as many for every `start`."""

    batches: Any
    start: int
    step: int

    def __len__(self) -> int:
        return len(self.batches) // self.step  # a source without a length makes one without a length

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.batches)
        for turn in zip(*[source] * self.step, strict=False):  # one item for each rank; what is left over is dropped
            yield turn[self.start]


def launched_rank() -> int:
    """Number of this process in its process group, or among those that torchrun or accelerate launch started; or 0."""
    ranks = current_ranks()
    return ranks.rank if ranks.size > 1 else int(os.environ.get("RANK", "0"))


def launched() -> bool:
    """Whether this process is one of several: of a process group, or started by torchrun or accelerate launch."""
    several = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return current_ranks().size > 1 or (several and int(os.environ["WORLD_SIZE"]) > 1)


def current_ranks() -> Ranks:
    """The ranks of the process group, where one exists; else this process alone."""
    has_group = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if has_group else ALONE


def local_device(device: torch.device) -> torch.device:
    """The GPU of this rank, where the device is a GPU without a number."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


_GROUPS = count()  # process groups that this process has started: all ranks count alike


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """The store through which the launched processes find each other, the rank, and their number."""
    return next(iter(rendezvous("env://", timeout=timedelta(minutes=30))))


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run: of the process group where one exists, else of one started for the `with` block."""
    if not launched() or dist.is_initialized():
        yield current_ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = _rendezvous()
    # torchrun keeps one store for the whole run: a second group would find the addresses of the first
    group_store = dist.PrefixStore(f"hydra_ensembles/{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=group_store, rank=rank, world_size=size)
    try:
        yield current_ranks()
    finally:
        dist.destroy_process_group()


def drawing(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """A loader that reads the same data in the same way, in batches of these rows."""
    return DataLoader(loader.dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in _LOADING})


def is_sharded(data: object) -> bool:
    """Whether a loader gives each process its own batches already: accelerate's, or by a `DistributedSampler`."""
    return is_drawn_by(data, DistributedSampler) or type(data).__name__ in ("DataLoaderShard", "DataLoaderDispatcher")


def is_drawn_by(data: object, samplers: type | tuple[type, ...]) -> bool:
    """Whether a loader takes its samples from such a sampler, by itself or inside its `batch_sampler`."""
    sources = (data, getattr(data, "batch_sampler", None))
    return any(isinstance(getattr(source, "sampler", None), samplers) for source in sources)


def check_unsharded(data: object, name: str) -> None:
    """Refuse a loader that gives each process its own batches already, where all of them are to be read."""
    if is_sharded(data) and launched():
        raise ConfigError(
            f"{name} comes from a loader that is already split between processes, by a DistributedSampler or by "
            "accelerate, so that a part of it would be taken for the whole; give every process the plain DataLoader"
        )
