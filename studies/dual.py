"""One seed of a zero-shot study: the dual encoder, circuits of its towers, pruned members, tuned text sides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles import DualEncoder, HeadRanking, extract_circuit, fuse, prune, zero_shot
from hydra_ensembles import taylor as rank_by_taylor
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.heads.members import CIRCUIT_ORDER, Members, Score, random_members
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.clip import DEFAULT_TEMPLATES, Templates, Tower, checked_templates, class_embeddings

from .captions import TrainImages, caption_templates, read_train_images, train_dual
from .dual_sets import SEEN, DualSets
from .engine import CIRCUIT_BATCH, SPARE, Group, SeedRun, StudySet, answered, distinct
from .methods import CALIBRATED, FAMILIES, Family, Units, all_units, dual_methods, family_of
from .recipe import DualRecipe, derived_seed
from .results import HELD_OUT
from .samples import ImageSamples, PreparedImages, SampleBatches, Samples
from .sets import DataFolder, at_most
from .weights import load_dual, untrained_dual

BATCH = 512
TOWERS: Mapping[str, tuple[Tower, ...]] = {"image+text": ("image", "text"), "image": ("image",)}
OWN_NAME = "DINOv2 ViT-S/14 + MiniLM-L6"
OWN = (
    "This model is no CLIP: no CLIP checkpoint could be had. Its image tower is DINOv2 ViT-S/14, locked, at "
    "{size}x{size} pixels; its text tower is MiniLM-L6. Text side and projections learned on captions written from 210 "
    "class names (TinyImageNet-200 and CIFAR-10), {images} images in all; CLIP learned from billions of pairs. It "
    "answers for other classes as far as its text tower carries over from those names, and is far weaker than CLIP. "
    "Differences between methods on this one model can be held against the paper's; levels cannot."
)
GIVEN = "The model is {name}, as it was published; nothing of it was trained here. Seeds change nothing in it."
PAIRS = 22_000  # images of the training sets


class DualModels:
    """The dual encoder of a study: trained on the pairs of the shared folder, or one that the user names."""

    def __init__(self, recipe: DualRecipe, source: DataFolder, device: torch.device) -> None:
        self.recipe, self.source, self.device = recipe, source, device

    @property
    def name(self) -> str:
        """What results call the model."""
        given = self.recipe.model
        if given is None:
            return OWN_NAME
        return Path(given).name if Path(given).expanduser().is_dir() else given

    @property
    def description(self) -> str:
        """What it is and is not."""
        if self.recipe.model is not None:
            return GIVEN.format(name=self.name)
        return OWN.format(size=self.recipe.input_size, images=f"{self.recipe.counts.pairs or PAIRS:,}")

    def samples(self, images: ImageDataset) -> Samples:
        """Images as the image tower takes them."""
        if self.recipe.model is not None:
            return PreparedImages(images, self.given.image)
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
        rate, views = self.recipe.projection_rate, self.recipe.views
        start = self.untrained(seed).to(self.device)
        return train_dual(start, training, self.pairs, projection_rate=rate, views=views, output=output)

    def tuned(self, member: DualEncoder, seed: int, output: Path | None) -> DualEncoder:
        """A pruned member whose text side met the pruned image tower."""
        if self.recipe.tune is None or self.recipe.model is not None:
            raise ConfigError(f"the text side of {self.name} cannot be trained: the study has no pairs, or no `tune`")
        training = replace(self.recipe.tune, seed=derived_seed(seed, "tune"))
        return train_dual(member, training, self.pairs, train_image_projection=False, views=1, output=output)

    @cached_property
    def given(self) -> DualEncoder:
        """The user's model, the same for every seed."""
        assert self.recipe.model is not None
        return load_dual(self.recipe.model).to(self.device)

    @cached_property
    def pairs(self) -> Sequence[TrainImages]:
        """Images whose captions train."""
        return read_train_images(self.source, self.recipe.input_size, self.device, self.recipe.counts.pairs)


@dataclass(frozen=True)
class Fixed:
    """What a seed has fixed before any test set is opened.

    Attributes:
        recipe: Digest of the recipe.
        heads: Heads that each member of each family loses, as text.
        temperatures: Of the methods that are calibrated.
        calibrated_on: Images that temperatures were fitted on.
    """

    recipe: str
    seed: int
    heads: Mapping[str, tuple[tuple[str, ...], ...]]
    temperatures: Mapping[str, float]
    calibrated_on: int


class DualRun(SeedRun):
    """Everything that is trained, ranked or pruned for one seed."""

    RECORD, RECORD_STAGE = Fixed, "tune"

    def __init__(self, recipe: DualRecipe, seed: int, models: DualModels, sets: DualSets, output: Path) -> None:
        super().__init__(recipe, seed, output, models.device)
        self.recipe, self.models, self.sets = recipe, models, sets

    @property
    def stages(self) -> Mapping[str, Callable[[], Any]]:
        return {"dual": lambda: self.dual, "rank": self._rank, "tune": self.fix}

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
        for task, suite in sets.suites.items():
            groups: dict[Group, tuple[SetRef, ...]] = {"near": suite.near, "far": suite.far}
            for group, references in groups.items():
                for one in references:
                    samples = self.models.samples(at_most(sets.load(one), counts.detection))
                    found.append(replace(tasks[task], name=one.name, group=group, samples=samples))
        return found

    @torch.no_grad()
    def answers(self, unit: str, sets: Sequence[StudySet]) -> dict[str, Tensor]:
        member, templates = self.member(*family_of(unit)), checked_templates(self.templates)
        texts = {
            task: class_embeddings(member.text, member.projections.text, classes, templates).float()
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
        ensembles = [zero_shot(member, names, self.templates, keep_text=False) for member in members]
        return ensembles[0] if len(ensembles) == 1 else fuse(ensembles)

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        fixed: Fixed = self.record()
        shared = {
            "model": {"name": self.models.name, "description": self.models.description},
            "images": self.sets.name,
            "calibrated_on": fixed.calibrated_on,
            "detections": list(self.sets.suites),
        }
        heads = {name: [list(one) for one in members] for name, members in fixed.heads.items()}
        return shared, {"heads": heads, "circuits": self._circuit_facts()}

    @property
    def templates(self) -> Templates:
        """The sentences in which class names stand."""
        return DEFAULT_TEMPLATES if self.recipe.templates == "paper" else caption_templates()

    @cached_property
    def dual(self) -> DualEncoder:
        """The model of this seed, one member, all heads."""
        return self._saved("dual", lambda: self.models.trained(self.seed, self.folder.place("training/dual")))

    def member(self, family: Family, index: int) -> DualEncoder:
        """A member of a family, pruned; its text side trained where the family says so."""
        heads = self.heads(family)[index]
        member = prune(self.dual, heads) if heads else self.dual
        if not family.tuned:
            return member
        name = f"{family.name}-{index}"
        place = self.folder.place(f"training/{name}")
        return self._saved(f"tuned/{name}", lambda: self.models.tuned(member, self.seed, place))

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

        def make() -> HeadRanking:
            inside, outside, names = self._both_circuits if both else self._image_circuits
            return extract_circuit(
                self.dual,
                SampleBatches(inside, CIRCUIT_BATCH),
                SampleBatches(outside, CIRCUIT_BATCH),
                score=score,
                budget=budget,
                class_names=names,
                templates=self.templates,
                towers=TOWERS[towers],
                journal=self.folder.place(f"rankings/{score}-{towers}.journal"),
                progress=False,
            )

        return self.folder.ranking(f"rankings/{score}-{towers}-{budget}", make)

    def taylor(self) -> HeadRanking:
        """The Taylor ranking of the image tower's heads, by the zero-shot loss on the ID images of circuits."""

        def make() -> HeadRanking:
            inside, _, names = self._both_circuits
            return rank_by_taylor(
                zero_shot(self.dual, names, self.templates, keep_text=False),
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
        count = len(self.held_out_labels)
        self.seal(Fixed(self.digest, self.seed, heads, self.temperatures(), count))

    def _rank(self) -> None:
        for towers in TOWERS:
            for score in CIRCUIT_ORDER:
                self.circuit(score, towers)
        self.taylor()

    def _circuit_facts(self) -> dict[str, Any]:
        """Of every circuit: samples, the score with all heads, and the score without those that a member loses."""
        found = {}
        for towers, count in (("image+text", self.recipe.prune), ("image", self.recipe.image_prune)):
            for score in CIRCUIT_ORDER:
                ranking = self.circuit(score, towers)
                known = {name: ranking.provenance[name] for name in ("id_samples", "ood_samples", "start")}
                found[f"{score} {towers}"] = {**known, "end": ranking.scores[count - 1], "pruned": count}
        return found

    def _saved(self, name: str, make: Callable[[], DualEncoder]) -> DualEncoder:
        def read(folder: Path) -> DualEncoder:
            return DualEncoder.from_pretrained(folder).to(self.device).eval()

        return self.folder.product(name, make, read, lambda folder, dual: dual.save_pretrained(folder))

    @cached_property
    def _both_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        (inside, outside), limit = self.sets.circuits(), self.recipe.counts.circuits
        parts = [self.models.samples(at_most(one, limit)) for one in (inside.images, outside)]
        return parts[0], parts[1], inside.names

    @cached_property
    def _image_circuits(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        inside, outside = self.sets.image_circuits()  # as many of each task as the recipe says
        return self.models.samples(inside.images), self.models.samples(outside), inside.names
