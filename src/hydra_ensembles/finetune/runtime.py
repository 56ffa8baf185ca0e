"""Where training runs: in one process, or in several that share the work through accelerate."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from .._utils import require, require_device
from ..batches import Batches, length_of
from ..model.ensemble import Ensemble


class Runtime:
    """One process. The one below overrides whatever differs for several."""

    def __init__(self, device: torch.device, rank: int = 0, processes: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.processes = processes

    def wrap(self, model: Ensemble) -> nn.Module:
        """The model as it is called in training."""
        return model

    def share(self, train: Batches) -> Batches:
        """The part of the training batches that this process reads."""
        return train

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose gradients stay in this process, because more are to be added to them."""
        return nullcontext()

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over all processes."""
        return numbers

    def gather(self, rows: Tensor) -> list[Tensor]:
        """The tensor of every process, in their order; they may differ in the number of rows."""
        return [rows]

    def wait(self) -> None:
        """Go on when all processes have come this far."""


class Processes(Runtime):
    """One of several processes that accelerate, torchrun or a scheduler started; they average gradients.

    Each process reads its own share of the batches, so one update sees as many batches as there are processes.
    """

    def __init__(self, device: torch.device | None) -> None:
        accelerate = require("accelerate", extra="train")
        on_cpu = device is not None and device.type == "cpu"
        self._accelerator = accelerate.Accelerator(cpu=on_cpu or not torch.cuda.is_available(), mixed_precision="no")
        self._prepare_loader = accelerate.data_loader.prepare_data_loader
        self._ddp_options = accelerate.DistributedDataParallelKwargs
        super().__init__(self._accelerator.device, self._accelerator.process_index, self._accelerator.num_processes)

    def wrap(self, model: Ensemble) -> nn.Module:
        """The model in DistributedDataParallel, by `Accelerator.prepare`."""
        headless = any(not any(heads) for heads in zip(*model.heads, strict=True))  # its norm gets no gradient
        self._accelerator.ddp_handler = self._ddp_options(find_unused_parameters=headless)
        return cast(nn.Module, self._accelerator.prepare_model(model))

    def share(self, train: Batches) -> Batches:
        """Every n-th batch; a loader that already distributes itself is left alone."""
        if isinstance(train, DataLoader):
            if isinstance(train.sampler, DistributedSampler):
                return train
            return cast(Batches, self._prepare_loader(train, put_on_device=False))
        return EveryNth(train, self.rank, self.processes)

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Accelerate's `no_sync`."""
        return cast(AbstractContextManager[Any], self._accelerator.no_sync(model))

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over all processes."""
        return cast(Tensor, self._accelerator.reduce(numbers, "sum"))

    def gather(self, rows: Tensor) -> list[Tensor]:
        """The tensor of every process, in their order; they may differ in the number of rows."""
        own = torch.zeros(self.processes, dtype=torch.long, device=self.device)
        own[self.rank] = len(rows)
        counts = self.total(own).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = cast(Tensor, self._accelerator.gather(padded)).chunk(self.processes)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        self._accelerator.wait_for_everyone()


class EveryNth:
    """Batches number `start`, `start + step`, … of a source, as many for every `start`."""

    def __init__(self, batches: Batches, start: int, step: int) -> None:
        self.batches, self.start, self.step = batches, start, step

    def __len__(self) -> int:
        length = length_of(self.batches)
        if length is None:
            raise TypeError("the source has no length")
        return length // self.step

    def __iter__(self) -> Iterator[Any]:
        kept: Any = None
        for index, batch in enumerate(self.batches):
            if index % self.step == self.start:
                kept = batch
            if index % self.step == self.step - 1:
                yield kept


def find_runtime(device: torch.device | str | None, fallback: torch.device) -> Runtime:
    """The runtime of this process: several where the environment says so, else one on `device`."""
    wanted = require_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Processes(wanted)
    return Runtime(fallback if wanted is None else wanted)
