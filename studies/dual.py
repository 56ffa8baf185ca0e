"""One seed of a zero-shot study: the dual encoder, circuits of its towers, pruned members, tuned text sides.

The dual encoder of the shared folder is trained on pairs of image features and captions written from class names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles import DualEncoder, HeadRanking, Recipe, fuse, prune, tune_text, zero_shot
from hydra_ensembles import taylor as rank_by_taylor
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.heads.members import CIRCUIT_ORDER, Members, Score, random_members
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.clip import DEFAULT_TEMPLATES, LABEL, Tower, class_embeddings
from hydra_ensembles.training.text import image_features

from .engine import CIRCUIT_BATCH, SPARE, Group, SeedRun, StudySet, answered, distinct
from .methods import CALIBRATED, FAMILIES, Family, Units, all_units, dual_methods, family_of
from .recipe import DualRecipe, derived_seed
from .results import HELD_OUT
from .samples import ImageSamples, Prepared, SampleBatches, Samples, normalised, resized
from .sets import NPM, SEEN, CircuitImages, DataFolder, DualSets, at_most, given, label_names, read_yaml, suite
from .weights import load_dual, untrained_dual

BATCH = 512
TOWERS: Mapping[str, tuple[Tower, ...]] = {"image+text": ("image", "text"), "image": ("image",)}
OWN_NAME = "DINOv2 ViT-S/14 + MiniLM-L6"
PAIRS = 22_000  # images of the training sets
CIFAR_IMAGES = 10_000  # of the training set; its last 5,000 are a validation set, its test set is never trained on
CIFAR_TRAIN = SetRef("cifar10-train", NPM, "train", rows=(0, CIFAR_IMAGES))
FEATURE_BATCH = 512
MIRRORED_SIDE = 0.85  # of the crop that is mirrored


# --- training a dual encoder -----------------------------------------------------------------------------------------


def caption_templates() -> tuple[str, ...]:
    """Sentences for training; the first one is what the study asks by."""
    return tuple(read_yaml("captions")["templates"])


@dataclass(frozen=True, eq=False)
class TrainImages:
    """Images of one data set and the names of its classes, in the order of the labels."""

    samples: ImageSamples
    names: tuple[str, ...]


def read_train_images(
    source: DataFolder, input_size: int, device: torch.device, limit: int | None = None
) -> tuple[TrainImages, ...]:
    """TinyImageNet-200 (training split) and part of the CIFAR-10 training set; with `limit`, so many of both in all."""
    tiny = given(suite("tinyimagenet"), "train")
    found = []
    for name, reference in (("tinyimagenet", tiny), ("cifar10", CIFAR_TRAIN)):
        images = at_most(source.images(reference), None if limit is None else limit // 2)
        samples = ImageSamples.read(images, input_size, device)
        found.append(TrainImages(samples, label_names(name, images.class_names)))
    return tuple(found)


class CaptionedFeatures:
    """Batches of image features with fresh captions, in random order, all drawn from torch's CPU generator.

    Takes features `[views, N, d]`, labels `[N]` and class names; the last batch is left out where it is not full.
    """

    def __init__(self, views: Tensor, labels: Tensor, names: Sequence[str], batch_size: int) -> None:
        self.views, self.labels, self.batch_size = views, labels, batch_size
        further = read_yaml("captions")["other_names"]
        self.templates, self.names = caption_templates(), [(name, *further.get(name, ())) for name in names]

    def __len__(self) -> int:
        return max(len(self.labels) // self.batch_size, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, list[str], Tensor]]:
        """Features `[B, d]` of one view of each image, captions, and labels `[B]`."""
        order, device = torch.randperm(len(self.labels)), self.views.device
        for rows in order.split(self.batch_size)[: len(self)]:
            views = torch.randint(len(self.views), rows.shape)
            labels = self.labels[rows]
            yield self.views[views.to(device), rows.to(device)], self.captions(labels), labels

    def captions(self, labels: Tensor) -> list[str]:
        """A caption for every label `[B]`: any sentence, with any name of the class."""
        sentences = torch.randint(len(self.templates), labels.shape).tolist()
        choices = torch.rand(labels.shape).tolist()
        drawn = []
        for label, sentence, choice in zip(labels.tolist(), sentences, choices, strict=True):
            names = self.names[label]
            drawn.append(self.templates[sentence].replace(LABEL, names[int(choice * len(names))]))
        return drawn


def joined_classes(images: Sequence[TrainImages]) -> tuple[tuple[str, ...], Tensor]:
    """One list of class names for several data sets, and all labels in it: the same name is the same class."""
    names = tuple(dict.fromkeys(name for one in images for name in one.names))
    numbers = {name: number for number, name in enumerate(names)}
    labels = [torch.tensor([numbers[name] for name in one.names])[one.samples.labels] for one in images]
    return names, torch.cat(labels)


def train_pairs(dual: DualEncoder, images: Sequence[TrainImages], batch_size: int, views: int = 2) -> CaptionedFeatures:
    """Batches to tune the text side of a dual encoder with, made of the features of its image tower."""
    names, labels = joined_classes(images)
    features = torch.cat([view_features(dual, one.samples, views) for one in images], dim=1)  # [views, N, d]
    return CaptionedFeatures(features, labels, names, batch_size)


def train_dual(
    dual: DualEncoder, recipe: Recipe, images: Sequence[TrainImages], *, views: int = 2, **options: Any
) -> DualEncoder:
    """Tune the text side of a dual encoder, and its image projection where that is new, on images and captions.

    The recipe's `batch_size` is that of pairs, its seed that of order and captions; options are those of `tune_text`.
    """
    if dual.device.type != "cuda":
        recipe = replace(recipe, precision="float32")
    pairs = train_pairs(dual, images, recipe.batch_size or FEATURE_BATCH, views)
    return tune_text(dual, pairs, recipe, progress=False, **options)


def view_features(dual: DualEncoder, samples: ImageSamples, views: int) -> Tensor:
    """Features `[views, N, d]`: of the whole image and, of two views, of its middle with left and right exchanged."""

    def inputs(view: int) -> Iterator[Tensor]:
        for pixels in samples.pixels.split(FEATURE_BATCH):
            images = pixels.float() / 255
            yield normalised(resized(_mirrored_centre(images) if view else images, samples.size))

    return torch.stack([image_features(dual, inputs(view)) for view in range(views)])


def _mirrored_centre(images: Tensor) -> Tensor:
    """The middle of images `[B, 3, h, w]`, left and right exchanged."""
    height, width = images.shape[-2:]
    tall, wide = round(height * MIRRORED_SIDE), round(width * MIRRORED_SIDE)
    top, left = (height - tall) // 2, (width - wide) // 2
    return images[..., top : top + tall, left : left + wide].flip(-1)


class DualModels:
    """The dual encoder of a study: trained on the pairs of the shared folder, or one that the user names."""

    def __init__(self, recipe: DualRecipe, source: DataFolder, device: torch.device) -> None:
        self.recipe, self.source, self.device = recipe, source, device

    def about(self) -> dict[str, str]:
        """What results call the model, and what it is and is not."""
        texts, given, size = read_yaml("texts"), self.recipe.model, self.recipe.input_size
        if given is None:
            images = f"{self.recipe.counts.pairs or PAIRS:,}"
            return {"name": OWN_NAME, "description": texts["own"].format(size=size, images=images)}
        name = Path(given).name if Path(given).expanduser().is_dir() else given
        return {"name": name, "description": texts["given"].format(name=name)}

    def samples(self, images: ImageDataset) -> Samples:
        """Images as the image tower takes them."""
        if self.recipe.model is not None:
            return Prepared(images, self.given.image.prepare)
        return ImageSamples.read(images, self.recipe.input_size, self.device)

    def untrained(self, seed: int) -> DualEncoder:
        """Both towers before training, and the projections this seed draws."""
        return untrained_dual(self.source.root, self.recipe.input_size, seed)

    def trained(self, seed: int, output: Path | None) -> DualEncoder:
        """The model of one seed."""
        if self.recipe.model is not None:
            return self.given
        assert self.recipe.dual is not None  # the recipe has seen to it
        training = replace(self.recipe.dual, seed=derived_seed(seed, "dual"))
        rates: dict[str, Any] = {"train_image_projection": True, "projection_rate": self.recipe.projection_rate}
        start = self.untrained(seed).to(self.device)
        return train_dual(start, training, self.pairs, views=self.recipe.views, output=output, **rates)

    def tuned(self, member: DualEncoder, seed: int, output: Path | None) -> DualEncoder:
        """A pruned member whose text side met the pruned image tower."""
        if self.recipe.tune is None or self.recipe.model is not None:
            raise ConfigError("the text side cannot be trained: the study has no pairs for this model, or no `tune`")
        training = replace(self.recipe.tune, seed=derived_seed(seed, "tune"))
        return train_dual(member, training, self.pairs, views=1, output=output)

    @cached_property
    def given(self) -> DualEncoder:
        """The user's model, the same for every seed."""
        assert self.recipe.model is not None
        return load_dual(self.recipe.model).to(self.device)

    @cached_property
    def pairs(self) -> Sequence[TrainImages]:
        """Images whose captions train."""
        return read_train_images(self.source, self.recipe.input_size, self.device, self.recipe.counts.pairs)


# --- a seed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """What a seed has fixed before any test set is opened."""

    recipe: str  # digest
    seed: int
    heads: Mapping[str, tuple[tuple[str, ...], ...]]  # that each member of each family loses, as text
    temperatures: Mapping[str, float]  # of the methods that are calibrated
    calibrated_on: int  # images


class DualRun(SeedRun):
    """Everything that is trained, ranked or pruned for one seed."""

    RECORD, RECORD_STAGE = Fixed, "tune"

    def __init__(self, recipe: DualRecipe, seed: int, models: DualModels, sets: DualSets, output: Path) -> None:
        super().__init__(recipe, seed, output, models.device)
        self.recipe, self.models, self.sets = recipe, models, sets

    @property
    def stages(self) -> Mapping[str, Callable[[], Any]]:
        circuits = [(score, towers) for towers in TOWERS for score in CIRCUIT_ORDER]
        return {
            "dual": lambda: self.dual,
            "rank": lambda: [*(self.circuit(*one) for one in circuits), self.taylor()],
            "tune": self.fix,
        }

    @property
    def record_path(self) -> Path:
        return self.path / "fixed.json"  # every seed has its own

    def methods(self) -> Mapping[str, Units]:
        return dual_methods(self.recipe.trains_text)

    @property
    def calibrates(self) -> Sequence[str]:
        return [name for name in CALIBRATED if name in self.methods()]

    @cached_property
    def held_out(self) -> Sequence[StudySet]:
        images = self.sets.calibration()
        return [StudySet(self.sets.main.id.name, HELD_OUT, "id", self.models.samples(images.images), images.names)]

    def test_sets(self) -> Sequence[StudySet]:
        sets, counts = self.sets, self.recipe.counts
        found: list[StudySet] = []
        listed = (*sets.main.tasks, sets.main.id) if sets.name == "shared" else (sets.main.id, *sets.main.tasks)
        for one in listed:
            images = sets.fewer(sets.load(one), one.name, counts.test)
            domain = "seen" if sets.name == "shared" and one.name in SEEN else "unseen"
            samples = self.models.samples(images.images)
            found.append(StudySet(one.name, one.name, "id", samples, images.names, domain))
        tasks = {one.task: one for one in found}
        for task, own in sets.suites.items():
            groups: dict[Group, tuple[SetRef, ...]] = {"near": own.near, "far": own.far}
            for group, references in groups.items():
                for one in references:
                    samples = self.models.samples(at_most(sets.load(one), counts.detection))
                    found.append(replace(tasks[task], name=one.name, group=group, samples=samples))
        return found

    @torch.no_grad()
    def answers(self, unit: str, sets: Sequence[StudySet]) -> dict[str, Tensor]:
        member = self.member(*family_of(unit))
        texts = {
            task: class_embeddings(member.text, member.projections.text, classes, DEFAULT_TEMPLATES).float()
            for task, classes in {one.task: one.classes for one in sets}.items()
        }  # [1, C, e]
        found = {}
        for one in sets:
            images = answered(member.encode_image, one.samples, BATCH, member.device)  # [1, N, e]
            found[one.place] = member.logits(images, texts[one.task]).float().cpu()  # [1, N, C]
        return found

    def whole_model(self, method: str, units: Units) -> Any:
        # Members differ in their heads and class embeddings alone, so their MLPs are stored once and fusing them
        # changes no number.
        names = self.held_out[0].classes
        members = [self.member(*family_of(unit)) for unit in units]
        ensembles = [zero_shot(member, names, keep_text=False) for member in members]
        return ensembles[0] if len(ensembles) == 1 else fuse(ensembles)

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        fixed: Fixed = self.record()
        shared = {
            "model": self.models.about(),
            "images": self.sets.name,
            "calibrated_on": fixed.calibrated_on,
            "detections": list(self.sets.suites),
        }
        heads = {name: [list(one) for one in members] for name, members in fixed.heads.items()}
        return shared, {"heads": heads, "circuits": self._circuit_facts()}

    @cached_property
    def dual(self) -> DualEncoder:
        """The model of this seed, one member, all heads."""
        return self._saved("dual", lambda place: self.models.trained(self.seed, place))

    def member(self, family: Family, index: int) -> DualEncoder:
        """A member of a family, pruned; its text side trained where the family says so."""
        heads = self.heads(family)[index]
        member = prune(self.dual, heads) if heads else self.dual
        if not family.tuned:
            return member
        return self._saved(f"tuned/{family.name}-{index}", lambda place: self.models.tuned(member, self.seed, place))

    def heads(self, family: Family) -> Members:
        """What each member of a family loses."""
        recipe = self.recipe
        match family.heads:
            case "none":
                return ((),)
            case "taylor":
                first = self.taylor().first(recipe.taylor_prune)
                return (tuple(Head(head.layer, head.head, "image") for head in first),)
            case "random":
                return random_members(self.dual, recipe.prune, family.members, self.seed)
            case "image":
                return distinct([self.circuit(score, "image") for score in CIRCUIT_ORDER], recipe.image_prune)
            case "circuits" | "more":
                count = recipe.prune + (recipe.more if family.heads == "more" else 0)
                return distinct([self.circuit(score, "image+text") for score in CIRCUIT_ORDER], count)

    def circuit(self, score: Score, towers: str) -> HeadRanking:
        """A circuit of both towers, or of the image tower alone, on the images set apart for it."""
        both = towers == "image+text"
        budget = SPARE + (self.recipe.prune + self.recipe.more if both else self.recipe.image_prune)

        def ready() -> tuple[Any, ...]:
            inside, outside, names = self._both_circuits if both else self._image_circuits
            return self.dual, inside, outside, {"class_names": names, "towers": TOWERS[towers]}

        return self.extracted(f"{score}-{towers}", score, budget, ready)

    def taylor(self) -> HeadRanking:
        """The Taylor ranking of the image tower's heads, by the zero-shot loss on the ID images of circuits."""

        def make() -> HeadRanking:
            inside, _, names = self._both_circuits
            return rank_by_taylor(
                zero_shot(self.dual, names, keep_text=False),
                SampleBatches(inside, CIRCUIT_BATCH),
                budget=self.recipe.taylor_prune,
                seed=derived_seed(self.seed, "taylor"),
                calibration_batches=min(self.recipe.counts.taylor_batches, -(-len(inside) // CIRCUIT_BATCH)),
            )

        return self.folder.ranking(f"rankings/taylor-{self.recipe.taylor_prune}", make)

    def fix(self) -> None:
        """Make every member, fit temperatures, and seal what methods are; no test set is open."""
        if self.record_path.exists():
            return
        for unit in all_units(self.methods()):
            self.half_b(unit)
        used = {family_of(unit)[0].name for unit in all_units(self.methods())}
        heads = {
            name: tuple(tuple(str(head) for head in one) for one in self.heads(family))
            for name, family in FAMILIES.items()
            if name in used and not family.tuned
        }
        self.seal(Fixed(self.digest, self.seed, heads, self.temperatures(), len(self.held_out_labels)))

    def _circuit_facts(self) -> dict[str, Any]:
        """Of every circuit: samples, the score with all heads, and the score without those that a member loses."""
        found = {}
        for towers, count in (("image+text", self.recipe.prune), ("image", self.recipe.image_prune)):
            for score in CIRCUIT_ORDER:
                ranking = self.circuit(score, towers)
                known = {name: ranking.provenance[name] for name in ("id_samples", "ood_samples", "start")}
                found[f"{score} {towers}"] = {**known, "end": ranking.scores[count - 1], "pruned": count}
        return found

    def _saved(self, name: str, make: Callable[[Path | None], DualEncoder]) -> DualEncoder:
        """A dual encoder of the run folder; `make` is told where its training may keep files."""

        def read(folder: Path) -> DualEncoder:
            return DualEncoder.from_pretrained(folder).to(self.device).eval()

        place = self.folder.place(f"training/{name.removeprefix('tuned/')}")
        return self.folder.product(name, lambda: make(place), read, lambda folder, dual: dual.save_pretrained(folder))

    @cached_property
    def _both_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        return self._circuit_samples(self.sets.circuits(), self.recipe.counts.circuits)

    @cached_property
    def _image_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        return self._circuit_samples(self.sets.image_circuits(), None)  # as many of each task as the recipe says

    def _circuit_samples(self, images: CircuitImages, limit: int | None) -> tuple[Samples, Samples, tuple[str, ...]]:
        inside, outside = (self.models.samples(at_most(one, limit)) for one in (images[0].images, images[1]))
        return inside, outside, images[0].names
