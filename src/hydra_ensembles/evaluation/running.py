"""One pass of a model over one data set: member logits in the order of the data, on the CPU."""

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._distributed import check_unsharded, gather, rank_and_world
from .._utils import evaluation_mode
from ..batches import Batches, Inputs, iterate, move, require_labels
from ..data.batching import Preprocess
from ..data.batching import batches as make_batches
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..metrics.inputs import check_finite, where
from ..optimize.optimized import OptimizedEnsemble
from ..prediction import ScoreName, Temperature, ood_score, scale_logits
from .gallery import Extremes

MemberModel = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass over one set brought.

    Attributes:
        logits: `[M, B, C]`, at least float32.
        labels: `[B]`; empty where they were not asked for.
        extremes: The most and least certain inputs.
        dtype: Number format in which the model answered.
    """

    logits: Tensor
    labels: Tensor
    extremes: Extremes
    dtype: str


@dataclass(frozen=True)
class Runner:
    """How a model is run over sets.

    Attributes:
        model: Gives member logits `[M, B, C]`, or `[B, C]` for one member.
        device: Where inputs go; None leaves them where they are.
        dtype: Floating type of the inputs; None leaves it.
        preprocess: Turns items of a data set into inputs, for sets that are not in batches yet.
        batch_size: For such sets.
        num_workers: For such sets.
        keep: How many inputs of each set to keep for the gallery, at either end.
        score: Orders the gallery.
        temperature: Divides the logits for it.
        progress: Whether to show progress bars.
    """

    model: MemberModel
    device: torch.device | None
    dtype: torch.dtype | None
    preprocess: Preprocess | None
    batch_size: int
    num_workers: int
    keep: int
    score: ScoreName
    temperature: Temperature | None
    progress: bool

    def run(self, data: Batches | Dataset[Any], name: str, labelled: bool) -> Pass:
        """Run the model over one set; several processes share its batches.

        Raises:
            DataError: The set is empty, its labels do not fit, or the model's answers cannot be used.
        """
        check_unsharded(data, name)
        rank, world = rank_and_world()
        extremes = Extremes(self.keep)
        pieces: list[tuple[int, Tensor, Tensor | None, str]] = []
        error: Exception | None = None
        try:
            first = 0
            for index, (inputs, targets) in enumerate(self._read(self._batches(data, name), name, labelled)):
                if index % world == rank:
                    logits, dtype = self._answer(inputs, name, index)
                    kept = require_labels(targets, logits.shape[2], f"set {name!r}", index).cpu() if labelled else None
                    self._show(extremes, first, inputs, logits, kept)
                    pieces.append((index, logits, kept, dtype))
                first += _length(inputs)
        except Exception as problem:
            error = problem
        pieces = sorted(chain.from_iterable(gather(pieces, error)), key=lambda piece: piece[0])
        if world > 1:
            found, extremes = gather(extremes), Extremes(self.keep)
            for other in found:
                extremes.merge(other)
        logits = _join([piece[1] for piece in pieces], name)
        labels = [piece[2] for piece in pieces if piece[2] is not None]
        return Pass(logits, torch.cat(labels) if labels else torch.empty(0).long(), extremes, pieces[0][3])

    def _batches(self, data: Batches | Dataset[Any], name: str) -> Batches:
        if not isinstance(data, Dataset):
            return data
        if self.preprocess is None:
            raise ConfigError(
                f"set {name!r} is a data set of raw items, and this model has no saved preprocessing; "
                "pass preprocess=, or give batches (a DataLoader)"
            )
        return make_batches(data, self.preprocess, self.batch_size, num_workers=self.num_workers)

    def _read(self, batches: Batches, name: str, labelled: bool) -> Iterator[tuple[Inputs, Tensor | None]]:
        """The batches, under a progress bar."""
        try:
            total = len(batches) if isinstance(batches, Sized) else None
        except TypeError:  # a loader of a stream has a length only in name
            total = None
        silent = not self.progress or rank_and_world()[0] > 0
        pairs = iterate(batches, f"set {name!r}", labelled)
        return iter(tqdm(pairs, name, total, leave=False, disable=silent, unit="batch"))

    def _answer(self, inputs: Inputs, name: str, index: int) -> tuple[Tensor, str]:
        """Checked member logits `[M, B, C]` of one batch, and the dtype they came in."""
        if self.device is not None:
            inputs = move(inputs, self.device, self.dtype)
        answer = self.model(inputs)
        answer = getattr(answer, "logits", answer)
        if not isinstance(answer, Tensor) or answer.ndim not in (2, 3) or not answer.is_floating_point():
            got = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
            raise DataError(f"{where(name)}the model must answer with logits [M, B, C] or [B, C], got {got}")
        logits = answer.detach()
        logits = logits.unsqueeze(0) if logits.ndim == 2 else logits  # [B, C] -> [1, B, C]
        size = _length(inputs)
        if logits.shape[1] != size or logits.shape[2] < 2:
            raise DataError(
                f"{where(name)}the model answered batch {index} of {size} inputs with logits {list(answer.shape)}; "
                "expected [M, B, C] (members, inputs, at least two classes)"
            )
        logits = logits.to("cpu", torch.float64 if logits.dtype == torch.float64 else torch.float32)
        check_finite(logits, f"member logits [M, B, C] of batch {index}", name)
        return logits, str(answer.dtype).removeprefix("torch.")

    def _show(self, extremes: Extremes, first: int, inputs: Inputs, logits: Tensor, labels: Tensor | None) -> None:
        if self.keep:
            scores = ood_score(logits, self.score, self.temperature)
            probs = scale_logits(logits, self.temperature).softmax(dim=-1).mean(dim=0)  # [M, B, C] -> [B, C]
            confidence, predicted = probs.max(dim=-1)
            extremes.update(first, inputs, scores, confidence, predicted, labels)


@contextmanager
def running(model: object, device: torch.device | None) -> Iterator[tuple[torch.device | None, torch.dtype | None]]:
    """Evaluation mode, no gradients and the asked-for device, all put back at the end.

    Yields:
        Where inputs go and their floating type; None for "as they are".
    """
    if isinstance(model, OptimizedEnsemble):
        _require_its_device(model, device)
        with torch.no_grad():
            yield model.device, model.dtype
        return
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            yield device, None
        return
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    home = None if parameter is None else parameter.device
    moved = device is not None and home is not None and device != home
    try:
        if moved:
            model.to(device)
        with evaluation_mode(model), torch.no_grad():
            yield device or home, None if parameter is None else parameter.dtype
    finally:
        if moved:
            model.to(home)


def _require_its_device(model: OptimizedEnsemble[Any], device: torch.device | None) -> None:
    own = model.device
    if device is not None and (device.type != own.type or device.index not in (None, own.index)):
        raise ConfigError(
            f"this optimized ensemble runs on {own} and cannot be moved to {device}; leave device out, or move the "
            "ensemble and call optimize again"
        )


def _length(inputs: Inputs) -> int:
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def _join(pieces: list[Tensor], name: str) -> Tensor:
    shapes = {(piece.shape[0], piece.shape[2]) for piece in pieces}
    if len(shapes) > 1:
        raise DataError(
            f"{where(name)}the model changes its mind between batches: (members, classes) were {sorted(shapes)}"
        )
    return torch.cat(pieces, dim=1)
