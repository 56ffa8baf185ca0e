"""The models of one seed, made when they are first needed: backbones, rankings, pruned members, ensembles."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from hydra_ensembles._utils import derive_seed
from hydra_ensembles.baselines.mc_dropout import mc_dropout
from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.circuit.search import fast_products
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.fuse import fuse
from hydra_ensembles.heads.members import random_members, sampled_members
from hydra_ensembles.heads.ranking import Head, HeadRanking
from hydra_ensembles.heads.taylor import taylor
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.members import place_of
from hydra_ensembles.prune import prune
from hydra_ensembles.schema import to_plain
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

from .recipe import StudyRecipe, digest_of
from .seed_folder import SeedFolder
from .specs import AVERAGED, CLASSIFIERS, MemberSet
from .splits import Samples, StudyData

CIRCUITS: tuple[Score, ...] = ("avg", "acc", "ood")
CIRCUIT_BATCH = 100
CIRCUIT_MEMORY = 4 << 30  # bytes of activations on a GPU, which several seeds share
SPARE = 2  # heads ranked beyond those pruned, for circuits that would otherwise be equal
TAYLOR_DRAWS = 4  # rankings made per member before giving up on members that differ
_SEEDS = 1 << 31

Heads = tuple[tuple[Head, ...], ...]


class SeedModels:
    """Everything that is trained or ranked for one seed."""

    def __init__(self, recipe: StudyRecipe, seed: int, data: StudyData, folder: SeedFolder) -> None:
        self.recipe, self.seed, self.data, self.folder = recipe, seed, data, folder
        self.device = data.reader.device

    def model(self, unit: str) -> nn.Module:
        """The model behind a unit, on the device and in evaluation mode."""
        kind, _, rest = unit.partition("/")
        if kind == "backbone":
            return self.backbone(int(rest))
        if kind == "dropout":
            return mc_dropout(self.base, float(rest), self.recipe.dropout.passes, self.seed)
        if unit == AVERAGED:
            return fuse([self.backbone(index) for index in range(self.recipe.members)], stem="separate")
        if unit == CLASSIFIERS:
            return fuse([self.classifier(index) for index in range(self.recipe.members)], mlp="separate")
        key, _, index = rest.rpartition("/") if kind == "member" else (rest, "", "")
        members = self._sets[key]
        if kind == "member":
            return self.member(members, int(index))
        return fuse([self.member(members, index) for index in range(self.recipe.members)])

    @cached_property
    def _sets(self) -> Mapping[str, MemberSet]:
        return {one.key: one for one in self.recipe.member_sets}

    @cached_property
    def base(self) -> Ensemble:
        """The backbone that is pruned: the single model of this seed."""
        return self.backbone(0)

    def backbone(self, index: int) -> Ensemble:
        """A fine-tuning of the pretrained model of its own: classifier, order and augmentation are this index's."""
        seed = derive_seed(self.seed, "backbone", index) % _SEEDS
        start = self._pretrained
        start = fresh_classifier(start, seed)
        training = replace(self.training("backbone"), seed=seed)

        def make() -> dict[str, Tensor]:
            return self._finetuned(start, training, self.data.train, 0).state_dict()

        state = self.folder.tensors(f"backbones/{index}", make, self.device)
        return Ensemble.from_state(start.config, state, start.metadata)

    def classifier(self, index: int) -> Ensemble:
        """The single model with a classifier of its own, trained while all else is frozen."""
        seed = derive_seed(self.seed, "classifier", index) % _SEEDS
        start = fresh_classifier(self.base, seed)
        training = replace(self.training("classifier"), seed=seed)

        def make() -> dict[str, Tensor]:
            return self._finetuned(start, training, self.data.train, 0).state_dict()

        state = self.folder.tensors(f"classifiers/{index}", make, self.device)
        return Ensemble.from_state(start.config, state, start.metadata)

    def member(self, members: MemberSet, index: int) -> Ensemble:
        """One member, pruned and fine-tuned; the file is named by its heads and its training."""
        heads = self.heads(members)[index]
        samples = self.data.member_train
        if members.start == "finetuned":
            start = prune(self.base, heads)
        else:
            seed = derive_seed(self.seed, "member classifier", index) % _SEEDS
            fresh = with_trunk(fresh_classifier(self._pretrained, seed), self.base, members.trunk)
            start, samples = prune(fresh, heads), self.data.train
        if members.training is None:
            return start
        training = replace(self.training(members.training), seed=derive_seed(self.seed, "members") % _SEEDS)
        if members.trunk:
            training = replace(training, last_blocks=self.base.num_layers - members.trunk)
        identity = digest_of([[str(head) for head in sorted(heads)], to_plain(training), index, members.start])

        def make() -> dict[str, Tensor]:
            return self._finetuned(start, training, samples, index).state_dict()

        state = self.folder.tensors(f"members/{identity}", make, self.device)
        return Ensemble.from_state(start.config, state, start.metadata)

    def training(self, name: str) -> Recipe:
        """A training of the recipe as this device can do it."""
        training = self.recipe.trainings[name]
        return training if self.device.type == "cuda" else replace(training, precision="float32")

    def heads(self, members: MemberSet) -> Heads:
        """What each member loses."""
        count, layers = self.recipe.members, self.layers(members.trunk)
        match members.heads:
            case "random":
                return random_members(self.base, members.prune, count, self.seed, layers)
            case "sampled":
                assert members.pool is not None
                ranking = self.circuit("avg", members.trunk, members.pool)
                return sampled_members(ranking, members.prune, members.pool, count, self.seed)
            case "taylor":
                return self._taylor(members, layers)
            case "circuits":
                return distinct(
                    [self.circuit(s, members.trunk, members.prune + SPARE) for s in CIRCUITS], members.prune
                )

    def layers(self, trunk: int) -> range:
        """Layers whose heads may be pruned."""
        opened = self.recipe.open_layers
        lowest = 0 if opened is None else self.base.num_layers - opened
        return range(max(trunk, lowest), self.base.num_layers)

    def circuit(self, score: Score, trunk: int, budget: int) -> HeadRanking:
        """A circuit on half A above the trunk; a longer one goes on where a shorter one ended."""
        budget = min(budget, sum(len(self.base.heads[0][layer]) for layer in self.layers(trunk)))

        def make(place: Path) -> HeadRanking:
            with fast_products(self.device):
                return extract_circuit(
                    self.base,
                    self.data.rank_id.evaluation(CIRCUIT_BATCH),
                    self.data.rank_ood.evaluation(CIRCUIT_BATCH),
                    score=score,
                    budget=budget,
                    layers=self.layers(trunk),
                    max_memory=CIRCUIT_MEMORY if self.device.type == "cuda" else None,
                    journal=place / f"{score}-trunk{trunk}.journal",
                    progress=False,
                )

        return self.folder.ranking(f"{score}-trunk{trunk}-{budget}", make)

    def _taylor(self, members: MemberSet, layers: range) -> Heads:
        """One ranking for each member; a seed that repeats an earlier member's heads is passed over."""
        chosen: list[tuple[Head, ...]] = []
        for draw in range(self.recipe.members * TAYLOR_DRAWS):
            ranking = self._taylor_ranking(members.prune, layers, draw)
            heads = ranking.first(members.prune)
            if all(set(heads) != set(other) for other in chosen):
                chosen.append(heads)
            if len(chosen) == self.recipe.members:
                return tuple(chosen)
        raise ConfigError(
            f"Taylor rankings of {self.recipe.members * TAYLOR_DRAWS} draws gave only {len(chosen)} different choices "
            "of heads; lower counts.taylor_batches"
        )

    def _taylor_ranking(self, count: int, layers: range, draw: int) -> HeadRanking:
        batch = self.training("standard").batch_size or 128

        def make(place: Path) -> HeadRanking:
            return taylor(
                self.base,
                self.data.member_train.training(batch),
                budget=count,
                layers=layers,
                seed=derive_seed(self.seed, "taylor", draw) % _SEEDS,
                calibration_batches=self.recipe.counts.taylor_batches,
            )

        return self.folder.ranking(f"taylor-{count}-{layers.start}-{draw}", make)

    @cached_property
    def _pretrained(self) -> Ensemble:
        recipe = self.recipe
        model = self.data.store.backbone(recipe.backbone, recipe.input_size, self.data.classes, seed=0)
        return model.to(self.device)

    def _finetuned(self, start: Ensemble, training: Recipe, samples: Samples, index: int) -> Ensemble:
        validation = None if training.patience is None else self.data.choose_id.evaluation(256)
        batches = samples.training(training.batch_size or 128)
        return finetune(start, batches, training, validation, index=index, progress=False)


def fresh_classifier(start: Ensemble, seed: int) -> Ensemble:
    """A copy whose classifier is drawn anew."""
    state = dict(start.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if name == "readout.classifier.weight":
            state[name] = (0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor)
        elif name == "readout.classifier.bias":
            state[name] = torch.zeros_like(tensor)
    return Ensemble.from_state(start.config, state, start.metadata)


def with_trunk(model: Ensemble, trunk: Ensemble, layers: int) -> Ensemble:
    """A copy whose stem and first layers are those of another model; the model as it is without any such layers."""
    if not layers:
        return model
    state = dict(model.state_dict())
    for name, tensor in trunk.state_dict().items():
        group, layer = place_of(name)
        if group == "stem" or (layer is not None and layer < layers):
            state[name] = tensor
    return Ensemble.from_state(model.config, state, model.metadata)


def distinct(rankings: list[HeadRanking], count: int) -> Heads:
    """The first heads of each ranking; one that would repeat an earlier member goes a head further for its last."""
    chosen: list[tuple[Head, ...]] = []
    for ranking in rankings:
        for last in range(count - 1, len(ranking)):
            heads = (*ranking.heads[: count - 1], ranking.heads[last])
            if all(set(heads) != set(other) for other in chosen):
                chosen.append(heads)
                break
        else:
            raise ConfigError(f"the circuits remove the same {count} heads of {len(ranking)}; prune another number")
    return tuple(chosen)
