"""What a build is given: HydraConfig, the model and the data, held against each other before the long work."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    borrowed,
    changed,
    epoch_of,
    fingerprint,
    iterate,
    length_of,
    named_sources,
    require_labels,
    require_rereadable,
    size_of,
)
from ..circuit.scores import Method, Ties
from ..convert.convert import convert
from ..convert.processors import with_preprocessing
from ..data.synthetic import synthetic_ood
from ..errors import ConfigError, DataError
from ..fuse import Fusion, StemFusion
from ..heads.masking import existing_heads, most_to_go, towers_of
from ..heads.members import CIRCUIT_ORDER
from ..heads.ranking import Head, data_fingerprint
from ..heads.taylor import Scope
from ..metrics.distance import FamiliarityChoice
from ..model.dual_encoder import DualEncoder, Templates, checked_names, checked_templates, zero_shot
from ..model.ensemble import Ensemble
from ..model.states import place_of
from ..overlap import keys_at_hand, require_unlike, sample_keys, warn_if_shared
from ..prune import prune
from ..schema import ADDED_LATER, require_types
from ..training.recipe import Recipe

Strategy = Literal["circuit", "taylor", "sampled", "random", "branches"]
Training = Literal["together", "apart"]
Batch = tuple[Inputs, Tensor | None]

PAPER_POOL = 100 / 48  # the paper samples 48 heads to prune out of the first 100 of a ranking (B.5)
TRUNK = 5 / 6  # of the layers, and of heads 8 % of all and at most a quarter of those above: our own defaults
PRUNED, PRUNED_ABOVE = 0.08, 0.25
LARGEST_SEED = 2**62  # what every random generator behind a build accepts, with room for one seed per member


@dataclass(frozen=True, eq=False)
class StartingModel:
    """The model that members are pruned from; of a dual encoder, heads of both towers."""

    base: Ensemble  # the classifier; of a dual encoder, the zero-shot ensemble of all its heads
    dual: DualEncoder | None = None
    names: tuple[str, ...] = ()  # the classes of the dual encoder
    templates: tuple[str, ...] = ()  # the sentences that these stand in
    upper: Ensemble | None = None  # where members start instead: the base with the upper layers of a pretrained model

    @property
    def ranked(self) -> Ensemble | DualEncoder:
        """The model whose heads are ranked."""
        return self.base if self.dual is None else self.dual

    def heads(self, layers: Iterable[int] | None) -> int:
        """Number of heads in these layers that a member may lose."""
        towers = towers_of(self.ranked).items()
        heads = [head for name, tower in towers for head in existing_heads(tower.config, layers, tower=name)]
        return most_to_go(self.ranked, heads)

    def pruned(self, heads: Sequence[Head]) -> Ensemble:
        """A member without these heads."""
        if self.dual is None:
            return prune(self.upper or self.base, heads)
        return zero_shot(prune(self.dual, heads), self.names, self.templates)


def starting_model(
    model: nn.Module,
    class_names: Sequence[str] | None,
    templates: Templates,
    device: torch.device | str | None,
    preprocessing: Mapping[str, Any] | None = None,
) -> StartingModel:
    """The model as an ensemble, or as a dual encoder with its zero-shot ensemble, on the device; one member."""
    place = None if device is None else local_device(require_device(device))
    found: Ensemble | DualEncoder = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if found.num_members != 1:
        raise ConfigError(f"build starts from one model, got {found.num_members} members; take one: ensemble.member(i)")
    if isinstance(found, Ensemble) and found.num_classes < 2:
        raise ConfigError(f"build starts from a trained classifier, this model has {found.num_classes} classes")
    if isinstance(found, Ensemble) == (class_names is not None):
        raise ConfigError(
            f"class_names are for a dual encoder, and needed there; the model is a {type(found).__name__}"
        )
    if place is not None and found.device != place:
        found = (copy.deepcopy(found) if found is model else found).to(place)
    if isinstance(found, Ensemble):
        return StartingModel(found if preprocessing is None else with_preprocessing(found, preprocessing))
    if preprocessing is not None:
        raise ConfigError("preprocessing is for a classifier; convert a dual encoder with processor=")
    names, sentences = checked_names(class_names or ()), checked_templates(templates)
    return StartingModel(zero_shot(found, names, sentences), found, names, sentences)


def with_upper_layers(start: StartingModel, pretrained: nn.Module, trunk: int) -> StartingModel:
    """The start, whose members take the layers above a trunk (all weights without one) from a pretrained model."""
    found: Any = pretrained if isinstance(pretrained, Ensemble) else convert(pretrained)
    if start.dual is not None or not isinstance(found, Ensemble) or found.num_members != 1:
        raise ConfigError(f"pretrained goes with a classifier and is one model, got {type(found).__name__}")
    base = start.base
    if any(getattr(found.config, part) != getattr(base.config, part) for part in ("stem", "encoder", "heads")):
        differing = "; ".join(base.config.differences(found.config)[:5]) or "their heads"
        raise ConfigError(f"pretrained must be the model before its fine-tuning, but it differs in {differing}")
    state, upper = dict(base.state_dict()), found.state_dict()
    for name, tensor in state.items():
        group, layer = place_of(name)
        above = not trunk or (group != "stem" and (layer is None or layer >= trunk))
        if above and name in upper and upper[name].shape == tensor.shape and "classifier" not in name:
            state[name] = upper[name].to(tensor)
    metadata = base.metadata.after(f"layers from {trunk} on as they were pretrained")
    return replace(start, upper=Ensemble.from_state(base.config, state, metadata))


@dataclass(frozen=True)
class BuildData:
    """What a build reads; a set that its config has no use for is None."""

    train: Batches | None  # labelled, as the caller gave them
    ranking: list[Batch] | None  # labelled ID batches to rank heads on
    validation: list[Batch] | None  # labelled ID batches to calibrate on, and to choose by in fine-tuning
    ood: list[Batch] | dict[str, list[Batch]] | None  # for circuits; sources by name where there are several
    seed: int  # what the order of a shuffling loader is drawn from

    @property
    def held_out(self) -> dict[str, list[Batch] | None]:
        """The sets in memory, by name."""
        outside: Mapping[str, Any] = {"ood": None} if self.ood is None else named_sources(self.ood, "ood")
        return {"ranking": self.ranking, "validation": self.validation, **outside}

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
                    base(base.prepare(changed(inputs, lambda tensor: tensor[:1])))
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise DataError(f"the model cannot read the first batch of {name}: {error}") from error


def read_data(
    seed: int,
    classes: int,
    train: Batches | None,
    id: Batches | None,
    ood: Sources | Literal["synthetic"] | None,
    validation: Batches | None,
    model: Ensemble | None = None,
) -> BuildData:
    """Read and check the held-out sets, and hold them against each other.

    Without `validation`, half of `id` ranks and half validates, whatever the strategy: builds that differ in
    nothing else are then calibrated on the same samples. Synthetic OOD data is made from the half that ranks; `model`
    knows the vocabulary of texts.
    """
    if train is not None:
        require_rereadable(train, "train")
    checked = None if validation is None else read_all(validation, "validation", seed, classes)
    ranking = None if id is None else read_all(id, "id", seed, classes)
    unlike: list[Batch] | dict[str, list[Batch]] | None = None
    if isinstance(ood, Mapping):
        named = zip(ood, named_sources(ood, "ood").items(), strict=True)
        unlike = {str(key): read_all(batches, name, seed) for key, (name, batches) in named}
    elif ood is not None and not isinstance(ood, str):
        unlike = read_all(ood, "ood", seed)
    given = {"train": keys_at_hand(train), "id": keys_at_hand(ranking), "validation": keys_at_hand(checked)}
    warn_if_shared("id", given["id"], "validation", given["validation"], "what ranks the heads calibrates them, too")
    known = {name: keys for name, keys in given.items() if keys is not None}
    if unlike is not None and known:
        sources = named_sources(unlike, "ood")
        foreign = {name: np.concatenate([sample_keys(one) for one, _ in data]) for name, data in sources.items()}
        require_unlike(" and ".join(known), np.concatenate(list(known.values())), foreign)
    if ranking is not None and checked is None:
        ranking, checked = halves(ranking, seed)
    if isinstance(ood, str):
        if ranking is None:
            raise DataError(f"ood={ood!r} is made from the data of id=, which is missing; give it")
        unlike = [(inputs, None) for (inputs,) in synthetic_ood(ranking, seed=seed, model=model)]
    return BuildData(train, ranking, checked, unlike, seed)


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


@dataclass(frozen=True)
class HydraConfig:
    """How to make a Hydra Ensemble out of one model.

    Attributes:
        prune: Heads each member loses; None takes 8 % of all heads, and at most a quarter of those above the trunk.
        members: Number of members.
        strategy: How the members' heads are chosen: `"circuit"` (CircAvg, CircAcc, CircOOD, further ones
            drawn from CircAvg), `"taylor"` (one Taylor ranking per member, each on other calibration
            batches), `"sampled"` (all drawn from the first `pool` heads of CircAvg), `"random"` (a control),
            `"branches"` (every member keeps all heads, and training alone makes them differ: the other control).
        whole: Whether the last member keeps all heads. Beside members that train apart from pretrained layers, it is
            the model as it was given.
        training: `"together"` trains the fused ensemble once, on the sum of its members' losses, trunk included;
            `"apart"` trains every member by itself before fusing; None is `"apart"` where there is a recipe, else none.
        method: How circuits are extracted; see `extract_circuit`.
        ties: Which head goes where several leave the same score; see `extract_circuit`.
        max_accuracy_loss: Share of its accuracy that the circuit for OOD detection may cost the model; None for any.
        pool: Heads to draw from, for `"sampled"` and for more than three circuit members; None takes the
            paper's ratio of 100 to 48, as far as there are heads.
        taylor_scope: `"layer"` prunes every layer alike, `"global"` compares heads of all layers.
        calibration_batches: Batches a Taylor ranking reads; fewer than there are, or all members would be
            ranked on the same ones.
        recipe: How to fine-tune; None leaves the members as pruned, or takes `Recipe.preset("hydra")` if `training`
            asks for some. Members that start equal, or from pretrained layers, get classifiers of their own.
        shared_layers: The first so many layers stay whole and common to all members: they run once however many
            members there are. Members that train apart leave them, and the stem, as they are. None takes five sixths
            of the layers where `prune` is not given either or the trunk is averaged, else none.
        average_trunk: Members that train apart train these layers, and the stem, too, and the trunk is their mean: a
            Deep Ensemble's training, and most of its gain, at the price of a trunk.
        stem: How the stems are fused; see `fuse`.
        mlp: How the MLPs are fused.
        norms: How the norms are fused.
        readout: How poolers and classifiers are fused.
        calibrate: Whether to fit a temperature and a threshold at the end.
        per_member_temperature: One temperature per member instead of one for all.
        accepted_share: Share of in-distribution inputs that each threshold accepts.
        familiarity: Score of features that says how familiar an input is, fitted on the half that ranks heads; see
            `calibrate`.
        seed: Draws halves, batches and members. Fine-tuning has the seed of its recipe.

    Examples:
        >>> import hydra_ensembles as he
        >>> config = he.HydraConfig(members=3, prune=24, strategy="taylor")
        >>> config.members, config.whole
        (3, False)
        >>> together = he.HydraConfig(training="together", recipe=he.Recipe.preset("hydra"), whole=True)
    """

    prune: int | None = None
    members: int = 3
    strategy: Strategy = "circuit"
    whole: bool = False
    training: Training | None = None
    method: Method = "auto"
    ties: Ties = "likelihood"
    max_accuracy_loss: float | None = field(default=None, metadata=ADDED_LATER)
    pool: int | None = None
    taylor_scope: Scope = "layer"
    calibration_batches: int = 8
    recipe: Recipe | None = None
    shared_layers: int | None = None
    average_trunk: bool = field(default=False, metadata=ADDED_LATER)
    stem: StemFusion = "shared"
    mlp: Fusion = "mean"
    norms: Fusion = "separate"
    readout: Fusion = "separate"
    calibrate: bool = True
    per_member_temperature: bool = False
    accepted_share: float = 0.95
    familiarity: FamiliarityChoice | None = field(default="auto", metadata=ADDED_LATER)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each setting, and those that only make sense together."""
        require_types(self)
        branches = self.strategy == "branches"
        smallest = {"prune": 0 if branches else 1, "members": 1 + self.whole, "calibration_batches": 1}
        for name, least in {**smallest, "shared_layers": 0, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= LARGEST_SEED:
                raise ConfigError(f"HydraConfig.{name} must be from {least} to 2**62, got {value}")
        if branches and (self.prune or (self.training is None and self.recipe is None)):
            raise ConfigError(
                f"HydraConfig.strategy 'branches' keeps all heads, and training makes members differ: leave out prune "
                f"(got {self.prune}), and give training='together' or a recipe"
            )
        if not 0.0 < self.accepted_share <= 1.0:
            raise ConfigError(f"HydraConfig.accepted_share must be above 0 and at most 1, got {self.accepted_share}")
        if self.max_accuracy_loss is not None and not 0.0 <= self.max_accuracy_loss <= 1.0:
            raise ConfigError(f"HydraConfig.max_accuracy_loss must be from 0 to 1, got {self.max_accuracy_loss}")
        if self.pool is not None and self.pool <= self.lost:
            raise ConfigError(f"HydraConfig.pool is {self.pool}; draws differ only if it is above prune ({self.lost})")
        if self.training is not None and self.recipe is None:
            object.__setattr__(self, "recipe", Recipe.preset("hydra"))
        if self.average_trunk and (self.recipe is None or self.training == "together" or self.shared_layers == 0):
            raise ConfigError(
                "HydraConfig.average_trunk is for members that train apart, each its own shared layers: give a recipe, "
                f"training='apart' and shared_layers (got {self.training!r} and {self.shared_layers})"
            )
        recipe, one_stem = self.recipe, self.stem == "shared" and self.members > 1 and self.training != "together"
        moves = recipe is not None and "stem" in recipe.train_groups and recipe.last_blocks is None
        whole_depth = not self.shared_layers and (self.prune is not None or self.shared_layers is not None)
        if one_stem and moves and whole_depth:
            raise ConfigError(
                'HydraConfig.recipe trains the stem of every member, but stem="shared" keeps one for all; leave "stem" '
                'out of Recipe.train_groups, or set stem="mean" or "separate"'
            )

    @property
    def lost(self) -> int:
        """Heads a pruned member loses, once settled."""
        return self.prune or 0

    @property
    def trunk(self) -> int:
        """Layers that all members share, once settled."""
        return self.shared_layers or 0

    @property
    def pruned_members(self) -> int:
        """Members that lose heads."""
        return 0 if self.strategy == "branches" else self.members - self.whole

    def settled(self, start: StartingModel) -> "HydraConfig":
        """The config with every number that was left open, for this model."""
        ours, layers = self.prune is None and start.dual is None, start.base.num_layers
        usual = min(round(TRUNK * layers), layers - 1) if ours or self.average_trunk else 0
        shared = usual if self.shared_layers is None else self.shared_layers
        prune, free = self.prune, range(min(shared, layers - 1), self._last(start))
        if prune is None and self.pruned_members:
            above = start.heads(None if start.dual is not None else free)
            prune = max(1, min(round(PRUNED * start.heads(None)), math.floor(PRUNED_ABOVE * above)))
            if self.strategy == "taylor" and self.taylor_scope == "layer":
                prune = max(1, round(prune / len(free))) * len(free)  # as many in each layer
        training = self.training or (None if self.recipe is None else "apart")
        return replace(self, prune=prune, shared_layers=shared, training=training)

    @property
    def extracts_circuits(self) -> bool:
        """Whether heads are ranked by circuits, which takes ID and OOD data."""
        return self.strategy in ("circuit", "sampled")

    @property
    def reads_train(self) -> bool:
        """Whether some stage reads training data where there are any."""
        return self.recipe is not None or self.strategy == "taylor"

    @property
    def draws_from_pool(self) -> bool:
        """Whether some member is drawn from a pool of heads."""
        return self.strategy == "sampled" or (self.strategy == "circuit" and self.pruned_members > len(CIRCUIT_ORDER))

    def pool_size(self, heads: int) -> int:
        """Size of the pool, out of `heads` that could be pruned."""
        if self.pool is None:
            return min(max(round(self.lost * PAPER_POOL), self.lost + 1), heads)
        if self.pool > heads:
            raise ConfigError(f"HydraConfig.pool is {self.pool}, but only {heads} heads can be pruned; lower it")
        return self.pool

    def layers(self, start: StartingModel) -> range | None:
        """Layers in which members may differ; None for all of both towers."""
        return None if start.dual is not None else range(self.trunk, self._last(start))

    def _last(self, start: StartingModel) -> int:
        """Where layers to prune end: with the blocks for as many heads of each, else with an attention that pools."""
        per_layer = self.strategy == "taylor" and self.taylor_scope == "layer"
        return start.base.num_layers if per_layer else len(start.base.config.head_counts)

    def training_recipe(self, start: StartingModel) -> Recipe | None:
        """The recipe as members follow it: apart, they leave the trunk; from equal starts, they get classifiers."""
        recipe, layers = self.recipe, start.base.num_layers
        if recipe is None:
            return None
        if recipe.reinit_classifier is None and (self.strategy == "branches" or start.upper is not None):
            recipe = replace(recipe, reinit_classifier="random")
        if self.training == "together" or self.average_trunk or not self.trunk:
            return recipe
        free = layers - self.trunk
        return replace(recipe, last_blocks=min(free, recipe.last_blocks or free))

    def check(self, start: StartingModel, data: BuildData) -> None:
        """Hold config, model and data against each other, before the long work; raises a `HydraError`."""
        self._check_layers(start)
        self._check_sets(data)
        self._check_heads(start)
        equal = self.strategy == "branches" and self.training == "together" and self.members > 1
        if equal and self.recipe is not None and self.recipe.reinit_classifier == "zeros":
            raise ConfigError("branches that start equal would stay equal with reinit_classifier='zeros'; use 'random'")
        if start.upper is not None and self.recipe is None:
            raise ConfigError("pretrained layers need training: give training= or a recipe")
        for recipe in (self.recipe, self.training_recipe(start)):  # as given, and as members follow it
            if recipe is not None:
                recipe.check(start.base, data.train, data.validation)
        data.require_readable(start.base)

    def _check_sets(self, data: BuildData) -> None:
        """Every set that some stage reads is there; Taylor rankings can draw different batches."""
        if self.extracts_circuits and (data.ranking is None or data.ood is None):
            raise DataError(
                f"strategy={self.strategy!r} needs id= and ood=; without OOD data use ood='synthetic', or "
                "strategy='taylor'"
            )
        if self.strategy == "taylor" and data.for_taylor is None:
            raise DataError("strategy='taylor' reads labelled batches; give train= or id=")
        if self.recipe is not None and data.train is None:
            raise DataError("the config has a recipe for fine-tuning, which needs train=")
        if self.calibrate and data.validation is None:
            raise DataError("calibration needs held-out data: give id= or validation=, or set calibrate=False")
        total = length_of(data.for_taylor) if self.strategy == "taylor" and data.for_taylor is not None else None
        if total is not None and total < self.calibration_batches + (self.pruned_members > 1):
            name = "the ranking half of id" if data.train is None else "train"
            raise ConfigError(
                f"HydraConfig.calibration_batches is {self.calibration_batches}, but {name} has {total} batches, and "
                "each member is ranked on others; lower calibration_batches, or make the batches smaller"
            )

    def _check_layers(self, start: StartingModel) -> None:
        """Layers are left to differ in; of a dual encoder, the method can rank both towers."""
        if start.dual is None and self.trunk >= start.base.num_layers:
            raise ConfigError(f"HydraConfig.shared_layers must be below the number of layers, {start.base.num_layers}")
        one_tower = self.strategy == "taylor" or (self.extracts_circuits and self.method == "screened")
        if start.dual is not None and (self.trunk or one_tower):
            raise ConfigError(
                "taylor, screened and shared_layers are for one tower; for both use circuits, method='exact' and "
                "shared_layers=0, or build from zero_shot(dual, class_names), which prunes the image tower alone"
            )

    def _check_heads(self, start: StartingModel) -> None:
        """There are enough heads for every member to lose a set of its own."""
        layers = self.layers(start)
        free = start.heads(layers)
        where = f" above the first {self.trunk} layers" if self.trunk else ""
        if self.lost > free:
            raise ConfigError(f"HydraConfig.prune is {self.prune}, but there are {free} heads{where}")
        if self.strategy == "taylor" and self.taylor_scope == "layer" and layers is not None:
            counts = [len(start.base.heads[0][layer]) for layer in layers]
            each, rest = divmod(self.lost, len(counts))
            if rest or min(counts) < each:
                raise ConfigError(
                    f"HydraConfig.prune is {self.prune}, not the same number in each of {len(counts)} layers with "
                    f"{min(counts)} heads or more; use a multiple of {len(counts)}, or taylor_scope='global'"
                )
            choices = math.prod(math.comb(count, each) for count in counts)
        else:
            choices = math.comb(self.pool_size(free) if self.draws_from_pool else free, self.lost)
        if choices < self.pruned_members:
            raise ConfigError(
                f"HydraConfig.prune is {self.prune} of {free} heads{where}: {choices} different choices for "
                f"{self.pruned_members} members; prune another number, make the pool larger, or ask for fewer members"
            )
