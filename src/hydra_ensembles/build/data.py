"""The data of a build: held-out sets read once and kept in memory, split in two by a seed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._utils import derive_seed
from ..batches import Batches, Inputs, borrowed, epoch_of, iterate, require_labels, require_rereadable
from ..errors import DataError
from ..heads.ranking import data_fingerprint
from ..training.loop import fingerprint
from .config import HydraConfig

Batch = tuple[Inputs, Tensor | None]


@dataclass(frozen=True)
class BuildData:
    """What a build reads; a set that its config has no use for is None.

    Attributes:
        train: Labelled training batches, as the caller gave them.
        ranking: Labelled ID batches to rank heads on.
        validation: Labelled ID batches to calibrate on, and to choose by in fine-tuning.
        ood: OOD batches for circuits.
        seed: What the order of a shuffling loader is drawn from.
    """

    train: Batches | None
    ranking: list[Batch] | None
    validation: list[Batch] | None
    ood: list[Batch] | None
    seed: int

    def fingerprints(self) -> dict[str, str | None]:
        """What the sets contain; of the training data only what is at hand, see `fingerprint`."""
        held_out = {"ranking": self.ranking, "validation": self.validation, "ood": self.ood}
        names = {name: None if data is None else data_fingerprint(data, name) for name, data in held_out.items()}
        train = None if self.train is None else fingerprint(self.train, "train", derive_seed(self.seed, "train"))
        return {"train": train, **names}

    def samples(self) -> dict[str, int | None]:
        """Number of samples in each held-out set."""
        held_out = {"ranking": self.ranking, "validation": self.validation, "ood": self.ood}
        return {
            name: None if data is None else sum(size_of(inputs) for inputs, _ in data)
            for name, data in held_out.items()
        }


def read_data(
    config: HydraConfig,
    classes: int,
    *,
    train: Batches | None,
    id: Batches | None,
    ood: Batches | None,
    validation: Batches | None,
) -> BuildData:
    """Read and check the held-out sets.

    Without `validation`, half of `id` ranks and half validates, whatever the strategy: builds that differ in
    nothing else are then calibrated on the same samples.
    """
    if ood is not None and config.extracts_circuits and any(ood is other for other in (train, id, validation)):
        raise DataError("ood= is the very data given as train=, id= or validation=; give data unlike the training data")
    if train is not None:
        require_rereadable(train, "train")
    checked = None if validation is None else read_all(validation, "validation", config.seed, classes)
    ranking = None if id is None else read_all(id, "id", config.seed, classes)
    if ranking is not None and checked is None:
        ranking, checked = halves(ranking, config.seed, "id")
    trains = config.recipe is not None or config.strategy == "taylor"
    return BuildData(
        train=train if trains else None,
        ranking=ranking,
        validation=checked,
        ood=read_all(ood, "ood", config.seed) if ood is not None and config.extracts_circuits else None,
        seed=config.seed,
    )


def read_all(batches: Batches, name: str, seed: int, classes: int | None = None) -> list[Batch]:
    """All batches, held in memory; a shuffling loader gives the same order whenever the seed is the same.

    Args:
        batches: The source; read once.
        name: What to call it in errors.
        seed: Start of the random numbers while it is read; they are put back afterwards.
        classes: Number of classes the labels must fit; None where none are needed, and none are read.
    """
    found: list[Batch] = []
    with borrowed(batches), epoch_of(batches, 0, derive_seed(seed, name), torch.device("cpu")):
        for index, (inputs, labels) in enumerate(iterate(batches, name, labelled=classes is not None)):
            _require_one_size(inputs, name, index)
            found.append((inputs, None if classes is None else require_labels(labels, classes, name, index)))
    if not sum(size_of(inputs) for inputs, _ in found):
        raise DataError(f"{name} has no samples in its {len(found)} batches; check the loader")
    return found


def halves(batches: list[Batch], seed: int, name: str) -> tuple[list[Batch], list[Batch]]:
    """Two disjoint halves of the samples; the first has the odd one.

    A sample stays in the batch it came in (text keeps its padding), so a batch may be cut in two.
    """
    sizes = [size_of(inputs) for inputs, _ in batches]
    total = sum(sizes)
    if total < 2:
        raise DataError(
            f"{name} has {total} samples; splitting it in two needs at least 2 (better hundreds): give more, or "
            "give validation= as well"
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(order[: (total + 1) // 2])] = True
    first: list[Batch] = []
    second: list[Batch] = []
    for (inputs, labels), mask in zip(batches, chosen.split(sizes), strict=True):
        for half, keep in ((first, mask), (second, ~mask)):
            if keep.any():
                half.append((_rows(inputs, keep), None if labels is None else labels[keep.to(labels.device)]))
    return first, second


def size_of(inputs: Inputs) -> int:
    """Number of samples in the inputs of one batch."""
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def first_rows(inputs: Inputs, count: int) -> Inputs:
    """The first samples of a batch."""
    if isinstance(inputs, Tensor):
        return inputs[:count]
    return {name: tensor[:count] for name, tensor in inputs.items()}


def _rows(inputs: Inputs, keep: Tensor) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[keep.to(inputs.device)]
    return {name: tensor[keep.to(tensor.device)] for name, tensor in inputs.items()}


def _require_one_size(inputs: Inputs, name: str, index: int) -> None:
    sizes = {} if isinstance(inputs, Tensor) else {key: len(part) for key, part in inputs.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"batch {index} of {name} has different numbers of samples: {sizes}")
