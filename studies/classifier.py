"""One seed of a study of classifiers: backbones, rankings, pruned members, and the choice of settings on half B.

ID validation and circuit OOD data are cut in two once, by a seed that is the same for every run. Half A ranks heads.
Half B chooses settings and calibrates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hydra_ensembles import Ensemble, HeadRanking, Prediction, Recipe, finetune, fuse, mc_dropout, prune
from hydra_ensembles import taylor as rank_by_taylor
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.members import (
    CIRCUIT_ORDER,
    Members,
    Score,
    distinct_taylor,
    random_members,
    sampled_members,
)
from hydra_ensembles.metrics import accuracy, auroc
from hydra_ensembles.schema import to_plain

from . import methods
from .engine import SPARE, Group, SeedRun, StudySet, answered, distinct
from .methods import HYDRA, HYDRA_TRUNK, MC_DROPOUT, Candidate, Chosen, Decision, Units, dropout, rate_name
from .recipe import ClassifierRecipe, MemberSet, derived_seed, digest_of
from .results import HELD_OUT, HELD_OUT_OOD
from .samples import ImageSamples, Prepared, SampleBatches, Samples
from .sets import DataFolder, at_most, class_halves, given, halves, suite
from .weights import fresh_classifier, pretrained, tokenizer, with_trunk

BATCH = {"image": 512, "text": 256}
Part = Literal["train", "member_train", "rank_id", "rank_ood", "choose_id", "choose_ood"]
Measured = dict[str, dict[str, float]]  # "method|setting|score" -> accuracy, auroc, cost


class ClassifierData:
    """Training data, halves and test sets of a study, each read when it is first asked for."""

    def __init__(self, recipe: ClassifierRecipe, source: DataFolder, device: torch.device) -> None:
        self.recipe, self.source, self.device = recipe, source, device
        self.suite = suite(recipe.suite)
        self._parts: dict[str, Samples] = {}

    def part(self, name: Part) -> Samples:
        """Training data of backbones or of pruned members; ID or OOD data that rank heads (half A) or choose (B)."""
        counts, (use, _, which) = self.recipe.counts, name.partition("_")
        if name == "member_train" and counts.member_train == counts.train:
            return self.part("train")
        if name not in self._parts:
            if name in ("train", "member_train"):
                dataset, limit = self._train_set, counts.train if name == "train" else counts.member_train
            else:
                first, second = self._halves[which]
                dataset, limit = (first, counts.circuits) if use == "rank" else (second, counts.choose)
            self._parts[name] = self.samples(dataset, limit)
        return self._parts[name]

    def samples(self, dataset: AnyDataset, limit: int | None) -> Samples:
        """So many samples of a set, drawn once, the way the study's backbone takes them."""
        part = at_most(dataset, limit)
        if isinstance(part, ImageDataset):
            return ImageSamples.read(part, self.recipe.input_size, self.device)
        return Prepared(part, tokenizer(self.source.root, self.recipe.input_size))

    def pretrained(self) -> Ensemble:
        """The pretrained model."""
        return pretrained(self.source.root, self.recipe.backbone, self.recipe.input_size, self.classes).to(self.device)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names of the task."""
        return self._train_set.class_names

    @cached_property
    def _train_set(self) -> AnyDataset:
        return self.source.load(given(self.suite, "train"))

    @cached_property
    def _halves(self) -> Mapping[str, tuple[AnyDataset, AnyDataset]]:
        cut = halves if self.recipe.ood_halves == "images" else class_halves
        inside = self.source.load(given(self.suite, "validation"))
        return {"id": halves(inside), "ood": cut(self.source.load(self.suite.circuit_ood))}


class ClassifierRun(SeedRun):
    """Everything that is trained or ranked for one seed."""

    RECORD, RECORD_STAGE = Decision, "choose"

    def __init__(self, recipe: ClassifierRecipe, seed: int, data: ClassifierData, output: Path) -> None:
        super().__init__(recipe, seed, output, data.device)
        self.recipe, self.data, self.output = recipe, data, output
        self._sets = {one.key: one for one in recipe.member_sets}

    @property
    def stages(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "backbones": lambda: [self.backbone(index) for index in range(self.recipe.members)],
            "rank": lambda: [self.heads(self.recipe.paper), self.heads(self.recipe.taylor)],
            "explore": lambda: self.explore() if self.seed in self.recipe.explore_seeds else None,
            "choose": self.choose,
            "members": self.temperatures,
        }

    @property
    def record_path(self) -> Path:
        return self.study / "decision.json"  # one for all seeds

    def methods(self) -> Mapping[str, Units]:
        return methods.all_methods(self.recipe, self.record())

    @property
    def calibrates(self) -> Sequence[str]:
        return list(self.methods())

    @cached_property
    def held_out(self) -> Sequence[StudySet]:
        task, classes = self.data.suite.id.name, self.data.classes
        inside = StudySet(task, HELD_OUT, "id", self.data.part("choose_id"), classes)
        return [inside, StudySet(task, HELD_OUT_OOD, "apart", self.data.part("choose_ood"), classes)]

    def test_sets(self) -> Sequence[StudySet]:
        sets, data, limit = self.data.suite, self.data, self.recipe.counts.test
        groups: dict[Group, tuple[SetRef, ...]] = {"id": (sets.id,), "near": sets.near, "far": sets.far}
        groups["apart"] = sets.apart
        return [
            StudySet(sets.id.name, one.name, group, data.samples(data.source.load(one), limit), data.classes)
            for group, references in groups.items()
            for one in references
        ]

    def answers(self, unit: str, sets: Sequence[StudySet]) -> dict[str, Tensor]:
        model, size = self.model(unit), BATCH[self.recipe.inputs]
        return {one.place: answered(model, one.samples, size, self.device).cpu() for one in sets}

    def whole_model(self, method: str, units: Units) -> Any:
        members = [self.model(unit) for unit in units]
        if len(members) == 1:
            return members[0]
        return Ensemble.stack(members) if method == methods.DEEP else fuse(members, mlp="separate")

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        decision = self.record()
        shared = {
            "decision": {"digest": digest_of(decision), "decision": to_plain(decision)},
            "scores": dict(decision.scores),
            "samples": {name: len(self.data.part(name)) for name in get_args(Part)},
        }
        return shared, {}

    def model(self, unit: str) -> Any:
        """The model behind a unit, on the device and in evaluation mode."""
        kind, _, rest = unit.partition("/")
        count = range(self.recipe.members)
        match kind:
            case "backbone":
                return self.backbone(int(rest))
            case "dropout":
                return mc_dropout(self.base, float(rest), self.recipe.dropout.passes, self.seed)
            case "member":
                key, _, index = rest.rpartition("/")
                return self.member(self._sets[key], int(index))
            case "fused":
                return fuse([self.member(self._sets[rest], index) for index in count])
        assert unit in (methods.AVERAGED, methods.CLASSIFIERS)
        if unit == methods.AVERAGED:
            return fuse([self.backbone(index) for index in count], stem="separate")
        return fuse([self._fresh("classifier", index) for index in count], mlp="separate")

    @cached_property
    def base(self) -> Ensemble:
        """The backbone that is pruned: the single model of this seed."""
        return self.backbone(0)

    def backbone(self, index: int) -> Ensemble:
        """A fine-tuning of the pretrained model of its own: classifier, order and augmentation are this index's."""
        return self._fresh("backbone", index)

    def _fresh(self, kind: Literal["backbone", "classifier"], index: int) -> Ensemble:
        """The pretrained model, or the single one, with a classifier of its own; trained whole, or that alone."""
        seed = derived_seed(self.seed, kind, index)

        def make() -> Ensemble:
            start = fresh_classifier(self._pretrained if kind == "backbone" else self.base, seed)
            return self._finetuned(start, replace(self.recipe.trainings[kind], seed=seed), "train", 0)

        return self.folder.ensemble(f"{kind}s/{index}", make)

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
                return self._finetuned(prune(self.base, heads), training, "member_train", index)
            fresh = fresh_classifier(self._pretrained, derived_seed(self.seed, "member classifier", index))
            return self._finetuned(prune(with_trunk(fresh, self.base, members.trunk), heads), training, "train", index)

        return self.folder.ensemble(f"members/{identity}", make)

    def heads(self, members: MemberSet) -> Members:
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
                return tuple(ranking.first(members.prune) for _, ranking in drawn)
            case "circuits":
                budget = members.prune + SPARE
                return distinct([self.circuit(one, members.trunk, budget) for one in CIRCUIT_ORDER], members.prune)

    def layers(self, trunk: int) -> range:
        """Layers whose heads may be pruned."""
        opened = self.recipe.open_layers
        lowest = 0 if opened is None else self.base.num_layers - opened
        return range(max(trunk, lowest), self.base.num_layers)

    def circuit(self, score: Score, trunk: int, budget: int) -> HeadRanking:
        """A circuit on half A above the trunk."""
        layers, part = self.layers(trunk), self.data.part
        budget = min(budget, sum(len(self.base.heads[0][layer]) for layer in layers))
        return self.extracted(
            f"{score}-trunk{trunk}",
            score,
            budget,
            lambda: (self.base, part("rank_id"), part("rank_ood"), {"layers": layers}),
        )

    def taylor(self, count: int, layers: range, draw: int) -> HeadRanking:
        """A Taylor ranking on batches that this draw chose."""
        assert self.recipe.paper.training is not None
        batch = self.recipe.trainings[self.recipe.paper.training].batch_size or 128
        return self.folder.ranking(
            f"rankings/taylor-{count}-{layers.start}-{draw}",
            lambda: rank_by_taylor(
                self.base,
                SampleBatches(self.data.part("member_train"), batch, training=True),
                budget=count,
                layers=layers,
                seed=derived_seed(self.seed, "taylor", draw),
                calibration_batches=self.recipe.counts.taylor_batches,
            ),
        )

    @cached_property
    def _pretrained(self) -> Ensemble:
        return self.data.pretrained()

    def _finetuned(self, start: Ensemble, training: Recipe, part: Part, index: int) -> Ensemble:
        if self.device.type != "cuda":
            training = replace(training, precision="float32")
        validation = None if training.patience is None else SampleBatches(self.data.part("choose_id"), 256)
        batches = SampleBatches(self.data.part(part), training.batch_size or 128, training=True)
        return finetune(start, batches, training, validation, index=index, progress=False)

    def explore(self) -> Measured:
        """Measure every candidate and every fixed method on half B, with every score; no test set is in reach."""

        def make() -> Measured:
            recipe = self.recipe
            found: Measured = {}
            for method, units in methods.fixed_methods(recipe).items():
                found |= self._measured(f"{method}|", units, {})
            for rate in recipe.dropout.rates:
                found |= self._measured(f"{MC_DROPOUT}|{rate_name(rate)}", (dropout(rate),), {})
            for method, one in candidates(recipe):
                members = [self.member(one.members, index) for index in range(recipe.members)]
                cost = fuse(members, mlp="separate").describe().multiply_adds / self.base.describe().multiply_adds
                units = one.members.units(one.mlp, recipe.members)
                found |= self._measured(f"{method}|{one.name}", units, {"cost": cost})
            return found

        return dict(self.folder.json("explored", make))

    def _measured(self, name: str, units: Units, cost: dict[str, float]) -> Measured:
        logits = self.half_b(*units)
        inside, outside = (Prediction.from_logits(logits[one.place]) for one in self.held_out)
        right = accuracy(inside.probs, self.held_out_labels)
        return {
            f"{name}|{score}": {"accuracy": right, "auroc": auroc(inside.score(score), outside.score(score)), **cost}
            for score in self.recipe.scores
            if score != "mutual_information" or inside.members > 1  # of one member it is zero, whatever the input
        }

    def choose(self) -> None:
        """Seal the decision, once every explored seed has been measured; other seeds make what needs no decision."""
        if self.seed not in self.recipe.explore_seeds:
            for unit in methods.all_units(methods.fixed_methods(self.recipe)):
                self.half_b(unit)
        if self.record_path.exists():
            return
        measured = []
        for seed in self.recipe.explore_seeds:
            run = self if seed == self.seed else ClassifierRun(self.recipe, seed, self.data, self.output)
            if not run.folder.has("explored.json"):
                raise DataError(f"seed {seed} of {self.recipe.name} has not been explored; run its stage `explore`")
            measured.append(run.explore())
        self.seal(decide(self.recipe, measured))


def candidates(recipe: ClassifierRecipe) -> list[tuple[str, Chosen]]:
    """Every setting that may become a method."""
    pairs = [(HYDRA, one) for one in recipe.explore] + [(HYDRA_TRUNK, one) for one in recipe.explore_trunk]
    return [(method, Chosen(one, mlp)) for method, one in pairs for mlp in recipe.fusions]


def decide(recipe: ClassifierRecipe, measured: list[Measured]) -> Decision:
    """Choose settings and scores by the mean of ID accuracy and OOD AUROC, over the explored seeds."""
    compared: dict[str, list[Candidate]] = {}
    for key in measured[0]:
        method, model, score = key.split("|")
        right, apart = (sum(one[key][name] for one in measured) / len(measured) for name in ("accuracy", "auroc"))
        cost = measured[0][key].get("cost")
        found = Candidate(method, model, score, right, apart, 0.5 * right + 0.5 * apart, cost)  # type: ignore[arg-type]
        compared.setdefault(method, []).append(found)
    trunks = compared[HYDRA_TRUNK]  # those that are cheap enough, or the cheapest
    most = max(recipe.trunk_cost, min(one.cost or 0.0 for one in trunks))
    open_to = {**compared, HYDRA_TRUNK: [one for one in trunks if (one.cost or 0.0) <= most]}
    best = {method: max(found, key=lambda one: one.value) for method, found in open_to.items()}  # equal: the first
    settings = {(method, one.name): one for method, one in candidates(recipe)}
    return Decision(
        recipe=digest_of(recipe),
        seeds=recipe.explore_seeds,
        hydra=settings[HYDRA, best[HYDRA].model],
        trunk=settings[HYDRA_TRUNK, best[HYDRA_TRUNK].model],
        dropout=next(rate for rate in recipe.dropout.rates if best[MC_DROPOUT].model == rate_name(rate)),
        scores={method: one.score for method, one in best.items()},
        candidates=tuple(one for found in compared.values() for one in found),
    )
