"""Several processes as one: who am I, who takes which share, what do the others have."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import ConfigError, DataError, HydraError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its likes; with one process nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, so that each rank gets as many of the cheap and of the expensive ones."""
        return list(items[self.rank :: self.size])

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in their order."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def smallest(self, item: T | None) -> T:
        """The smallest item of all ranks; None stands for none."""
        items = [one for one in self.gather(item) if one is not None]
        return min(items)  # type: ignore[type-var]

    def from_first(self, item: T) -> T:
        """What rank 0 has."""
        return self.gather(item)[0]

    def require_same(self, item: object, what: str) -> None:
        """Refuse to go on where ranks disagree."""
        items = self.gather(item)
        different = [rank for rank, other in enumerate(items) if other != items[0]]
        if different:
            raise HydraError(f"rank {different[0]} has other {what} than rank 0; all ranks must be given the same")


def launched_rank() -> int:
    """Number of this process among those that torchrun or accelerate launch started; 0 without them."""
    return int(os.environ.get("RANK", "0"))


def local_device(device: torch.device) -> torch.device:
    """The GPU of this rank, where the device is a GPU without a number."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run: of the process group where one exists, else of one started for the `with` block.

    Without a process group, and without the variables `torchrun` and `accelerate launch` set, there is one.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not launched or int(os.environ["WORLD_SIZE"]) < 2:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


# accelerate's loaders by name: they already give each process its own batches.
_SHARDED = ("DataLoaderShard", "DataLoaderDispatcher")


def rank_and_world() -> tuple[int, int]:
    """Number of this process, and of all of them: (0, 1) where nothing is distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather(mine: T, error: Exception | None = None) -> list[T]:
    """What every process has, in the order of their ranks.

    A process that failed says so here, so that the others stop too instead of waiting for it.

    Raises:
        DataError: Another process failed.
    """
    rank, world = rank_and_world()
    if world == 1:
        if error is not None:
            raise error
        return [mine]
    message = None if error is None else f"{type(error).__name__}: {error}"
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, (message, None if error is not None else mine))
    if error is not None:
        raise error
    for other, (problem, _) in enumerate(everything):
        if problem is not None:
            raise DataError(f"process {other} of {world} failed, so process {rank} stops too: {problem}")
    return [part for _, part in everything]


def check_unsharded(data: object, name: str) -> None:
    """Refuse a loader that gives each process its own batches already: they would be split twice.

    Raises:
        ConfigError: The loader is sharded.
    """
    sampler = getattr(data, "sampler", None)
    sharded = type(data).__name__ in _SHARDED or type(sampler).__name__ == "DistributedSampler"
    if sharded and rank_and_world()[1] > 1:
        raise ConfigError(
            f"set {name!r} comes from a loader that is already split between processes; evaluate splits the "
            "batches itself and puts the answers back in order: give it the plain DataLoader"
        )
