"""Distributed runs: ranks, sharing of work, and communication between processes."""

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .errors import ConfigError, HydraError

T = TypeVar("T")
_LOADING = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of the run; a single process never communicates."""

    rank: int = 0
    size: int = 1

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, so that cheap and expensive items are spread evenly over the ranks."""
        return list(items[self.rank :: self.size])

    def share_batches(self, batches: Any) -> Any:
        """The batches of this rank: every `size`-th, equally many for each."""
        if self.size == 1:
            return batches
        loader = batches if isinstance(batches, DataLoader) else None
        if loader is None or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return EveryNth(batches, self.rank, self.size)
        return with_batches(loader, EveryNth(loader.batch_sampler, self.rank, self.size))

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in order. A rank that fails comes never here: its launcher stops the others."""
        everything: list[Any] = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(everything, item)
        return everything

    def total(self, numbers: Tensor) -> Tensor:
        """Sum of a tensor over all ranks."""
        if self.size == 1:
            return numbers
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed

    def wait(self) -> None:
        """Wait until all ranks reach this point."""
        if self.size > 1:
            dist.barrier()

    def require_same(self, item: object, what: str) -> None:
        """Raise if the ranks disagree, as they do if a data set splits itself between processes."""
        items = self.gather(item)
        if different := [rank for rank, other in enumerate(items) if other != items[0]]:
            raise HydraError(f"rank {different[0]} has other {what} than rank 0; give every rank the same, all of it")


SINGLE_PROCESS = Ranks()


@dataclass(frozen=True)
class EveryNth:
    """Items `start`, `start + step`, … of a source, equally many for every `start`."""

    batches: Any
    start: int
    step: int

    def __len__(self) -> int:
        return len(self.batches) // self.step  # raises a TypeError if the source has no length

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.batches)
        for turn in zip(*[source] * self.step, strict=False):  # one item per rank; an incomplete last turn is dropped
            yield turn[self.start]


def launched_rank() -> int:
    """Rank of this process in its process group, or as launched by torchrun or accelerate; 0 if neither."""
    ranks = current_ranks()
    return ranks.rank if ranks.size > 1 else int(os.environ.get("RANK", "0"))


def launched() -> bool:
    """Whether this process is one of several, in a process group or launched by torchrun or accelerate."""
    several = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return current_ranks().size > 1 or (several and int(os.environ["WORLD_SIZE"]) > 1)


def current_ranks() -> Ranks:
    """The ranks of the process group, if there is one; else this process alone."""
    has_group = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if has_group else SINGLE_PROCESS


def local_device(device: torch.device) -> torch.device:
    """The GPU of this rank, if `device` is a GPU without an index."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run: those of its process group, which is started if several processes were launched."""
    if launched() and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
        atexit.register(dist.destroy_process_group)
    yield current_ranks()


def with_batches(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """A loader that reads the same data with the same settings, in these batches of rows."""
    return DataLoader(loader.dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in _LOADING})


def check_unsharded(data: object, name: str) -> None:
    """Refuse a loader that already gives each process its own batches: ours are shared out here."""
    samplers = [getattr(source, "sampler", None) for source in (data, getattr(data, "batch_sampler", None))]
    split = any(isinstance(one, DistributedSampler) for one in samplers)
    if launched() and (split or type(data).__name__ in ("DataLoaderShard", "DataLoaderDispatcher")):
        problem = f"{name} is already split between processes (by DistributedSampler or accelerate)"
        raise ConfigError(f"{problem}; give every process the plain DataLoader")
