"""One seed of a zero-shot study: its dual encoder, circuits of both towers, pruned members and tuned text sides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import DualEncoder, HeadRanking
from hydra_ensembles.batches import move
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.files import read_json
from hydra_ensembles.heads.members import CIRCUIT_ORDER, Members, Score, circuit_members, random_members
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.dual_encoder import Tower
from hydra_ensembles.model.zero_shot import DEFAULT_TEMPLATES, class_embeddings
from hydra_ensembles.schema import from_plain, to_plain

from .captions import (
    FEATURE_BATCH,
    Pairs,
    TrainImages,
    accuracy_by_names,
    cut_by_names,
    read_train_images,
    train_dual,
    view_features,
)
from .dual_recipe import DualChoice, DualRecipe
from .samples import ImageSamples, Prepared, SampleBatches, Samples
from .seed_folder import RANKED, Model, SeedFolder, derived_seed
from .sets import SEEN, CircuitImages, DataFolder, PaperSets, SharedSets, at_most, read_yaml
from .weights import load_dual, untrained_dual

BATCH, CIRCUIT_BATCH = 500, 100
SPARE = 2  # extra ranked heads, used where circuits would otherwise be equal
TOWERS: Mapping[str, tuple[Tower, ...]] = {"image+text": ("image", "text"), "image": ("image",)}
CHOICE = "choice.json"  # training settings chosen for the study's dual encoder
OWN_NAME = "DINOv2 ViT-S/14 + MiniLM-L6"
Group = Literal["id", "near", "far"]


@dataclass(frozen=True, eq=False)
class ZeroSet:
    """A set that methods are evaluated on."""

    task: str  # whose classes are used; the test set of a task has its name
    name: str
    group: Group
    samples: Samples
    classes: tuple[str, ...]  # names of the task's classes
    domain: str | None = None  # of test sets: `seen` or `unseen`


# --- families of members ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Members of one kind: how their heads are chosen, and whether their text sides are trained after pruning.

    `circuits` uses circuits of both towers, `more` prunes more heads by them, `image` uses circuits of the image tower.
    """

    name: str  # in file names
    heads: Literal["none", "taylor", "circuits", "more", "image", "random"]
    members: int = 3
    tuned: bool = False


# --- the dual encoder ------------------------------------------------------------------------------------------------


class DualTask:
    """What all seeds of a zero-shot study share: its images, and its dual encoder's training (or the user's model)."""

    def __init__(self, recipe: DualRecipe, source: DataFolder, device: torch.device) -> None:
        self.name, self.recipe, self.source, self.device = recipe.name, recipe, source, device
        shared = recipe.suite == "shared"
        self.sets = SharedSets(source, recipe.counts) if shared else PaperSets(source.root, recipe.counts)

    @property
    def given(self) -> tuple[Any, ...]:
        """The constructor's arguments, for other processes."""
        return self.recipe, self.source, self.device

    def seeds_of(self, _: str) -> tuple[int, ...]:
        """The seeds of a row in the report: the same for every row."""
        return self.recipe.seeds

    def about(self) -> dict[str, str]:
        """The model's name and description in the results."""
        texts = read_yaml("texts")
        model = self.recipe.model
        size = self.recipe.input_size
        if model is None:
            counts = {"images": f"{sum(len(part.samples) for part in self.images):,}", "size": size}
            counts["captions"] = f"{sum(len(captions) for part in self.images for captions in part.captions):,}"
            counts["names"] = f"{len({name for part in self.images for name in part.names}):,}"
            return {"name": OWN_NAME, "description": texts["own"].format_map(counts)}
        name = Path(model).name if Path(model).expanduser().is_dir() else model
        return {"name": name, "description": texts["given"].format(name=name)}

    def samples(self, images: ImageDataset) -> Samples:
        """Images as inputs of the image tower."""
        if self.recipe.model is not None:
            return Prepared(images, self.own.image.prepare)
        return ImageSamples.read(images, self.recipe.input_size, self.device)

    def untrained(self, seed: int) -> DualEncoder:
        """Both towers before training, with the projections that this seed draws."""
        return untrained_dual(self.source.root, self.recipe.input_size, seed)

    def trained(self, seed: int, choice: DualChoice | None) -> DualEncoder:
        """The model of one seed, trained with a choice of the recipe."""
        if self.recipe.model is not None or choice is None:
            return self.own
        return self._trained(seed, choice, self.images, self.features)

    def _trained(
        self, seed: int, choice: DualChoice, images: Sequence[TrainImages], features: Sequence[Tensor]
    ) -> DualEncoder:
        assert self.recipe.dual is not None  # the recipe checks this
        rate = choice.learning_rate
        number = derived_seed(seed, "dual")
        training = replace(self.recipe.dual, steps=choice.steps, learning_rate=rate, seed=number)
        pairs = Pairs(images, features, training.batch_size or FEATURE_BATCH)
        rates: dict[str, Any] = {"train_image_projection": True, "projection_rate": choice.projection_rate}
        return train_dual(self.untrained(seed).to(self.device), training, pairs, **rates)

    def measured(self, seed: int) -> list[dict[str, Any]]:
        """The accuracy on held-out names of every choice."""
        images, features, held_out = cut_by_names(self.images, self.features)
        results = []
        for choice in self.recipe.choices:
            dual = self._trained(seed, choice, images, features)
            results.append({**to_plain(choice), "accuracy": accuracy_by_names(dual, held_out), "names": len(held_out)})
        return results

    def tuned(self, member: DualEncoder, seed: int) -> DualEncoder:
        """A pruned member whose text side was trained with its pruned image tower."""
        if self.recipe.tune is None or self.recipe.model is not None:
            raise ConfigError("the text side cannot be trained: the study has no pairs for this model, or no `tune`")
        training = replace(self.recipe.tune, seed=derived_seed(seed, "tune"))
        return train_dual(member, training, self.pairs(member, training.batch_size or FEATURE_BATCH))

    def pairs(self, dual: DualEncoder, batch_size: int = FEATURE_BATCH) -> Pairs:
        """Some of the pairs, with features of the given image tower."""
        images = self._some_images
        return Pairs(images, [view_features(dual, part.samples, 1) for part in images], batch_size)

    @cached_property
    def own(self) -> DualEncoder:
        """The user's model, the same for every seed."""
        assert self.recipe.model is not None
        return load_dual(self.recipe.model).to(self.device)

    @cached_property
    def images(self) -> Sequence[TrainImages]:
        """Images whose texts train the dual encoder."""
        return self._read(self.recipe.counts.pairs)

    @cached_property
    def _some_images(self) -> Sequence[TrainImages]:
        return self._read(self.recipe.counts.tuned_pairs)

    def _read(self, limit: int | None) -> Sequence[TrainImages]:
        return read_train_images(self.source, self.recipe.pairs, self.recipe.input_size, self.device, limit)

    @cached_property
    def features(self) -> Sequence[Tensor]:
        """Features of the images in all views, the same for all seeds because the image tower is locked."""
        start = self.untrained(0).to(self.device)
        return [view_features(start, part.samples, self.recipe.views) for part in self.images]

    # --- sets --------------------------------------------------------------------------------------------------------

    @cached_property
    def held_out(self) -> ZeroSet:
        """ID images for fitting temperatures: used by no circuit and reported in no table."""
        labelled = self.sets.calibration()
        return ZeroSet(self.sets.main.id.name, "held out", "id", self.samples(labelled.images), labelled.names)

    @cached_property
    def test_sets(self) -> Sequence[ZeroSet]:
        """Every reported set, the test set of a task before its OOD sets; only `dual_study` reads them."""
        sets = self.sets
        counts = self.recipe.counts
        shared = self.sets.name == "shared"
        tests = list[ZeroSet]()
        read = dict[SetRef, Samples]()
        for ref in (*sets.main.tasks, sets.main.id) if shared else (sets.main.id, *sets.main.tasks):
            labelled = sets.fewer(sets.load(ref), ref.name, counts.test)
            domain = "seen" if shared and ref.name in SEEN else "unseen"
            tests.append(ZeroSet(ref.name, ref.name, "id", self.samples(labelled.images), labelled.names, domain))
            if counts.test == counts.detection and counts.classes is None:  # same images when used as an OOD set
                read[ref] = tests[-1].samples
        tasks = {test.task: test for test in tests}
        for task, suite in sets.suites.items():
            groups: dict[Group, tuple[SetRef, ...]] = {"near": suite.near, "far": suite.far}
            for group, references in groups.items():
                for ref in references:
                    if ref not in read:
                        read[ref] = self.samples(at_most(sets.load(ref), counts.detection))
                    tests.append(replace(tasks[task], name=ref.name, group=group, samples=read[ref], domain=None))
        return tests

    @cached_property
    def both_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        """ID images, OOD images and class names for extracting circuits of both towers."""
        return self._circuit_samples(self.sets.circuits(), self.recipe.counts.circuits)

    @cached_property
    def image_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        """The same for circuits of the image tower alone."""
        return self._circuit_samples(self.sets.image_circuits(), None)  # the recipe already limits each task

    def _circuit_samples(self, images: CircuitImages, limit: int | None) -> tuple[Samples, Samples, tuple[str, ...]]:
        inside, outside = (self.samples(at_most(dataset, limit)) for dataset in (images[0].images, images[1]))
        return inside, outside, images[0].names


# --- a seed ----------------------------------------------------------------------------------------------------------


class DualSeed(SeedFolder):
    """Models of one seed of a zero-shot study."""

    def __init__(self, task: DualTask, number: int, output: Path) -> None:
        super().__init__(output / task.name, number, task.device)
        self.task, self.recipe = task, task.recipe
        self.require_same(self.folder / "recipe.json", to_plain(self.recipe))

    def kept(self, name: str, make: Callable[[], Model]) -> Model:
        """A model by name, loaded once."""
        return self.once(("model", name), lambda: super(DualSeed, self).kept(name, make))

    @property
    def dual(self) -> DualEncoder:
        """The model of this seed: one member with all heads."""
        return self.kept("dual", lambda: self.task.trained(self.number, self.choice))

    @property
    def choice(self) -> DualChoice | None:
        """Training settings: chosen on held-out names if the recipe has several."""
        choices = self.recipe.choices
        path = self.study / CHOICE
        if self.recipe.model is not None or len(choices) < 2:
            return choices[0] if choices else None
        if not path.exists():
            raise DataError(f"{path} is missing: how to learn is not chosen yet; run the stage `choose`")
        return from_plain(DualChoice, read_json(path)["choice"], str(path))

    # --- members -----------------------------------------------------------------------------------------------------

    def member(self, family: Family, index: int) -> DualEncoder:
        """A member of a family: pruned, and its text side trained if the family says so."""

        def pruned() -> DualEncoder:
            heads = self.heads(family)[index]
            return he.prune(self.dual, heads) if heads else self.dual

        if not family.tuned:
            return self.once((family, index), pruned)
        return self.kept(f"{family.name}-{index}", lambda: self.task.tuned(pruned(), self.number))

    @torch.no_grad()
    def logits(self, family: Family, index: int, data: ZeroSet) -> Tensor:
        """Logits `[1, N, C]` of a member on a set, in float32 on every device so that results do not depend on it.

        Members with the same image tower share image embeddings.
        """
        member = self.member(family, index)

        def encoded() -> Tensor:
            batches = SampleBatches(data.samples, BATCH)
            parts = [member.encode_image(move(inputs, self.device, torch.float32)).float() for inputs, _ in batches]
            return torch.cat(parts, dim=1)  # [1, N, e]

        def embedded() -> Tensor:
            return class_embeddings(member.text, member.projections.text, data.classes, DEFAULT_TEMPLATES).float()

        images = self.once(("images", family.heads, index, id(data.samples)), encoded)
        texts = self.once(("texts", family, index, data.classes), embedded)  # [1, C, e]
        return member.logits(images, texts).float()

    def heads(self, family: Family) -> Members:
        """The heads that each member of a family loses."""
        recipe = self.recipe
        match family.heads:
            case "none":
                return ((),)
            case "taylor":
                lost = self.taylor().first(recipe.taylor_prune)
                return (tuple(Head(head.layer, head.head, "image") for head in lost),)
            case "random":
                return random_members(self.dual, recipe.prune, family.members, self.number)
            case "image":
                return self._by_circuits("image", recipe.image_prune, family.members)
            case "circuits":
                return self._by_circuits("image+text", recipe.prune, family.members)
            case "more":
                return self._by_circuits("image+text", recipe.prune + recipe.more, family.members)

    def _by_circuits(self, towers: str, count: int, members: int) -> Members:
        return circuit_members({score: self.circuit(score, towers) for score in CIRCUIT_ORDER}, count, members)

    def circuit(self, score: Score, towers: str) -> HeadRanking:
        """A circuit of both towers, or of the image tower alone, on the images set apart for it."""
        both, (name, budget) = towers == "image+text", self._circuit(score, towers)

        def sides() -> tuple[Any, ...]:
            inside, outside, names = self.task.both_circuits if both else self.task.image_circuits
            return self.dual, SampleBatches(inside, CIRCUIT_BATCH), SampleBatches(outside, CIRCUIT_BATCH), names

        how: dict[str, Any] = {"score": score, "budget": budget, "towers": TOWERS[towers]}
        journal = self.folder / RANKED / f"{name}.journal"
        return self.extracted(name, sides, ties="order", journal=journal, **how)  # break ties like the paper

    def has_circuit(self, score: Score, towers: str) -> bool:
        """Whether a circuit is already extracted."""
        return (self.folder / RANKED / f"{self._circuit(score, towers)[0]}.json").exists()

    def _circuit(self, score: Score, towers: str) -> tuple[str, int]:
        """The name of a circuit, and the number of heads it ranks."""
        both = towers == "image+text"
        budget = SPARE + (self.recipe.prune + self.recipe.more if both else self.recipe.image_prune)
        return f"{score}-{towers}-{budget}", budget

    def taylor(self) -> HeadRanking:
        """The Taylor ranking of the image tower's heads, by the zero-shot loss on the circuits' ID images."""

        def rank() -> HeadRanking:
            inside, _, names = self.task.both_circuits
            return he.taylor(
                he.zero_shot(self.dual, names, keep_text=False),
                SampleBatches(inside, CIRCUIT_BATCH),
                budget=self.recipe.taylor_prune,
                seed=self.derived("taylor"),
                calibration_batches=min(self.recipe.counts.taylor_batches, -(-len(inside) // CIRCUIT_BATCH)),
            )

        return self.ranked(f"taylor-{self.recipe.taylor_prune}", rank)
