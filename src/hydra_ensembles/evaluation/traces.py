"""Traces of the sets of an evaluation: whether two evaluations of sets of one name and size saw the same samples.

A trace does not hang on the order of the samples. Labels that differ are proof of other samples. Inputs that differ are
not: models of other sizes, normalisations or tokenizers are given other numbers of the same image or text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..overlap import Keys


@dataclass(frozen=True)
class SetTrace:
    """What is stored of the samples of a set: digests, empty of what is not there."""

    labels: str = ""  # of how many samples the classes have, whichever it is: models may number them in their own order
    inputs: str = ""  # of all samples as the model was given them, if not their logits alone


class Unlike(NamedTuple):
    """Names of sets that two evaluations have in common, by what their traces say; of the others they are the same."""

    labels: list[str]  # surely other samples
    inputs: list[str]  # other samples, or the same prepared otherwise
    unknown: list[str]  # one of the two has no trace of its inputs


def trace_sets(labels: Mapping[str, Tensor], keys: Mapping[str, Keys] = MappingProxyType({})) -> dict[str, SetTrace]:
    """The trace of each set by its name, from labels `[B]`, none of an OOD set, and from `sample_keys` `[B]`."""
    traces = {}
    for name, targets in labels.items():
        counts = np.sort(np.bincount(targets.numpy()))
        traces[name] = SetTrace(_digest(counts[counts > 0]), _digest(np.sort(keys[name])) if name in keys else "")
    return traces


def _digest(values: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16] if len(values) else ""


def unlike(ours: Mapping[str, SetTrace], theirs: Mapping[str, SetTrace], names: list[str]) -> Unlike:
    """What the traces of two evaluations say of sets of one name."""
    differing = Unlike([], [], [])
    for name in names:
        trace = ours.get(name, SetTrace())
        other = theirs.get(name, SetTrace())
        if trace.labels and other.labels and trace.labels != other.labels:
            differing.labels.append(name)
        elif not (trace.inputs and other.inputs):
            differing.unknown.append(name)
        elif trace.inputs != other.inputs:
            differing.inputs.append(name)
    return differing
