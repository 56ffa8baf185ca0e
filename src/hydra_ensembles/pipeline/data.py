"""Inputs of a build: the model, and the data, read once and checked against each other."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .._distributed import local_device
from .._utils import derive_seed, require_device
from ..batches import (
    Batches,
    Inputs,
    Sources,
    changed,
    first_epoch,
    iterate,
    named_sources,
    renumbered,
    require_labels,
    require_rereadable,
    size_of,
)
from ..convert.convert import convert
from ..data.synthetic import synthetic_ood
from ..digest import require_other_samples, row_digests
from ..errors import ConfigError, DataError
from ..heads.masking import existing_heads, max_removable, towers_of
from ..heads.ranking import Head
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.member_states import place_of
from ..model.zero_shot import Templates, checked_names, checked_templates, zero_shot
from ..prune import prune

ReadBatch = tuple[Inputs, Tensor | None]
Judges = Mapping[str, list[ReadBatch]]  # held-out sets by name: the first is labelled ID data, the others are OOD


@dataclass(frozen=True, eq=False)
class StartingModel:
    """The model that members are pruned from; for a dual encoder, in both towers."""

    base: Ensemble  # the classifier; for a dual encoder, the zero-shot ensemble with all heads
    dual: DualEncoder | None = None
    names: tuple[str, ...] = ()  # classes of the dual encoder
    templates: tuple[str, ...] = ()  # sentences for the class names
    upper: Ensemble | None = None  # if given, members start here: the base with the upper layers of a pretrained model

    @property
    def ranked(self) -> Ensemble | DualEncoder:
        """The model whose heads are ranked."""
        return self.base if self.dual is None else self.dual

    @property
    def bare(self) -> Ensemble:
        """The base without what was fitted or measured on it: that is not true of models made from it."""
        return self.base.with_metadata(calibration=None, familiarity=None, metrics={})

    def heads(self, layers: Iterable[int] | None) -> int:
        """Number of heads in these layers that a member may lose."""
        towers = towers_of(self.ranked).items()
        heads = [head for name, tower in towers for head in existing_heads(tower.config, layers, tower=name)]
        return max_removable(self.ranked, heads)

    def pruned(self, heads: Sequence[Head]) -> Ensemble:
        """A member without these heads."""
        if self.dual is None:
            return prune(self.upper or self.bare, heads)
        return zero_shot(prune(self.dual, heads), self.names, self.templates)


def starting_model(
    model: nn.Module,
    class_names: Sequence[str] | None,
    templates: Templates,
    device: torch.device | str | None,
) -> StartingModel:
    """Convert the model to an ensemble, or to a dual encoder with its zero-shot ensemble, on the device; one member."""
    target = None if device is None else local_device(require_device(device))
    start: Ensemble | DualEncoder = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if start.num_members != 1:
        raise ConfigError(f"build starts from one model, got {start.num_members} members; take one: ensemble.member(i)")
    if isinstance(start, Ensemble) and start.num_classes < 2:
        raise ConfigError(f"build starts from a trained classifier, but this model has {start.num_classes} classes")
    if isinstance(start, Ensemble) == (class_names is not None):
        raise ConfigError(f"class_names are for a dual encoder, and required there; this is a {type(start).__name__}")
    if target is not None and start.device != target:
        start = (copy.deepcopy(start) if start is model else start).to(target)
    if isinstance(start, Ensemble):
        return StartingModel(start)
    names, sentences = checked_names(class_names or ()), checked_templates(templates)
    return StartingModel(zero_shot(start, names, sentences), start, names, sentences)


def with_upper_layers(start: StartingModel, pretrained: nn.Module, trunk: int) -> StartingModel:
    """Let members take the layers above the trunk (without a trunk, all weights) from a pretrained model."""
    donor: Any = pretrained if isinstance(pretrained, Ensemble) else convert(pretrained)
    if start.dual is not None or not isinstance(donor, Ensemble) or donor.num_members != 1:
        raise ConfigError(f"pretrained must be one model, and is only for classifiers; got {type(donor).__name__}")
    base = start.bare
    mine, theirs = base.config.undropped, donor.config.undropped
    if any(getattr(mine, part) != getattr(theirs, part) for part in ("stem", "encoder", "heads")):
        differing = "; ".join(base.config.differences(donor.config)[:5]) or "their heads"
        raise ConfigError(f"pretrained must be the model before its fine-tuning, but it differs in {differing}")
    state = dict(base.state_dict())
    upper = donor.state_dict()
    for name, tensor in state.items():
        group, layer = place_of(name)
        above = not trunk or (group != "stem" and (layer is None or layer >= trunk))
        if above and name in upper and upper[name].shape == tensor.shape and "classifier" not in name:
            state[name] = upper[name].to(tensor)
    metadata = base.metadata.after(f"layers from {trunk} on as they were pretrained")
    return replace(start, upper=Ensemble.from_state(base.config, state, metadata))


@dataclass(frozen=True)
class BuildData:
    """Data of a build; sets that its config does not need are None."""

    train: Batches | None  # labelled, as given by the caller
    ranking: list[ReadBatch] | None  # labelled ID batches to rank heads on
    validation: list[ReadBatch] | None  # labelled ID batches for calibration, and for choices in fine-tuning
    ood: list[ReadBatch] | dict[str, list[ReadBatch]] | None  # for circuits; by name if there are several sources
    seed: int  # for the order of shuffling loaders

    @property
    def held_out(self) -> dict[str, list[ReadBatch] | None]:
        """The sets in memory, by name."""
        outside: Mapping[str, Any] = {"ood": None} if self.ood is None else named_sources(self.ood, "ood")
        return {"ranking": self.ranking, "validation": self.validation, **outside}

    @property
    def for_taylor(self) -> Batches | None:
        """The batches that Taylor rankings read."""
        return self.ranking if self.train is None else self.train

    def samples(self) -> dict[str, int | None]:
        """Number of samples in each held-out set."""
        return {name: None if data is None else samples_in(data) for name, data in self.held_out.items()}

    def require_readable(self, base: Ensemble) -> None:
        """Run the model on a sample of every set, so that a wrong size or key fails before the long work."""
        first = {name: data[0][0] for name, data in self.held_out.items() if data is not None}
        if self.train is not None:
            with first_epoch(self.train, derive_seed(self.seed, "train")):
                index, first["train"], labels = next(iterate(self.train, "train", whole=False))
            require_labels(labels, base.num_classes, "train", index)
        for name, inputs in first.items():
            try:
                with torch.no_grad():
                    base(base.prepare(changed(inputs, lambda tensor: tensor[:1])))
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise DataError(f"the model cannot read the first batch of {name}: {error}") from error


def read_sets(
    seed: int,
    model: Ensemble,
    *,
    train: Batches | None,
    id: Batches | None,
    ood: Sources | Literal["synthetic"] | None,
    validation: Batches | None = None,
) -> tuple[Batches | None, dict[str, Any], dict[str, list[ReadBatch]]]:
    """Training data, labelled and OOD sets in memory: numbered as in the model, and none the same as another."""
    if train is not None:
        require_rereadable(train, "train")
    classes = model.num_classes
    numbered = renumbered({"train": train, "id": id, "validation": validation}, model.metadata.labels, classes)
    train = numbered.pop("train")
    held_out = {
        name: None if batches is None else read_all(batches, name, seed, classes) for name, batches in numbered.items()
    }
    given = {} if ood is None or isinstance(ood, str) else named_sources(ood, "ood")
    outside = {name: read_all(batches, name, seed) for name, batches in given.items()}
    rows = {
        name: [key for inputs, _ in batches for key in row_digests(inputs)]
        for name, batches in {**held_out, **outside}.items()
        if batches is not None
    }
    for name in [one for one in held_out if one in rows]:
        known = rows.pop(name)
        require_other_samples(name, known, rows)
    return train, held_out, outside


def read_for_build(
    seed: int, model: Ensemble, *, ood: Sources | Literal["synthetic"] | None, **given: Batches | None
) -> BuildData:
    """Read and check the sets of a build.

    Without `validation`, one half of `id` ranks and the other validates, whatever the strategy: builds that differ
    only in strategy are then calibrated on the same samples. Synthetic OOD data are made from the ranking half.
    """
    train, held_out, outside = read_sets(seed, model, ood=ood, **given)
    ranking, checked = held_out["id"], held_out["validation"]
    if ranking is not None and checked is None:
        ranking, checked = halves(ranking, seed)
    if isinstance(ood, str) and ranking is None:
        raise DataError(f"ood is {ood!r}, which is made from the data of id, and there are none; give id")
    circuits = synthetic(ranking, seed, model) if isinstance(ood, str) else by_given_names(ood, outside)
    return BuildData(train, ranking, checked, circuits, seed)


def read_for_search(
    seed: int, base: Ensemble, *, train: Batches | None, id: Batches, ood: Sources | Literal["synthetic"]
) -> tuple[BuildData, Judges]:
    """The data of a search: those for builds, and those to judge on, which are halves of `id` and `ood`."""
    train, labelled, outside = read_sets(seed, base, train=train, id=id, ood=ood)
    sizes = {name: samples_in(batches) for name, batches in {"id": labelled["id"], **outside}.items()}
    least = 8 * base.num_classes  # a quarter of id fits statistics of classes
    if sizes["id"] < least or min(sizes.values()) < 4:
        raise DataError(f"too few samples: {sizes}; give {least} or more of id, and 4 or more of other sets")
    held_out, judged = halves(labelled["id"], seed)
    ranking, validation = halves(held_out, seed + 1)
    if isinstance(ood, str):
        circuits, judges = synthetic(ranking, seed, base), {ood: synthetic(judged, seed, base)}
    else:
        cut = {name: halves(batches, seed) for name, batches in outside.items()}
        circuits = by_given_names(ood, {name: first for name, (first, _) in cut.items()})
        judges = {name: second for name, (_, second) in cut.items()}
    return BuildData(train, ranking, validation, circuits, seed), {"ID": judged, **judges}


def by_given_names(ood: Any, sets: Mapping[str, list[ReadBatch]]) -> Any:
    """OOD sets by the names that the caller gave; without names the one set, and None if there is none."""
    return dict(zip(map(str, ood), sets.values(), strict=True)) if isinstance(ood, Mapping) else sets.get("ood")


def synthetic(batches: list[ReadBatch], seed: int, model: Ensemble) -> list[ReadBatch]:
    """Synthetic OOD data, one sample per ID sample."""
    return [(inputs, None) for (inputs,) in synthetic_ood(batches, seed=seed, model=model)]


def read_all(batches: Batches, name: str, seed: int, classes: int | None = None) -> list[ReadBatch]:
    """Read all batches into memory, with labels if `classes` is given; a loader shuffles by the seed."""
    in_memory: list[ReadBatch] = []
    with first_epoch(batches, derive_seed(seed, name)):
        for index, inputs, labels in iterate(batches, name, labelled=classes is not None):
            in_memory.append((inputs, None if classes is None else require_labels(labels, classes, name, index)))
    return in_memory


def halves(batches: list[ReadBatch], seed: int) -> tuple[list[ReadBatch], list[ReadBatch]]:
    """Split the samples of `id` into two disjoint halves; an odd sample goes to the first.

    Samples stay in their batch (texts keep their padding), so a batch may be split in two. `batches` is emptied on the
    way, so that no data are in memory twice.
    """
    total = samples_in(batches)
    if total < 2:
        raise DataError(f"id has {total} samples; two halves need at least 2: give more, or validation as well")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(order[: (total + 1) // 2])] = True
    halved: tuple[list[ReadBatch], list[ReadBatch]] = [], []
    for mask in chosen.split([size_of(inputs) for inputs, _ in batches]):
        inputs, labels = batches.pop(0)
        for half, keep in zip(halved, (mask, ~mask), strict=True):
            if keep.any():
                part = changed(inputs, itemgetter(keep))  # the mask may be on another device
                half.append((part, None if labels is None else labels[keep]))
    return halved


def samples_in(batches: list[ReadBatch]) -> int:
    """Number of samples in all batches."""
    return sum(size_of(inputs) for inputs, _ in batches)
