"""Files of stored logits: one `.npz` for all sets, each number in as few bytes as it takes."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.errors import DataError

from .compact_logits import CompactGroup, CompactSet

Arrays = dict[str, npt.NDArray[Any]]


def save_sets(path: Path, sets: Mapping[str, CompactSet], small: bool = False) -> None:
    """Write sets into one `.npz`; `small` takes longer and makes the file smaller."""
    arrays = {f"{name}.{key}": array for name, one in sets.items() for key, array in _arrays_of(one).items()}
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
        DataError: The file is missing or damaged, or was written by an earlier version.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            sets: dict[str, Arrays] = {}
            for key in stored.files:
                name, _, part = key.rpartition(".")
                sets.setdefault(name, {})[part] = stored[key]
        return {name: _set_of(arrays) for name, arrays in sets.items()}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as stored logits of a study: {error}") from error


def _arrays_of(one: CompactSet) -> Arrays:
    """The arrays of a set by name; numbers of one kind lie side by side, which compresses best.

    Of groups, `values` are written as the different numbers there are, the largest first (`places`), and the number
    of each value among them (`codes`). Arrays of groups that keep different numbers of classes go one after another.
    """
    arrays: Arrays = {"classes": np.array([one.classes])}
    if one.labels is not None:
        arrays["labels"] = one.labels
    if one.values is not None:
        return {"values": one.values, **arrays}
    flat = np.concatenate([group.values.transpose(2, 0, 1).ravel() for group in one.groups])
    places, codes = np.unique(-flat, return_inverse=True)
    return {
        "places": -places,
        "codes": codes.ravel().astype(np.min_scalar_type(len(places))),
        "shapes": np.array([group.values.shape for group in one.groups]),
        "kept": np.concatenate([group.kept.T for group in one.groups]),  # [sum of k, B]
        "entropy": np.concatenate([group.entropy for group in one.groups]).T,  # [B, S]
        "mixture": np.stack([group.mixture for group in one.groups]),
        **arrays,
    }


def _set_of(arrays: Arrays) -> CompactSet:
    classes, labels = int(arrays["classes"][0]), arrays.get("labels")
    if "codes" not in arrays:
        values = arrays["values"]
        if values.shape[-1] != classes:
            raise ValueError(f"{values.shape[-1]} logits a sample for {classes} classes: the format of another version")
        return CompactSet(values, (), labels, classes)
    flat, rows, kept = arrays["places"][arrays["codes"]], 0, 0
    groups = []
    for number, (members, samples, width) in enumerate(arrays["shapes"].tolist()):
        own, flat = np.split(flat, [members * samples * width])
        groups.append(
            CompactGroup(
                values=own.reshape(width, members, samples).transpose(1, 2, 0),
                kept=arrays["kept"][kept : kept + width - 1].T,
                entropy=arrays["entropy"].T[rows : rows + members],
                mixture=arrays["mixture"][number],
            )
        )
        rows, kept = rows + members, kept + width - 1
    return CompactSet(None, tuple(groups), labels, classes)
