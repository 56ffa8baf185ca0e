"""Several processes as one: candidates are spread over the ranks, every rank gets the same answer."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import HydraError

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
