"""What a build is given: the model and the data, checked before the long work begins."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._utils import derive_seed, require_device
from ..batches import (
    Batches,
    Inputs,
    borrowed,
    epoch_of,
    iterate,
    length_of,
    move,
    read_batch,
    require_labels,
    require_rereadable,
)
from ..convert.convert import convert
from ..errors import ConfigError, DataError
from ..heads.masking import existing_heads, towers_of
from ..heads.ranking import Head, data_fingerprint
from ..model.clip import DualEncoder, Templates, checked_names, checked_templates, zero_shot
from ..model.ensemble import Ensemble
from ..prune import prune
from ..training.loop import fingerprint
from ..training.recipe import Recipe, is_trained, rate_factor, warmup_updates
from .settings import HydraConfig

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


@dataclass(frozen=True, eq=False)
class Start:
    """The model that members are pruned from.

    Attributes:
        base: The classifier; of a dual encoder, the zero-shot ensemble of all its heads.
        dual: The dual encoder, or None. Heads of both its towers are pruned then.
        names: Its classes.
        templates: The sentences that class names stand in.
    """

    base: Ensemble
    dual: DualEncoder | None = None
    names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    @property
    def ranked(self) -> Ensemble | DualEncoder:
        """The model whose heads are ranked."""
        return self.base if self.dual is None else self.dual

    @property
    def circuit_options(self) -> dict[str, Any]:
        """What `extract_circuit` is told beside the data."""
        return {} if self.dual is None else {"class_names": self.names, "templates": self.templates}

    def layers(self, config: HydraConfig) -> range | None:
        """Layers in which members may differ; None for all of both towers."""
        if self.dual is not None:
            if config.shared_layers:
                raise ConfigError(
                    f"HydraConfig.shared_layers is {config.shared_layers}, but layers are numbered within one tower "
                    "and heads of both are pruned; set it to 0, or build from zero_shot(dual, class_names), which "
                    "prunes the image tower alone"
                )
            return None
        if config.shared_layers >= self.base.num_layers:
            raise ConfigError(
                f"HydraConfig.shared_layers is {config.shared_layers}, the model has {self.base.num_layers} layers; "
                "at least the last one must be left for the members to differ"
            )
        return range(config.shared_layers, self.base.num_layers)

    def heads(self, layers: Iterable[int] | None) -> int:
        """Number of heads in these layers."""
        return sum(len(existing_heads(tower.config, layers)) for tower in towers_of(self.ranked).values())

    def pruned(self, heads: Sequence[Head]) -> Ensemble:
        """A member without these heads."""
        if self.dual is None:
            return prune(self.base, heads)
        return zero_shot(prune(self.dual, heads), self.names, self.templates)


def starting_point(
    model: nn.Module,
    config: HydraConfig,
    class_names: Sequence[str] | None,
    templates: Templates,
    device: torch.device | str | None,
) -> Start:
    """The model as an ensemble, or as a dual encoder with its zero-shot ensemble, on the device; one member."""
    place = require_device(device)
    converted = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if converted.num_members != 1:
        raise ConfigError(
            f"build starts from one model, got an ensemble of {converted.num_members} members; take one of them with "
            "ensemble.member(i)"
        )
    if isinstance(converted, Ensemble):
        return Start(_classifier(converted, class_names, place))
    if class_names is None:
        raise ConfigError(
            "build makes ensembles of classifiers, got a DualEncoder; give class_names= to classify images by them"
        )
    if config.strategy == "taylor" or (config.extracts_circuits and config.method == "screened"):
        raise ConfigError(
            f"strategy {config.strategy!r} with method {config.method!r} ranks the heads of one tower; for both use "
            'circuits with method="exact", or build from zero_shot(dual, class_names), which prunes the image tower'
        )
    names, sentences = checked_names(class_names), checked_templates(templates)
    if place is not None and converted.device != place:
        state = {name: tensor.to(place) for name, tensor in converted.state_dict().items()}
        towers = converted.image.metadata, converted.text.metadata
        converted = DualEncoder.from_state(converted.config, state, *towers)
    return Start(zero_shot(converted, names, sentences), converted, names, sentences)


def _classifier(base: Ensemble, class_names: Sequence[str] | None, device: torch.device | None) -> Ensemble:
    """The ensemble on the device; a copy where something had to change."""
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if base.num_classes < 2:
        raise ConfigError(
            f"build starts from a classifier, this model has {base.num_classes} classes; give a model with a "
            "trained classifier (convert(model, num_labels=...) adds one, finetune trains it)"
        )
    if device is None or base.device == device:
        return base
    state = {name: tensor.to(device) for name, tensor in base.state_dict().items()}
    return Ensemble.from_state(base.config, state, base.metadata)


def require_possible(config: HydraConfig, start: Start, data: BuildData) -> None:
    """Hold config, model and data against each other."""
    _check_sets(config, data)
    base = start.base
    _check_heads(config, start)
    if config.strategy == "taylor":
        _check_calibration_batches(config, data)
    if config.recipe is not None:
        _check_recipe(config.recipe, config, base, data)
    _check_inputs(base, data)


def above_the_trunk(recipe: Recipe, config: HydraConfig, layers: int) -> Recipe:
    """The recipe, kept out of the stem and the layers that all members share."""
    if not config.shared_layers:
        return recipe
    free = layers - config.shared_layers
    return replace(recipe, last_blocks=free if recipe.last_blocks is None else min(free, recipe.last_blocks))


def _check_sets(config: HydraConfig, data: BuildData) -> None:
    """Every set that some stage reads is there."""
    if config.extracts_circuits and (data.ranking is None or data.ood is None):
        raise DataError(
            f'strategy="{config.strategy}" extracts circuits, which needs id= and ood=; '
            'without OOD data use strategy="taylor"'
        )
    if config.strategy == "taylor" and data.train is None and data.ranking is None:
        raise DataError('strategy="taylor" reads labelled batches; give train= or id=')
    if config.recipe is not None and data.train is None:
        raise DataError("the config has a recipe for fine-tuning, which needs train=")
    if config.calibrate and data.validation is None:
        raise DataError("calibration needs held-out data: give id= or validation=, or set calibrate=False")


def _check_heads(config: HydraConfig, start: Start) -> None:
    """There are enough heads for every member to lose a set of its own."""
    layers = start.layers(config)
    free = start.heads(layers)
    where = f" above the first {config.shared_layers} layers" if config.shared_layers else ""
    if config.prune > free:
        raise ConfigError(f"HydraConfig.prune is {config.prune}, but there are {free} heads{where}")
    if config.strategy == "taylor" and config.taylor_scope == "layer" and layers is not None:
        choices = _choices_by_layer(config, [len(start.base.heads[0][layer]) for layer in layers])
    else:
        choices = math.comb(config.pool_size(free) if config.draws_from_pool else free, config.prune)
    if choices < config.members:
        raise ConfigError(
            f"HydraConfig.prune is {config.prune} of {free} heads{where}, which leaves {choices} different choices for "
            f"{config.members} members, so some would be identical; prune another number of heads, make the pool "
            "larger, or ask for fewer members"
        )


def _choices_by_layer(config: HydraConfig, heads: Sequence[int]) -> int:
    each, rest = divmod(config.prune, len(heads))
    if rest:
        raise ConfigError(
            f'HydraConfig.prune is {config.prune}, which taylor_scope="layer" cannot spread evenly over '
            f'{len(heads)} layers; use a multiple of {len(heads)}, or taylor_scope="global"'
        )
    if min(heads) < each:
        raise ConfigError(
            f'HydraConfig.prune is {config.prune}: with taylor_scope="layer" that is {each} heads of each of '
            f'{len(heads)} layers, but one has only {min(heads)}; prune fewer, or use taylor_scope="global"'
        )
    return math.prod(math.comb(count, each) for count in heads)


def _check_calibration_batches(config: HydraConfig, data: BuildData) -> None:
    """Where the source knows its length, seeds must be able to draw different batches."""
    name, source = ("train", data.train) if data.train is not None else ("the ranking half of id", data.ranking)
    assert source is not None  # _check_sets has seen to it
    total = length_of(source)
    needed = config.calibration_batches + (1 if config.members > 1 else 0)
    if total is not None and total < needed:
        reason = ", and more, so that each member is ranked on others" if config.members > 1 else ""
        raise ConfigError(
            f"HydraConfig.calibration_batches is {config.calibration_batches}, but {name} has {total} batches; a "
            f"Taylor ranking draws that many{reason}: lower calibration_batches, or make the batches smaller"
        )


def _check_recipe(recipe: Recipe, config: HydraConfig, base: Ensemble, data: BuildData) -> None:
    """What fine-tuning would complain about only after heads were ranked."""
    if recipe.last_blocks is not None and recipe.last_blocks > base.num_layers:
        raise ConfigError(f"Recipe.last_blocks is {recipe.last_blocks}, but the model has {base.num_layers} blocks")
    if data.validation is None and (len(recipe.grid) > 1 or recipe.patience is not None):
        raise DataError(
            "the recipe chooses between learning rates or stops early, which needs held-out data: give id= or "
            "validation=, or a recipe with one learning_rate and patience=None"
        )
    total = recipe.updates(None if data.train is None else length_of(data.train))
    warmup = warmup_updates(recipe.warmup, total)
    rate_factor(0, total=total, warmup=warmup, schedule=recipe.schedule, floor=recipe.floor)  # raises if too long
    effective = above_the_trunk(recipe, config, base.num_layers)
    if not any(is_trained(name, effective, base.num_layers) for name, _ in base.named_parameters()):
        raise ConfigError(
            f"the recipe trains {list(recipe.train_groups)}, of which nothing is left above the "
            f"{config.shared_layers} shared layers; add groups to Recipe.train_groups, or share fewer layers"
        )


def _check_inputs(base: Ensemble, data: BuildData) -> None:
    """The model can read a sample of every set; a wrong size or a wrong key shows before the long work."""
    for name, held_out in (("id", data.ranking), ("validation", data.validation), ("ood", data.ood)):
        if held_out is not None:
            _try(base, held_out[0][0], name)
    if data.train is None:
        return
    seed = derive_seed(data.seed, "train")
    with borrowed(data.train), epoch_of(data.train, 0, seed, torch.device("cpu")):
        first = next(iter(data.train), None)
    if first is None:
        raise DataError("train has no batches; check the loader")
    inputs, labels = read_batch(first, "train")
    require_labels(labels, base.num_classes, "train")
    _try(base, inputs, "train")


@torch.no_grad()
def _try(base: Ensemble, inputs: Inputs, name: str) -> None:
    try:
        base(move(first_rows(inputs, 1), base.device, base.dtype))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"the model cannot read the first batch of {name}: {error}") from error
