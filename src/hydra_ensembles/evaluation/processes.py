"""Sharing an evaluation between the processes of `torchrun` or `accelerate`."""

from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import ConfigError, DataError

T = TypeVar("T")

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
