"""The models of one seed of a zero-shot study, made when they are first needed."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles._utils import derive_seed
from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.circuit.search import fast_products
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.heads.members import random_members
from hydra_ensembles.heads.ranking import Head, HeadRanking
from hydra_ensembles.heads.taylor import taylor
from hydra_ensembles.model.clip import DEFAULT_TEMPLATES, DualEncoder, Templates, Tower, zero_shot
from hydra_ensembles.prune import prune

from ..seed_folder import SeedFolder
from ..seed_models import CIRCUIT_BATCH, CIRCUIT_MEMORY, CIRCUITS, SPARE, Heads, distinct
from ..splits import Samples
from .captions import CAPTION_TEMPLATES
from .joined_images import at_most
from .methods import Family
from .recipe import ZeroShotRecipe
from .sources import EvaluationSets, ModelSource

_SEEDS = 1 << 31
BOTH_TOWERS: tuple[Tower, ...] = ("image", "text")
IMAGE_TOWER: tuple[Tower, ...] = ("image",)


class ZeroShotModels:
    """Everything that is trained, ranked or pruned for one seed."""

    def __init__(
        self,
        recipe: ZeroShotRecipe,
        seed: int,
        model: ModelSource,
        sets: EvaluationSets,
        folder: SeedFolder,
        device: torch.device,
    ) -> None:
        self.recipe, self.seed, self.model, self.sets, self.folder = recipe, seed, model, sets, folder
        self.device = device

    @property
    def trains_text(self) -> bool:
        """Whether there are families with trained text sides."""
        return self.recipe.tune is not None and self.model.trains_text

    @property
    def templates(self) -> Templates:
        """The sentences in which class names stand."""
        return DEFAULT_TEMPLATES if self.recipe.templates == "paper" else CAPTION_TEMPLATES

    @cached_property
    def dual(self) -> DualEncoder:
        """The model of this seed, one member, all heads."""
        return self.model.dual(self.seed, self.folder, self.device)

    def members(self, family: Family) -> list[DualEncoder]:
        """The members of a family, pruned; their text sides trained where the family says so."""
        found = []
        for index, heads in enumerate(self.heads(family)):
            member = prune(self.dual, heads) if heads else self.dual
            if family.tuned:
                member = self.model.tuned(member, f"{family.name}-{index}", self.seed, self.folder)
            found.append(member)
        return found

    def heads(self, family: Family) -> Heads:
        """What each member of a family loses."""
        recipe = self.recipe
        match family.heads:
            case "none":
                return ((),)
            case "taylor":
                ranking = self.taylor()
                return (tuple(Head(head.layer, head.head, "image") for head in ranking.first(recipe.taylor_prune)),)
            case "random":
                return random_members(self.dual, recipe.prune, family.members, self.seed)
            case "image":
                return distinct([self.circuit(score, IMAGE_TOWER) for score in CIRCUITS], recipe.image_prune)
            case "circuits":
                return distinct([self.circuit(score, BOTH_TOWERS) for score in CIRCUITS], recipe.prune)
            case "more":
                count = recipe.prune + recipe.more
                return distinct([self.circuit(score, BOTH_TOWERS) for score in CIRCUITS], count)

    def circuit(self, score: Score, towers: tuple[Tower, ...]) -> HeadRanking:
        """A circuit of both towers, or of the image tower alone, on the images set apart for it."""
        both = towers == BOTH_TOWERS
        budget = SPARE + (self.recipe.prune + self.recipe.more if both else self.recipe.image_prune)

        def make(place: Path) -> HeadRanking:
            inside, outside, names = self._joint if both else self._image_only
            with fast_products(self.device):
                return extract_circuit(
                    self.dual,
                    inside.evaluation(CIRCUIT_BATCH),
                    outside.evaluation(CIRCUIT_BATCH),
                    score=score,
                    budget=budget,
                    class_names=names,
                    templates=self.templates,
                    towers=towers,
                    max_memory=CIRCUIT_MEMORY if self.device.type == "cuda" else None,
                    journal=place / f"{score}-{'-'.join(towers)}.journal",
                    progress=False,
                )

        return self.folder.ranking(f"{score}-{'-'.join(towers)}-{budget}", make)

    def circuit_facts(self) -> dict[str, Any]:
        """Of every circuit: samples, the score with all heads, and the score without those that a member loses."""
        found = {}
        for towers, count in ((BOTH_TOWERS, self.recipe.prune), (IMAGE_TOWER, self.recipe.image_prune)):
            for score in CIRCUITS:
                ranking = self.circuit(score, towers)
                found[f"{score} {'+'.join(towers)}"] = {
                    "id_samples": ranking.provenance["id_samples"],
                    "ood_samples": ranking.provenance["ood_samples"],
                    "start": ranking.provenance["start"],
                    "end": ranking.scores[count - 1],
                    "pruned": count,
                }
        return found

    def taylor(self) -> HeadRanking:
        """The Taylor ranking of the image tower's heads, by the zero-shot loss on the ID images of circuits."""

        def make(place: Path) -> HeadRanking:
            inside, _, names = self._joint
            return taylor(
                zero_shot(self.dual, names, self.templates, keep_text=False),
                inside.evaluation(CIRCUIT_BATCH),
                budget=self.recipe.taylor_prune,
                seed=derive_seed(self.seed, "taylor") % _SEEDS,
                calibration_batches=min(self.recipe.counts.taylor_batches, -(-len(inside) // CIRCUIT_BATCH)),
            )

        return self.folder.ranking(f"taylor-{self.recipe.taylor_prune}", make)

    def samples(self, images: ImageDataset, limit: int | None = None) -> Samples:
        """Images as the model takes them; so many of them, drawn once."""
        return self.model.samples(at_most(images, limit), self.device)

    @cached_property
    def _joint(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        data, limit = self.sets.circuits(), self.recipe.counts.circuits
        return self.samples(data.inside.images, limit), self.samples(data.outside, limit), data.inside.names

    @cached_property
    def _image_only(self) -> tuple[Samples, Samples, tuple[str, ...]]:
        data = self.sets.image_circuits()  # as many of each task as the recipe says
        return self.samples(data.inside.images), self.samples(data.outside), data.inside.names
