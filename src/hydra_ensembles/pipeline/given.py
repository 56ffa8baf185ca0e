"""What a build is given: the model and the data, read once and held in one form."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .._distributed import local_device
from .._utils import derive_seed, require_device
from ..batches import (
    Batches,
    Inputs,
    borrowed,
    changed,
    epoch_of,
    iterate,
    move,
    require_labels,
    require_rereadable,
    size_of,
)
from ..convert.convert import convert
from ..errors import ConfigError, DataError
from ..heads.masking import existing_heads, towers_of
from ..heads.ranking import Head, data_fingerprint
from ..model.clip import DualEncoder, Templates, checked_names, checked_templates, zero_shot
from ..model.ensemble import Ensemble
from ..prune import prune
from ..training.reproducible import fingerprint

Batch = tuple[Inputs, Tensor | None]


@dataclass(frozen=True, eq=False)
class StartingModel:
    """The model that members are pruned from; of a dual encoder, heads of both towers."""

    base: Ensemble  # the classifier; of a dual encoder, the zero-shot ensemble of all its heads
    dual: DualEncoder | None = None
    names: tuple[str, ...] = ()  # the classes of the dual encoder
    templates: tuple[str, ...] = ()  # the sentences that these stand in

    @property
    def ranked(self) -> Ensemble | DualEncoder:
        """The model whose heads are ranked."""
        return self.base if self.dual is None else self.dual

    def heads(self, layers: Iterable[int] | None) -> int:
        """Number of heads in these layers."""
        return sum(len(existing_heads(tower.config, layers)) for tower in towers_of(self.ranked).values())

    def pruned(self, heads: Sequence[Head]) -> Ensemble:
        """A member without these heads."""
        if self.dual is None:
            return prune(self.base, heads)
        return zero_shot(prune(self.dual, heads), self.names, self.templates)


def starting_model(
    model: nn.Module, class_names: Sequence[str] | None, templates: Templates, device: torch.device | str | None
) -> StartingModel:
    """The model as an ensemble, or as a dual encoder with its zero-shot ensemble, on the device; one member."""
    place = None if device is None else local_device(require_device(device))
    found: Ensemble | DualEncoder = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if found.num_members != 1:
        raise ConfigError(f"build starts from one model, got {found.num_members} members; take one: ensemble.member(i)")
    if isinstance(found, Ensemble) and found.num_classes < 2:
        raise ConfigError(
            f"build starts from a trained classifier, this model has {found.num_classes} classes; "
            "convert(model, num_labels=...) adds one, finetune trains it"
        )
    if isinstance(found, Ensemble) == (class_names is not None):
        raise ConfigError(
            f"class_names is {'given' if class_names is not None else 'missing'} for {type(found).__name__}: a dual "
            "encoder classifies images by them, an ensemble has its classes already"
        )
    if place is not None and found.device != place:
        found = (copy.deepcopy(found) if found is model else found).to(place)
    if isinstance(found, Ensemble):
        return StartingModel(found)
    names, sentences = checked_names(class_names or ()), checked_templates(templates)
    return StartingModel(zero_shot(found, names, sentences), found, names, sentences)


@dataclass(frozen=True)
class BuildData:
    """What a build reads; a set that its config has no use for is None."""

    train: Batches | None  # labelled, as the caller gave them
    ranking: list[Batch] | None  # labelled ID batches to rank heads on
    validation: list[Batch] | None  # labelled ID batches to calibrate on, and to choose by in fine-tuning
    ood: list[Batch] | None  # for circuits
    seed: int  # what the order of a shuffling loader is drawn from

    @property
    def held_out(self) -> dict[str, list[Batch] | None]:
        """The sets in memory, by name."""
        return {"ranking": self.ranking, "validation": self.validation, "ood": self.ood}

    @property
    def for_taylor(self) -> Batches | None:
        """What Taylor rankings read."""
        return self.ranking if self.train is None else self.train

    def fingerprints(self) -> dict[str, str | None]:
        """What the sets contain; of the training data only what is at hand, see `fingerprint`."""
        names = {name: None if data is None else data_fingerprint(data, name) for name, data in self.held_out.items()}
        train = None if self.train is None else fingerprint(self.train, "train", derive_seed(self.seed, "train"))
        return {"train": train, **names}

    def samples(self) -> dict[str, int | None]:
        """Number of samples in each held-out set."""
        return {name: None if data is None else _samples(data) for name, data in self.held_out.items()}

    def require_readable(self, base: Ensemble) -> None:
        """The model can read a sample of every set; a wrong size or a wrong key shows before the long work."""
        first = {name: data[0][0] for name, data in self.held_out.items() if data is not None}
        if self.train is not None:
            order = epoch_of(self.train, 0, derive_seed(self.seed, "train"), torch.device("cpu"))
            with borrowed(self.train), order:
                first["train"], labels = next(iterate(self.train, "train"))
            require_labels(labels, base.num_classes, "train")
        for name, inputs in first.items():
            try:
                with torch.no_grad():
                    base(move(changed(inputs, lambda tensor: tensor[:1]), base.device, base.dtype))
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise DataError(f"the model cannot read the first batch of {name}: {error}") from error


def read_data(
    seed: int, classes: int, train: Batches | None, id: Batches | None, ood: Batches | None, validation: Batches | None
) -> BuildData:
    """Read and check the held-out sets.

    Without `validation`, half of `id` ranks and half validates, whatever the strategy: builds that differ in
    nothing else are then calibrated on the same samples.
    """
    if train is not None:
        require_rereadable(train, "train")
    checked = None if validation is None else read_all(validation, "validation", seed, classes)
    ranking = None if id is None else read_all(id, "id", seed, classes)
    if ranking is not None and checked is None:
        ranking, checked = halves(ranking, seed)
    return BuildData(train, ranking, checked, None if ood is None else read_all(ood, "ood", seed), seed)


def read_all(batches: Batches, name: str, seed: int, classes: int | None = None) -> list[Batch]:
    """All batches, held in memory; a shuffling loader gives the same order whenever the seed is the same.

    Labels are read where there are classes that they must fit.
    """
    found: list[Batch] = []
    with borrowed(batches), epoch_of(batches, 0, derive_seed(seed, name), torch.device("cpu")):
        for index, (inputs, labels) in enumerate(iterate(batches, name, labelled=classes is not None)):
            sizes = {} if isinstance(inputs, Tensor) else {key: len(part) for key, part in inputs.items()}
            if len(set(sizes.values())) > 1:
                raise DataError(f"batch {index} of {name} has different numbers of samples: {sizes}")
            found.append((inputs, None if classes is None else require_labels(labels, classes, name, index)))
    if not _samples(found):
        raise DataError(f"{name} has no samples in its {len(found)} batches; check the loader")
    return found


def halves(batches: list[Batch], seed: int) -> tuple[list[Batch], list[Batch]]:
    """Two disjoint halves of the samples of `id`; the first has the odd one.

    A sample stays in the batch it came in (text keeps its padding), so a batch may be cut in two.
    """
    total = _samples(batches)
    if total < 2:
        raise DataError(f"id has {total} samples; two halves need at least 2: give more, or validation= as well")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(order[: (total + 1) // 2])] = True
    halved: tuple[list[Batch], list[Batch]] = [], []
    masks = chosen.split([size_of(inputs) for inputs, _ in batches])
    for (inputs, labels), mask in zip(batches, masks, strict=True):
        for half, keep in zip(halved, (mask, ~mask), strict=True):
            if keep.any():
                part = changed(inputs, lambda tensor, keep=keep: tensor[keep.to(tensor.device)])  # type: ignore[misc]
                half.append((part, None if labels is None else labels[keep.to(labels.device)]))
    return halved


def _samples(batches: list[Batch]) -> int:
    return sum(size_of(inputs) for inputs, _ in batches)
