"""The zero-shot study: a dual encoder is a task with other members.

A seed trains the text side of a dual encoder (or takes the user's own model), ranks the heads of its towers, and prunes
members, all before a test set is opened. Members of a family differ in their heads only, or also in the training of
their text side. BayesVLM and ViLU are fitted on data that also trained the study's dual encoder; their authors use a
model that saw neither.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import DualEncoder, HeadRanking, Prediction, baselines
from hydra_ensembles._utils import derive_seed
from hydra_ensembles.batches import move
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.familiarity import with_score
from hydra_ensembles.heads.masking import Head
from hydra_ensembles.heads.ranking import CIRCUIT_ORDER, Members, Score, circuit_members, random_members
from hydra_ensembles.metrics import nll
from hydra_ensembles.model.dual_encoder import DEFAULT_TEMPLATES, class_embeddings
from hydra_ensembles.model.metadata import Familiarity
from hydra_ensembles.settings import from_plain
from hydra_ensembles.store import Store
from hydra_ensembles.training.recipe import DataRecipe

from .captions import (
    FEATURE_BATCH,
    Pairs,
    TrainImages,
    read_train_images,
    train_dual,
    view_features,
)
from .engine import Lab, Method, Set, Setting, Stage, Task
from .rows import SINGLE
from .samples import ImageSamples, Prepared, SampleBatches, Samples
from .sets import DataFolder, at_most, read_recipe
from .suites import SetRef
from .weights import load_dual, untrained_dual
from .zero_shot_sets import SEEN, CircuitImages, PaperSets, SharedSets

ZERO_SHOT = "zero-shot"
SUITES = {"shared": ZERO_SHOT, "paper": "zero-shot-paper"}  # image suites of the study, and their recipes
BATCH, CIRCUIT_BATCH = 500, 100
SPARE = 2  # extra ranked heads, used where circuits would otherwise be equal
BAYES_VLM, VILU, HYDRA = "BayesVLM", "ViLU", "Hydra (Circ)"
PSEUDO_COUNTS = (1.0, 10.0, 100.0, 1e3, 1e4)  # 10 is the authors' value
EPOCHS = 100  # of ViLU; held-out images choose the best epoch
RATES = (("sgd", 0.01), ("sgd", 0.1), ("adamw", 3e-4), ("adamw", 1e-3))
"""How ViLU's network is trained. The authors use the first for a hundred times as many updates; after ours the network
still outputs one number for all images. SGD at 0.1 leaves that plateau late; at 1 it learned nothing in two seeds."""


def zero_shot_recipe(suite: str | None = None, model: str | None = None, factors: str | None = None) -> dict[str, Any]:
    """The recipe of the study on one of `SUITES` (default `shared`), optionally for the user's own model."""
    name = SUITES.get(suite or "shared")
    if name is None:
        raise ConfigError(f"no suite {suite!r}; choose one of {', '.join(SUITES)}")
    settings = {**read_recipe(name), **{key: value for key, value in (("model", model), ("factors", factors)) if value}}
    if settings.get("factors") and not settings.get("model"):
        raise ConfigError(f"factors {factors!r} need the model they were made for; give --model, too")
    return settings


# --- the data, and the dual encoder's training -----------------------------------------------------------------------


class ZeroShotTask(Task):
    """What all seeds share: images, and the dual encoder's training (or the user's model)."""

    def __init__(self, settings: Mapping[str, Any], source: DataFolder, device: torch.device) -> None:
        self.settings, self.source, self.device = settings, source, device
        self.name = settings["name"]
        self.counts = SimpleNamespace(**settings["counts"])
        shared = settings["suite"] == "shared"
        self.images_of = SharedSets(source, self.counts) if shared else PaperSets(source.root, self.counts)

    @property
    def identity(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key != "seeds"}

    @property
    def own_model(self) -> str | None:
        """The user's own model, if there is one."""
        return self.settings.get("model")

    @property
    def methods(self) -> Mapping[str, Method]:
        """No tuned text sides without pairs, and no BayesVLM without pairs or factors: a user's model has no pairs."""
        trains = self.own_model is None and self.settings["tune"] is not None
        left_out = {name for name, one in METHODS.items() if one.family and one.family.tuned and not trains}
        left_out |= {BAYES_VLM} if self.own_model is not None and not self.settings.get("factors") else set()
        return {name: one for name, one in METHODS.items() if name not in left_out}

    def seeds_of(self, method: str) -> Sequence[int]:
        return list(self.settings["seeds"])

    def about(self) -> dict[str, Any]:
        tasks: dict[str, dict[str, list[str]]] = {}
        chances: dict[str, float] = {}
        for one in self.sets("report"):
            if one.group == "id":
                tasks[one.task] = {}
                shared = self.settings["suite"] == "shared"
                chances |= {} if shared and one.task in SEEN else {one.task: 1 / len(one.classes)}
            else:
                tasks[one.task].setdefault(one.group, []).append(one.name)
        return {"tasks": tasks, "unseen": chances, "least_over_chance": self.settings["least_over_chance"]}

    def lab(self, number: int, store: Store, choices: Path) -> "ZeroShotLab":
        return ZeroShotLab(self, number, store, choices)

    def samples(self, images: ImageDataset) -> Samples:
        """Images as inputs of the image tower."""
        if self.own_model is not None:
            return Prepared(images, self.own.image.prepare)
        return ImageSamples.read(images, self.settings["input_size"], self.device)

    def untrained(self, seed: int) -> DualEncoder:
        """Both towers before training, with the projections that this seed draws."""
        return untrained_dual(self.source.root, self.settings["input_size"], seed)

    def trained(self, seed: int) -> DualEncoder:
        """The dual encoder of one seed."""
        recipe = replace(from_plain(DataRecipe, self.settings["dual"]), seed=own_seed(seed, "dual"))
        pairs = Pairs(self.images, self.features, recipe.batch_size or FEATURE_BATCH)
        rates: dict[str, Any] = {"train_image_projection": True, "projection_rate": self.settings["projection_rate"]}
        return train_dual(self.untrained(seed).to(self.device), recipe, pairs, **rates)

    def tuned(self, member: DualEncoder, seed: int) -> DualEncoder:
        """A pruned member whose text side was trained with its pruned image tower."""
        recipe = replace(from_plain(DataRecipe, self.settings["tune"]), seed=own_seed(seed, "tune"))
        return train_dual(member, recipe, self.pairs(member, recipe.batch_size or FEATURE_BATCH))

    def pairs(self, dual: DualEncoder, batch_size: int = FEATURE_BATCH) -> Pairs:
        """Some of the pairs, with features of the given image tower."""
        images = self._some_images
        return Pairs(images, [view_features(dual, part.samples, 1) for part in images], batch_size)

    @cached_property
    def own(self) -> DualEncoder:
        """The user's model, the same for every seed."""
        assert self.own_model is not None
        return load_dual(self.own_model).to(self.device)

    @cached_property
    def images(self) -> Sequence[TrainImages]:
        """Images whose texts train the dual encoder."""
        return self._read(self.counts.pairs)

    @cached_property
    def _some_images(self) -> Sequence[TrainImages]:
        return self._read(self.counts.tuned_pairs)

    def _read(self, limit: int | None) -> Sequence[TrainImages]:
        return read_train_images(self.source, self.settings["pairs"], self.settings["input_size"], self.device, limit)

    @cached_property
    def features(self) -> Sequence[Tensor]:
        """Features of the images in all views, the same for all seeds because the image tower is locked."""
        start = self.untrained(0).to(self.device)
        return [view_features(start, part.samples, self.settings["views"]) for part in self.images]

    # --- sets --------------------------------------------------------------------------------------------------------

    def calibration(self) -> Set:
        """ID images for fitting temperatures: used by no circuit and reported in no table."""
        return self._held_out

    @cached_property
    def _held_out(self) -> Set:
        labelled = self.images_of.calibration()
        return Set(self.images_of.main.id.name, "held out", "id", self.samples(labelled.images), labelled.names)

    def sets(self, stage: Stage) -> Iterator[Set]:
        """The test sets; nothing is chosen on held-out OOD sets, and no image is corrupted."""
        yield from self._test_sets if stage == "report" else ()

    @cached_property
    def _test_sets(self) -> Sequence[Set]:
        images, counts = self.images_of, self.counts
        tests, read = list[Set](), dict[SetRef, Samples]()
        shared = images.name == "shared"
        for ref in (*images.main.tasks, images.main.id) if shared else (images.main.id, *images.main.tasks):
            labelled = images.fewer(images.load(ref), ref.name, counts.test)
            tests.append(Set(ref.name, ref.name, "id", self.samples(labelled.images), labelled.names))
            if counts.test == counts.detection and counts.classes is None:  # same images when used as an OOD set
                read[ref] = tests[-1].samples
        tasks = {test.task: test for test in tests}
        for task, suite in images.suites.items():
            for group, references in (("near", suite.near), ("far", suite.far)):
                for ref in references:
                    if ref not in read:
                        read[ref] = self.samples(at_most(images.load(ref), counts.detection))
                    tests.append(replace(tasks[task], name=ref.name, group=group, samples=read[ref]))
        return tests

    @cached_property
    def both_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        """ID images, OOD images and class names for extracting circuits of both towers."""
        return self._circuit_samples(self.images_of.circuits(), self.counts.circuits)

    @cached_property
    def image_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        """The same for circuits of the image tower alone."""
        return self._circuit_samples(self.images_of.image_circuits(), None)  # each task is already limited

    def _circuit_samples(self, images: CircuitImages, limit: int | None) -> tuple[Samples, Samples, tuple[str, ...]]:
        inside, outside = (self.samples(at_most(dataset, limit)) for dataset in (images[0].images, images[1]))
        return inside, outside, images[0].names


def own_seed(*parts: int | str) -> int:
    """A random seed for a purpose."""
    return derive_seed(*parts) % (1 << 31)


# --- a seed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Members of one kind: how their heads are chosen, and whether their text sides are trained after pruning.

    `circuits` uses circuits of both towers, `more` prunes more heads by them, `image` uses circuits of the image tower.
    """

    name: str  # in file names
    heads: Literal["none", "taylor", "circuits", "more", "image", "random"]
    members: int = 3
    tuned: bool = False


class ZeroShotLab(Lab):
    """Models of one seed."""

    task: ZeroShotTask

    @property
    def dual(self) -> DualEncoder:
        """The model of this seed: one member with all heads."""

        def make() -> DualEncoder:
            return self.task.own if self.task.own_model else self.kept("dual", lambda: self.task.trained(self.number))

        return self.once("dual", make)

    def answering(self, method: str, setting: Setting) -> Callable[[Set], Prediction]:
        """Members in turn, which share embeddings of images; other models in batches."""
        one = METHODS[method]
        if one.family is None:
            return lambda data: self.asked(one.make(self, data.classes), data)
        family = one.family
        return lambda data: Prediction.from_logits(torch.cat([self.logits(family, i, data) for i in one.members]))

    def asked(self, model: Any, data: Set) -> Prediction:
        """Predict on a set, without a temperature."""
        batches = SampleBatches(data.samples, BATCH)
        return Prediction.concat(
            [model.predict(move(inputs, self.task.device, torch.float32)) for inputs, _ in batches]
        )

    def whole(self, method: str) -> Any:
        return METHODS[method].make(self, self.task.calibration().classes)

    def member(self, family: Family, index: int) -> DualEncoder:
        """A member of a family: pruned, and its text side trained if the family says so."""

        def pruned() -> DualEncoder:
            heads = self.heads(family)[index]
            return he.prune(self.dual, heads) if heads else self.dual

        if not family.tuned:
            return self.once((family, index), pruned)
        name = f"{family.name}-{index}"
        return self.once((family, index), lambda: self.kept(name, lambda: self.task.tuned(pruned(), self.number)))

    def fused(self, family: Family, members: Sequence[int], names: Sequence[str]) -> he.Ensemble:
        """Members as one model for class names; their MLPs are equal, so that fusing changes no output."""
        ensembles = [he.zero_shot(self.member(family, index), names) for index in members]
        return ensembles[0] if len(ensembles) == 1 else he.fuse(ensembles)

    @torch.no_grad()
    def logits(self, family: Family, index: int, data: Set) -> Tensor:
        """Logits `[1, N, C]` of a member on a set, in float32 on every device so that results do not depend on it."""
        member = self.member(family, index)

        def encoded() -> Tensor:
            batches = SampleBatches(data.samples, BATCH)
            parts = [member.encode_image(move(x, self.task.device, torch.float32)).float() for x, _ in batches]
            return torch.cat(parts, dim=1)  # [1, N, e]

        def embedded() -> Tensor:
            return class_embeddings(member.text, member.projections.text, data.classes, DEFAULT_TEMPLATES).float()

        images = self.once(("images", family.heads, index, id(data.samples)), encoded)
        texts = self.once(("texts", family, index, data.classes), embedded)  # [1, C, e]
        return member.logits(images, texts).float()

    def heads(self, family: Family) -> Members:
        """The heads that each member of a family loses."""
        settings = self.task.settings
        match family.heads:
            case "none":
                return ((),)
            case "taylor":
                lost = self.taylor().first(settings["taylor_prune"])
                return (tuple(Head(head.layer, head.head, "image") for head in lost),)
            case "random":
                return random_members(self.dual, settings["prune"], family.members, self.number)
            case "image":
                chosen = self._by_circuits("image", settings["image_prune"], family.members)
                return tuple(tuple(Head(head.layer, head.head, "image") for head in heads) for heads in chosen)
            case "circuits":
                return self._by_circuits("image+text", settings["prune"], family.members)
            case "more":
                return self._by_circuits("image+text", settings["prune"] + settings["more"], family.members)

    def _by_circuits(self, towers: str, count: int, members: int) -> Members:
        return circuit_members({score: self.circuit(score, towers) for score in CIRCUIT_ORDER}, count, members)

    def circuit(self, score: Score, towers: str) -> HeadRanking:
        """A circuit of both towers, `image+text`, or of the image tower alone, on the images set apart for it."""
        both, settings = towers == "image+text", self.task.settings
        budget = SPARE + (settings["prune"] + settings["more"] if both else settings["image_prune"])

        def sides() -> tuple[Any, ...]:
            inside, outside, names = self.task.both_circuits if both else self.task.image_circuits
            batches = SampleBatches(inside, CIRCUIT_BATCH), SampleBatches(outside, CIRCUIT_BATCH)
            return (self.dual, *batches, names) if both else (he.zero_shot(self.dual, names), *batches)

        name = f"{score}-{towers}-{budget}"
        return self.extracted(name, sides, ties="order", score=score, budget=budget)  # ties as in the paper

    def taylor(self) -> HeadRanking:
        """The Taylor ranking of the image tower's heads, by the zero-shot loss on the circuits' ID images."""
        count = self.task.settings["taylor_prune"]

        def rank() -> HeadRanking:
            inside, _, names = self.task.both_circuits
            batches = SampleBatches(inside, CIRCUIT_BATCH)
            used = min(self.task.counts.taylor_batches, len(batches))
            model = he.zero_shot(self.dual, names)
            return he.taylor(model, batches, budget=count, seed=self.derived("taylor"), calibration_batches=used)

        return self.ranked(f"taylor-{count}", rank)

    def chosen(self, name: str, measured: Callable[[], Mapping[tuple[Any, ...], float]]) -> list[Any]:
        """The setting with the smallest NLL on held-out images; kept with the NLL of every setting."""

        def choice() -> dict[str, Any]:
            losses = {setting: loss for setting, loss in measured().items() if math.isfinite(loss)}
            if not losses:
                raise DataError(f"{name} diverged at every setting; look at the data, or add lower rates")
            best = min(losses, key=losses.__getitem__)
            return {"setting": list(best), "measured": [[*setting, loss] for setting, loss in losses.items()]}

        setting: list[Any] = self.store.step(f"choices/{name.lower()}", choice)["setting"]
        return setting


# --- methods by other authors ----------------------------------------------------------------------------------------


def bayes_vlm(lab: ZeroShotLab, names: Sequence[str]) -> Any:
    """BayesVLM in closed form, with the pseudo-count that gives the smallest NLL on held-out images.

    Fitted on pairs of the study, drawn once; for a user's own model, on factors that its authors publish.
    """
    held_out, factors = lab.task.calibration(), lab.task.settings.get("factors")

    def pairs() -> list[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lab.derived("bayes_vlm"))
            return list(lab.task.pairs(lab.dual))

    def posterior(count: float) -> Any:
        settings = baselines.BayesVLM(count)
        if factors is not None:
            return baselines.published_bayes_vlm(lab.dual, factors, settings)
        return baselines.bayes_vlm(lab.dual, lab.once("pairs", pairs), settings)

    def losses() -> dict[tuple[Any, ...], float]:
        found = {}
        for count in PSEUDO_COUNTS:
            answers = lab.asked(posterior(count).probit(held_out.classes), held_out)
            found[(count,)] = nll(answers.probs, held_out.samples.labels.to(answers.probs.device))
        return found

    fixed = lab.task.settings.get("pseudo_count")
    best = lab.once(BAYES_VLM, lambda: posterior(float(fixed or lab.chosen(BAYES_VLM, losses)[0])))
    return lab.once((BAYES_VLM, tuple(names)), lambda: best.probit(names))


def vilu(lab: ZeroShotLab, names: Sequence[str]) -> he.Ensemble:
    """Single with the score `vilu`; its network is trained on the main task's images and works for any classes.

    In the paper's setting there is a network for each data set, by the recipe of the public code.
    """
    if "vilu" in lab.task.settings:
        here = (one.task for one in lab.task.sets("report") if one.classes == tuple(names))
        task = lab.task.images_of.taught(next(here, lab.task.images_of.main.id.name))
        own = lab.once((VILU, task), lambda: lab.kept(f"vilu-{task}", lambda: published_vilu(lab, task)))
        return for_classes(own, he.zero_shot(lab.dual, names))

    def trained() -> he.Ensemble:
        labelled, held_out = lab.task.images_of.training(), lab.task.calibration()
        model = he.zero_shot(lab.dual, labelled.names)
        train, validation = (
            SampleBatches(samples, BATCH) for samples in (lab.task.samples(labelled.images), held_out.samples)
        )
        settings = baselines.ViLU(batch_size=512)  # the authors' value for ImageNet
        candidates = dict[tuple[Any, ...], he.Ensemble]()

        def losses() -> dict[tuple[Any, ...], float]:
            found = {}
            for optimizer, rate in RATES:
                changes = {"epochs": EPOCHS, "learning_rate": rate, "optimizer": optimizer}
                recipe = he.Recipe.preset("vilu", **changes, seed=lab.derived("vilu"))
                try:
                    one = baselines.vilu(model, train, recipe, settings, validation, progress=False)
                    answers = lab.asked(one, held_out)
                except DataError as error:  # training may diverge; bad data fails at every rate
                    print(f"{VILU} with {optimizer} at rate {rate:g}: {error}", flush=True)
                    continue
                correct = (answers.label == held_out.samples.labels.to(answers.label.device)).to(answers.probs.dtype)
                candidates[optimizer, rate] = one
                found[optimizer, rate] = float(F.binary_cross_entropy_with_logits(-answers.score("vilu"), correct))
            return found

        best = tuple(lab.chosen(VILU, losses))
        if best not in candidates:  # chosen before a kill
            losses()
        return candidates[best]

    network = lab.once(VILU, lambda: lab.kept("vilu", trained))
    return lab.once((VILU, tuple(names)), lambda: for_classes(network, he.zero_shot(lab.dual, names)))


def published_vilu(lab: ZeroShotLab, task: str) -> he.Ensemble:
    """ViLU's network for one data set, by the recipe of the public code."""
    plain, labelled = lab.task.settings["vilu"], lab.task.images_of.lessons(task)
    warmup = {"warmup": plain["warmup_epochs"] / plain["epochs"], "warmup_from": plain["warmup_from"]}
    changes = {"epochs": plain["epochs"], "learning_rate": plain["learning_rate"], **warmup}
    recipe = he.Recipe.preset("vilu", **changes, seed=lab.derived("vilu"))
    train = SampleBatches(lab.task.samples(labelled.images), BATCH)
    settings = baselines.ViLU(batch_size=plain["batch_size"])
    return baselines.vilu(he.zero_shot(lab.dual, labelled.names), train, recipe, settings, progress=False)


def for_classes(trained: he.Ensemble, model: he.Ensemble) -> he.Ensemble:
    """A zero-shot classifier of the same model for other classes, with the trained score `vilu`.

    The network sees embeddings, not classes, so it works with any classes.
    """
    fit = trained.metadata.familiarity
    assert fit is not None  # set by vilu
    rows = F.normalize(model.state_dict()["readout.class_embeddings.weight"].float(), dim=-1)  # [G, C, e]
    texts = rows.expand(model.num_members, -1, -1).contiguous().cpu()
    return with_score(model, Familiarity(fit.settings, {**fit.state, "vilu.texts": texts}), "ViLU for other classes")


@dataclass(frozen=True)
class DualMethod(Method):
    """A method of the zero-shot study: `make` takes class names; members of a family are also answered in turn."""

    family: Family | None = None
    members: Sequence[int] = ()
    calibrated: bool = False  # its outputs are temperature-scaled


def of_family(family: Family, members: int | None = None, calibrated: bool = False, trainings: float = 1) -> DualMethod:
    """A method with (some of) the members of a family; trainings of a text side, Single's included."""
    chosen = range(family.members if members is None else members)
    return DualMethod(
        lambda lab, names: lab.fused(family, chosen, names), trainings, family=family, members=chosen,
        calibrated=calibrated,
    )  # fmt: skip


ONE, BOTH, IMAGE = Family("single", "none", members=1), Family("both", "circuits"), Family("image", "image")
METHODS: Mapping[str, DualMethod] = {
    SINGLE: of_family(ONE),
    "Temperature Scaling": of_family(ONE, calibrated=True),
    BAYES_VLM: DualMethod(bayes_vlm),
    VILU: DualMethod(vilu),
    "Taylor": of_family(Family("taylor", "taylor", members=1)),
    "CircAvg": of_family(BOTH, members=1),
    "Random heads": of_family(Family("random", "random")),
    HYDRA: of_family(BOTH),
    f"{HYDRA} + Temperature Scaling": of_family(BOTH, calibrated=True),
    f"{HYDRA}, six more heads pruned": of_family(Family("more", "more")),
    f"{HYDRA}, image tower only": of_family(IMAGE),
    f"{HYDRA}, image tower only, text fine-tuned": of_family(
        replace(IMAGE, name="image-tuned", tuned=True), trainings=4
    ),
    f"{HYDRA}, text fine-tuned": of_family(replace(BOTH, name="both-tuned", tuned=True), trainings=4),
}
"""Methods in the order of the tables."""
