"""One seed of a study of classifiers: backbones, rankings, pruned members, and the choice of settings on half B.

ID validation and circuit OOD data are cut in two once, by a seed that is the same for every run. Half A ranks heads.
Half B chooses settings and calibrates.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles import (
    Ensemble,
    HeadRanking,
    Prediction,
    Recipe,
    extract_circuit,
    finetune,
    fuse,
    mc_dropout,
    prune,
)
from hydra_ensembles import taylor as rank_by_taylor
from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.members import distinct_taylor, random_members, sampled_members, taylor_members
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.metrics import accuracy, auroc
from hydra_ensembles.schema import to_plain

from .engine import (
    CIRCUIT_BATCH,
    CIRCUIT_SCORES,
    SPARE,
    Group,
    SeedRun,
    TestSet,
    TestSets,
    TestTask,
    distinct,
    member_logits,
    seal,
)
from .methods import (
    AVERAGED,
    CLASSIFIERS,
    DEEP,
    HYDRA,
    HYDRA_TRUNK,
    MC_DROPOUT,
    Candidate,
    Chosen,
    Decision,
    Units,
    all_methods,
    all_units,
    dropout,
    fixed_methods,
    rate_name,
)
from .recipe import ClassifierRecipe, MemberSet, derived_seed, digest_of
from .results import HELD_OUT, HELD_OUT_OOD
from .samples import ImageSamples, SampleBatches, Samples, TextSamples
from .sets import DataFolder, at_most, class_halves, halves, suite
from .weights import fresh_classifier, pretrained, tokenizer, with_trunk

BATCH = {"image": 512, "text": 256}
Measured = dict[str, dict[str, float]]  # "method|setting|score" -> accuracy, auroc, cost


class ClassifierData:
    """Training data, halves and test sets of a study, each read when it is first asked for."""

    def __init__(self, recipe: ClassifierRecipe, source: DataFolder, device: torch.device) -> None:
        self.recipe, self.source, self.device = recipe, source, device
        self.suite = suite(recipe.suite)

    def samples(self, dataset: AnyDataset, limit: int | None) -> Samples:
        """So many samples of a set, drawn once, the way the study's backbone takes them."""
        part = at_most(dataset, limit)
        if isinstance(part, ImageDataset):
            return ImageSamples.read(part, self.recipe.input_size, self.device)
        return TextSamples.read(part, self._tokenizer, self.device)

    def pretrained(self) -> Ensemble:
        """The pretrained model."""
        return pretrained(self.source.root, self.recipe.backbone, self.recipe.input_size, self.classes).to(self.device)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names of the task."""
        return self._train_set.class_names

    @cached_property
    def train(self) -> Samples:
        """Training data of the backbones."""
        return self.samples(self._train_set, self.recipe.counts.train)

    @cached_property
    def member_train(self) -> Samples:
        """Training data of pruned members."""
        counts = self.recipe.counts
        return self.train if counts.member_train == counts.train else self.samples(self._train_set, counts.member_train)

    @cached_property
    def rank_id(self) -> Samples:
        """ID samples that rank heads (half A)."""
        return self.samples(self._id_halves[0], self.recipe.counts.circuits)

    @cached_property
    def rank_ood(self) -> Samples:
        """OOD samples that rank heads (half A)."""
        return self.samples(self._ood_halves[0], self.recipe.counts.circuits)

    @cached_property
    def choose_id(self) -> Samples:
        """ID samples that choose and calibrate (half B)."""
        return self.samples(self._id_halves[1], self.recipe.counts.choose)

    @cached_property
    def choose_ood(self) -> Samples:
        """OOD samples that choose (half B)."""
        return self.samples(self._ood_halves[1], self.recipe.counts.choose)

    @cached_property
    def _train_set(self) -> AnyDataset:
        return self.source.load(_given(self.suite.train, self.recipe.suite))

    @cached_property
    def _id_halves(self) -> tuple[AnyDataset, AnyDataset]:
        return halves(self.source.load(_given(self.suite.validation, self.recipe.suite)))

    @cached_property
    def _ood_halves(self) -> tuple[AnyDataset, AnyDataset]:
        whole = self.source.load(self.suite.circuit_ood)
        return halves(whole) if self.recipe.ood_halves == "images" else class_halves(whole)

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer(self.source.root, self.recipe.input_size)


def _given(reference: SetRef | None, name: str) -> SetRef:
    if reference is None:
        raise DataError(f"suite {name!r} has no training or validation set")
    return reference


class ClassifierRun(SeedRun):
    """Everything that is trained or ranked for one seed."""

    RECORD, RECORD_STAGE = Decision, "choose"

    def __init__(self, recipe: ClassifierRecipe, seed: int, data: ClassifierData, output: Path) -> None:
        super().__init__(recipe, seed, output, data.device)
        self.recipe, self.data, self.output = recipe, data, output
        self._sets = {one.key: one for one in recipe.member_sets}

    @property
    def stages(self) -> Mapping[str, Callable[[], Any]]:
        """Backbones, rankings, what is measured on half B, the decision, and all members it needs."""
        return {
            "backbones": lambda: [self.backbone(index) for index in range(self.recipe.members)],
            "rank": lambda: [self.heads(self.recipe.paper), self.heads(self.recipe.taylor)],
            "explore": lambda: self.explore() if self.seed in self.recipe.explore_seeds else None,
            "choose": self.choose,
            "members": self.temperatures,
        }

    @property
    def record_path(self) -> Path:
        """One decision for all seeds."""
        return self.study / "decision.json"

    def methods(self) -> Mapping[str, Units]:
        """Every method with its units."""
        return all_methods(self.recipe, self.record())

    @cached_property
    def held_out(self) -> TestSets:
        """ID and OOD data of half B."""
        task = self.data.suite.id.name
        sets = [TestSet(task, HELD_OUT, "id", self.data.choose_id)]
        sets.append(TestSet(task, HELD_OUT_OOD, "apart", self.data.choose_ood))
        return TestSets({task: TestTask(None, self.data.classes)}, sets)

    def test_sets(self) -> TestSets:
        """The ID test set and every OOD set."""
        sets, source, limit = self.data.suite, self.data.source, self.recipe.counts.test
        groups: dict[Group, tuple[SetRef, ...]] = {"id": (sets.id,), "near": sets.near, "far": sets.far}
        groups["apart"] = sets.apart
        found = [
            TestSet(sets.id.name, one.name, group, self.data.samples(source.load(one), limit))
            for group, references in groups.items()
            for one in references
        ]
        return TestSets({sets.id.name: TestTask(None, self.data.classes)}, found)

    def answers(self, unit: str, sets: TestSets) -> dict[str, Tensor]:
        """Member logits of a unit on every set."""
        model, size = self.model(unit), BATCH[self.recipe.inputs]
        return {f"{one.task}/{one.name}": member_logits(model, one.samples, size, self.device) for one in sets.sets}

    def whole_model(self, method: str, units: Units) -> Any:
        """A method as one model."""
        members = [self.model(unit) for unit in units]
        if len(members) == 1:
            return members[0]
        return Ensemble.stack(members) if method == DEEP else fuse(members, mlp="separate")

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The decision, the scores it chose, and how many samples each part has."""
        decision = self.record()
        parts = ("train", "member_train", "rank_id", "rank_ood", "choose_id", "choose_ood")
        shared = {
            "decision": {"digest": digest_of(decision), "decision": to_plain(decision)},
            "scores": dict(decision.scores),
            "samples": {name: len(getattr(self.data, name)) for name in parts},
        }
        return shared, {}

    def model(self, unit: str) -> Any:
        """The model behind a unit, on the device and in evaluation mode."""
        kind, _, rest = unit.partition("/")
        count = range(self.recipe.members)
        if kind == "backbone":
            return self.backbone(int(rest))
        if kind == "dropout":
            return mc_dropout(self.base, float(rest), self.recipe.dropout.passes, self.seed)
        if unit == AVERAGED:
            return fuse([self.backbone(index) for index in count], stem="separate")
        if unit == CLASSIFIERS:
            return fuse([self.classifier(index) for index in count], mlp="separate")
        if kind == "member":
            key, _, index = rest.rpartition("/")
            return self.member(self._sets[key], int(index))
        return fuse([self.member(self._sets[rest], index) for index in count])

    @cached_property
    def base(self) -> Ensemble:
        """The backbone that is pruned: the single model of this seed."""
        return self.backbone(0)

    def backbone(self, index: int) -> Ensemble:
        """A fine-tuning of the pretrained model of its own: classifier, order and augmentation are this index's."""
        seed = derived_seed(self.seed, "backbone", index)
        training = replace(self.recipe.trainings["backbone"], seed=seed)
        return self.folder.ensemble(
            f"backbones/{index}",
            lambda: self._finetuned(fresh_classifier(self._pretrained, seed), training, self.data.train, 0),
        )

    def classifier(self, index: int) -> Ensemble:
        """The single model with a classifier of its own, trained while all else is frozen."""
        seed = derived_seed(self.seed, "classifier", index)
        training = replace(self.recipe.trainings["classifier"], seed=seed)
        return self.folder.ensemble(
            f"classifiers/{index}",
            lambda: self._finetuned(fresh_classifier(self.base, seed), training, self.data.train, 0),
        )

    def member(self, members: MemberSet, index: int) -> Ensemble:
        """One member, pruned and fine-tuned; the folder is named by its heads and its training."""
        heads = self.heads(members)[index]
        if members.training is None:
            return prune(self.base, heads)
        training = replace(self.recipe.trainings[members.training], seed=derived_seed(self.seed, "members"))
        if members.trunk:
            training = replace(training, last_blocks=self.base.num_layers - members.trunk)
        identity = digest_of([[str(head) for head in sorted(heads)], to_plain(training), index, members.start])

        def make() -> Ensemble:
            if members.start == "finetuned":
                return self._finetuned(prune(self.base, heads), training, self.data.member_train, index)
            fresh = fresh_classifier(self._pretrained, derived_seed(self.seed, "member classifier", index))
            start = prune(with_trunk(fresh, self.base, members.trunk), heads)
            return self._finetuned(start, training, self.data.train, index)

        return self.folder.ensemble(f"members/{identity}", make)

    def heads(self, members: MemberSet) -> tuple[tuple[Head, ...], ...]:
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
                drawn = distinct_taylor(lambda draw: self.taylor(members.prune, layers, draw), members.prune, count)
                return taylor_members([ranking for _, ranking in drawn], members.prune)
            case "circuits":
                budget = members.prune + SPARE
                return distinct([self.circuit(one, members.trunk, budget) for one in CIRCUIT_SCORES], members.prune)

    def layers(self, trunk: int) -> range:
        """Layers whose heads may be pruned."""
        opened = self.recipe.open_layers
        lowest = 0 if opened is None else self.base.num_layers - opened
        return range(max(trunk, lowest), self.base.num_layers)

    def circuit(self, score: Score, trunk: int, budget: int) -> HeadRanking:
        """A circuit on half A above the trunk; a longer one goes on where a shorter one ended."""
        budget = min(budget, sum(len(self.base.heads[0][layer]) for layer in self.layers(trunk)))
        return self.folder.ranking(
            f"rankings/{score}-trunk{trunk}-{budget}",
            lambda: extract_circuit(
                self.base,
                SampleBatches(self.data.rank_id, CIRCUIT_BATCH),
                SampleBatches(self.data.rank_ood, CIRCUIT_BATCH),
                score=score,
                budget=budget,
                layers=self.layers(trunk),
                journal=self.folder.place(f"rankings/{score}-trunk{trunk}.journal"),
                progress=False,
            ),
        )

    def taylor(self, count: int, layers: range, draw: int) -> HeadRanking:
        """A Taylor ranking on batches that this draw chose."""
        assert self.recipe.paper.training is not None
        batch = self.recipe.trainings[self.recipe.paper.training].batch_size or 128
        return self.folder.ranking(
            f"rankings/taylor-{count}-{layers.start}-{draw}",
            lambda: rank_by_taylor(
                self.base,
                SampleBatches(self.data.member_train, batch, training=True),
                budget=count,
                layers=layers,
                seed=derived_seed(self.seed, "taylor", draw),
                calibration_batches=self.recipe.counts.taylor_batches,
            ),
        )

    @cached_property
    def _pretrained(self) -> Ensemble:
        return self.data.pretrained()

    def _finetuned(self, start: Ensemble, training: Recipe, samples: Samples, index: int) -> Ensemble:
        if self.device.type != "cuda":
            training = replace(training, precision="float32")
        validation = None if training.patience is None else SampleBatches(self.data.choose_id, 256)
        batches = SampleBatches(samples, training.batch_size or 128, training=True)
        return finetune(start, batches, training, validation, index=index, progress=False)

    def explore(self) -> Measured:
        """Measure every candidate and every fixed method on half B, with every score; no test set is in reach."""
        return dict(self.folder.json("explored", self._explore))

    def _explore(self) -> Measured:
        recipe = self.recipe
        found: Measured = {}
        for method, units in fixed_methods(recipe).items():
            found |= self._measured(f"{method}|", units, {})
        for rate in recipe.dropout.rates:
            found |= self._measured(f"{MC_DROPOUT}|{rate_name(rate)}", (dropout(rate),), {})
        for method, one in candidates(recipe):
            members = [self.member(one.members, index) for index in range(recipe.members)]
            cost = fuse(members, mlp="separate").describe().multiply_adds / self.base.describe().multiply_adds
            units = one.members.units(one.mlp, recipe.members)
            found |= self._measured(f"{method}|{one.name}", units, {"cost": cost})
        return found

    def _measured(self, name: str, units: Units, cost: dict[str, float]) -> Measured:
        logits = self.half_b(units)
        inside, outside = (
            Prediction.from_logits(logits[f"{self.data.suite.id.name}/{part}"]) for part in (HELD_OUT, HELD_OUT_OOD)
        )
        right = accuracy(inside.probs, self.held_out_labels)
        return {
            f"{name}|{score}": {"accuracy": right, "auroc": auroc(inside.score(score), outside.score(score)), **cost}
            for score in self.recipe.scores
            if score != "mutual_information" or inside.members > 1  # of one member it is zero, whatever the input
        }

    def choose(self) -> None:
        """Seal the decision, once every explored seed has been measured; other seeds make what needs no decision.

        Raises:
            DataError: A seed has not been explored yet.
        """
        if self.seed not in self.recipe.explore_seeds:
            for unit in all_units(fixed_methods(self.recipe)):
                self.half_b((unit,))
        if self.record_path.exists():
            return
        measured = []
        for seed in self.recipe.explore_seeds:
            run = self if seed == self.seed else ClassifierRun(self.recipe, seed, self.data, self.output)
            if not run.folder.has("explored.json"):
                raise DataError(
                    f"seed {seed} of {self.recipe.name} has not been explored; run its stage `explore` first"
                )
            measured.append(run.explore())
        seal(decide(self.recipe, measured), self.record_path)


def candidates(recipe: ClassifierRecipe) -> list[tuple[str, Chosen]]:
    """Every setting that may become a method."""
    pairs = [(HYDRA, one) for one in recipe.explore] + [(HYDRA_TRUNK, one) for one in recipe.explore_trunk]
    return [(method, Chosen(one, mlp)) for method, one in pairs for mlp in recipe.fusions]


def decide(recipe: ClassifierRecipe, measured: list[Measured]) -> Decision:
    """Choose settings and scores by the weighted mean of ID accuracy and OOD AUROC, over the explored seeds."""
    compared = []
    for key in measured[0]:
        method, model, score = key.split("|")
        parts = [one[key] for one in measured]
        right, apart = (sum(part[name] for part in parts) / len(parts) for name in ("accuracy", "auroc"))
        value = recipe.accuracy_weight * right + (1 - recipe.accuracy_weight) * apart
        cost = parts[0].get("cost")
        compared.append(Candidate(method, model, score, right, apart, value, cost))  # type: ignore[arg-type]
    settings = {(method, one.name): one for method, one in candidates(recipe)}
    best = {
        method: _best([one for one in compared if one.method == method], recipe, method)
        for method in dict.fromkeys(one.method for one in compared)
    }
    return Decision(
        recipe=digest_of(recipe),
        seeds=recipe.explore_seeds,
        hydra=settings[HYDRA, best[HYDRA].model],
        trunk=settings[HYDRA_TRUNK, best[HYDRA_TRUNK].model],
        dropout=next(rate for rate in recipe.dropout.rates if best[MC_DROPOUT].model == rate_name(rate)),
        scores={method: one.score for method, one in best.items()},
        candidates=tuple(compared),
    )


def _best(found: list[Candidate], recipe: ClassifierRecipe, method: str) -> Candidate:
    """The candidate with the highest value; of a trunk, among those that are cheap enough (or the cheapest)."""
    if method == HYDRA_TRUNK:
        cheapest = min(one.cost or 0.0 for one in found)
        found = [one for one in found if (one.cost or 0.0) <= max(recipe.trunk_cost, cheapest)]
    return max(found, key=lambda one: one.value)  # equal: the first in the recipe's order
