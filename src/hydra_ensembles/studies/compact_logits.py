"""Member logits small enough to keep in a repository, from which every table is made.

Of each member and sample, logits are taken relative to the largest one and rounded to a multiple of a step (they
are float16 numbers, but few different ones, which compress well). Where there are many classes, only those that
any member gives weight to (and the label) are kept one by one; each member's other classes share what is left of
its probability evenly. All tables are made from what is stored, so making them again gives the same numbers.
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import DataError
from ..files import write_atomically


@dataclass(frozen=True, eq=False)
class CompactSet:
    """Logits of all members on one set.

    Attributes:
        values: `[S, B, K]` in float16, largest zero; with `kept`, the last entry is that of all other classes.
        kept: `[B, K - 1]`, the classes stored one by one, or None for all.
        labels: `[B]`, or None where they do not matter.
        classes: Number of classes.
    """

    values: npt.NDArray[np.float16]
    kept: npt.NDArray[np.uint16] | None
    labels: npt.NDArray[np.int64] | None
    classes: int

    def logits(self) -> Tensor:
        """Member logits `[S, B, C]` in float32."""
        values = torch.from_numpy(self.values.astype(np.float32))
        if self.kept is None:
            return values
        index = torch.from_numpy(self.kept.astype(np.int64)).expand(len(values), -1, -1)  # [S, B, K - 1]
        full = values[..., -1:].expand(*values.shape[:2], self.classes).clone()
        return full.scatter_(2, index, values[..., :-1])


def compact(logits: Tensor, labels: Tensor | None, step: float, keep: int | None) -> CompactSet:
    """Store member logits `[S, B, C]` of one set, `keep` classes a sample one by one.

    More are kept where members give so many different answers that these, and the label, would not find room: an
    answer that was shared out among other classes would leave its member without its confidence.
    """
    classes = logits.shape[-1]
    relative = logits.double() - logits.double().amax(-1, keepdim=True)
    kept = None
    if keep is not None:
        needed = torch.zeros(relative.shape[1:], dtype=torch.double).scatter_(1, relative.argmax(-1).T, 1.0)  # [B, C]
        if labels is not None:
            needed[torch.arange(len(labels)), labels] = 1.0
        keep = max(keep, int(needed.sum(-1).amax()))
    if keep is not None and keep + 1 < classes:
        weight = needed + relative.softmax(-1).amax(0)  # the most that any member gives to a class
        kept = weight.topk(keep, dim=-1).indices.sort(dim=-1).values  # [B, keep]
        index = kept.expand(len(relative), -1, -1)
        rest = relative.scatter(2, index, -torch.inf).logsumexp(-1, keepdim=True)
        tail = rest - np.log(classes - keep)
        relative = torch.cat([relative.gather(2, index), tail], dim=-1)
    lowest = -60000.0
    rounded = (relative / step).round() * step
    rounded = rounded.where(relative == 0, rounded.clamp_max(-step))  # no tie with a member's answer
    return CompactSet(
        values=rounded.clamp_min(lowest).to(torch.float16).numpy(),
        kept=None if kept is None else kept.numpy().astype(np.uint16),
        labels=None if labels is None else labels.numpy(),
        classes=classes,
    )


def save_sets(path: Path, sets: Mapping[str, CompactSet], small: bool = False) -> None:
    """Write sets into one `.npz`; `small` takes longer and makes the file a fifth smaller."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, one in sets.items():
        arrays[f"{name}.values"] = one.values
        arrays[f"{name}.classes"] = np.array([one.classes])
        if one.kept is not None:
            arrays[f"{name}.kept"] = one.kept
        if one.labels is not None:
            arrays[f"{name}.labels"] = one.labels
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA if small else zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), archive.compression)
    write_atomically(path, buffer.getvalue())


def load_sets(path: Path) -> dict[str, CompactSet]:
    """Read what `save_sets` wrote.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        return {
            name: CompactSet(
                values=values,
                kept=arrays.get(f"{name}.kept"),
                labels=arrays.get(f"{name}.labels"),
                classes=int(arrays[f"{name}.classes"][0]),
            )
            for name, values in (
                (key.removesuffix(".values"), arrays[key]) for key in arrays if key.endswith(".values")
            )
        }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as stored logits of a study: {error}") from error
