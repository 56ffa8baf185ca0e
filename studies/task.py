"""A task of the studies of classifiers: its data on a device, by purpose, and its pretrained model."""

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.data import split
from hydra_ensembles.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset, TextDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.files import write_atomically
from hydra_ensembles.schema import from_plain
from hydra_ensembles.training.recipe import DataRecipe

from .dual_recipe import read_recipe
from .samples import Augment, ImageSamples, SampleBatches, Samples, TextSamples
from .seed_folder import Once
from .sets import SPLIT_SEED, DataFolder, apart_by_sentences, at_most, foreign_halves, given, halves, suite
from .weights import SCRATCH, pretrained, small_vit, tokenizer

BATCH = {"image": 500, "text": 250}
FEW = 4  # samples for ranking heads when only shapes matter
Stage = Literal["held_out", "report"]


def recipe() -> dict[str, Any]:
    """The settings of the studies of classifiers."""
    return read_recipe("classifiers")


def decisive(settings: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The settings that decide a task's models, without those of evaluation and of the choice of rows."""
    common = ("members", "circuits", "taylor_batches", "familiar")
    apart = ("rows", "seeds", "row_seeds", "held_out", "corruptions", "most")
    of_task = {key: value for key, value in settings["tasks"][task].items() if key not in apart}
    return {**{key: settings[key] for key in common}, "task": of_task}


class Task(Once):
    """The data of a task, each set read on first use; `share` of every set, for a trial.

    Decoded images are cached in the folder `cache`, if given.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        source: DataFolder,
        device: torch.device,
        share: float = 1.0,
        cache: Path | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.settings = settings
        self.plain = settings["tasks"][name]
        self.source, self.device, self.share, self.cache = source, device, share, cache
        self.short = False
        self.suite = suite(self.plain["suite"])
        self.kind = "text" if self.suite.id.source.startswith("text/") else "image"
        self.scratch = self.plain["backbone"] == SCRATCH

    @property
    def given(self) -> tuple[Any, ...]:
        """The constructor's arguments, for other processes."""
        return self.name, self.settings, self.source, self.device, self.share, self.cache

    def shortened(self) -> "Task":
        """The same task for models that need only its shapes: few samples of every set, one step of every training."""
        task = copy.copy(self)
        task.settings = {**self.settings, "taylor_batches": 1}
        task.share, task.short = 0.0, True
        task._once = {}
        for name in ("train", "_inside", "foreign"):  # sets that were read
            vars(task).pop(name, None)
        return task

    def seeds_of(self, row: str) -> list[int]:
        """The seeds of a row in the report."""
        counts: Mapping[int, Sequence[str]] = self.plain.get("row_seeds", self.settings.get("row_seeds", {}))
        listed = [count for count, rows in counts.items() if row in rows]
        return list(range(max(listed))) if listed else list(self.plain.get("seeds", self.settings["seeds"]))

    @property
    def identity(self) -> dict[str, Any]:
        """All settings that decide its models."""
        return {**decisive(self.settings, self.name), "share": self.share}

    def samples(self, *sets: AnyDataset) -> Samples:
        """Sets of one kind joined, as inputs of the task's backbone; a trial has some samples of every class."""
        if self.share < 1:
            limits = [max(64, 4 * len(data.class_names), round(self.share * len(data))) for data in sets]
            sets = tuple(map(at_most, sets, limits))
        return self.inputs(sets)

    def inputs(self, sets: Sequence[AnyDataset]) -> Samples:
        """All samples of the sets as inputs of the task's backbone."""
        images = [data for data in sets if isinstance(data, ImageDataset)]
        if not images:
            tokens = tokenizer(self.source.root, self.plain["input_size"])
            return TextSamples.read(cast(TextDataset, sets[0]), tokens, self.device, self.cache)
        parts = [ImageSamples.read(data, self.plain["input_size"], self.device, self.cache) for data in images]
        pixels, labels = torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
        return ImageSamples(pixels, labels, parts[0].size)

    @cached_property
    def train(self) -> Samples:
        """Training data."""
        if "sentences" in self.plain:
            return self.samples(self._by_sentences[1])
        reference = given(self.suite, "train")
        splits = self.plain.get("train", [reference.split])
        return self.samples(*(self.source.load(replace(reference, split=name)) for name in splits))

    @property
    def validation(self) -> AnyDataset:
        """Held-out ID data."""
        return self._by_sentences[0] if "sentences" in self.plain else self.source.load(given(self.suite, "validation"))

    @cached_property
    def _by_sentences(self) -> tuple[TextDataset, TextDataset]:
        """Held-out sentences, and training texts that do not occur in them."""
        whole = self.source.load(replace(given(self.suite, "train"), rows=None))
        return apart_by_sentences(cast(TextDataset, whole), self.plain["sentences"])

    @cached_property
    def _inside(self) -> dict[str, Samples]:
        half_a, half_b = halves(self.validation)
        count = min(self.settings["circuits"], len(half_a) // 2)
        ranks, calibrates = split(half_a, count / len(half_a), SPLIT_SEED, stratified=True)
        return {name: self.samples(data) for name, data in (("rank", ranks), ("calibrate", calibrates), ("B", half_b))}

    @property
    def ranking(self) -> Samples:
        """ID samples of half A that rank heads."""
        return self._few(self._inside["rank"])

    @property
    def calibrating(self) -> Samples:
        """The other samples of half A, for calibration."""
        return self._inside["calibrate"]

    @property
    def half_b(self) -> Samples:
        """ID samples for choosing settings."""
        return self._inside["B"]

    @cached_property
    def foreign(self) -> Samples:
        """OOD samples that rank heads; they are not reported."""
        half, _ = foreign_halves(self.source.load(self.suite.circuit_ood))
        return self._few(self.samples(at_most(half, self.settings["circuits"])))

    def _few(self, samples: Samples) -> Samples:
        return Drawn(samples, FEW) if self.short else samples

    def inside(self, stage: Stage) -> Samples:
        """ID samples of a stage."""
        return self.half_b if stage == "held_out" else self._reported(self.suite.id)

    def outside(self, stage: Stage) -> dict[str, dict[str, Samples]]:
        """OOD sets of a stage, by group."""
        return {key: {ref.name: self._reported(ref) for ref in refs} for key, refs in self._foreign(stage).items()}

    def groups(self, stage: Stage) -> dict[str, list[str]]:
        """Names of the OOD sets of a stage, by group."""
        return {key: [ref.name for ref in refs] for key, refs in self._foreign(stage).items()}

    def _foreign(self, stage: Stage) -> dict[str, Sequence[SetRef]]:
        if stage == "held_out":
            return {"far": [_held_out(plain) for plain in self.plain["held_out"]]}
        return {"near": self.suite.near, "far": self.suite.far}

    def corrupt(self, path: Path) -> None:
        """Write some of the test images `[N, h, w, 3]` under every corruption, by its name and severity."""
        images = at_most(self.source.images(self.suite.id), self.settings["shift"]["images"])
        arrays = {"labels": images.labels}
        for name in CORRUPTIONS:
            for level in SEVERITIES:
                changed = corrupted(images, name, level, parameters=self.plain["corruptions"])
                arrays[f"{name} {level}"] = np.stack([np.asarray(image) for image, _ in changed])
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        write_atomically(path, content.getvalue())

    def shifted(self, path: Path) -> Iterator[tuple[str, int, Samples]]:
        """The images that `corrupt` wrote, with corruption and severity."""
        with np.load(path, allow_pickle=False) as file:
            stored = dict(file)
        labels = torch.from_numpy(stored.pop("labels"))
        for key, pixels in stored.items():
            name, _, level = key.rpartition(" ")
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(self.device)
            yield name, int(level), ImageSamples(images, labels, self.plain["input_size"])

    def _reported(self, reference: SetRef) -> Samples:
        most = None if reference == self.suite.id else self.plain.get("most", self.settings["most"])
        return self.once(reference.name, lambda: self.samples(at_most(self.source.load(reference), most)))

    def batches(self, samples: Samples) -> SampleBatches:
        """Batches for evaluation."""
        return SampleBatches(samples, BATCH[self.kind])

    def familiar(self) -> SampleBatches:
        """Training samples for fitting familiarity."""
        return self.batches(Drawn(self.train, self.settings["familiar"]))

    def lessons(self, training: DataRecipe) -> SampleBatches:
        """Training batches for a recipe, with its augmentation."""
        return SampleBatches(self.train, training.batch_size or 128, training.rand_augment or True)

    def training(self, **changes: Any) -> DataRecipe:
        """Single's recipe, possibly a preset, with changes; in float32 and not compiled without a GPU."""
        grid: dict[str, Any] = {"grid": ()} if "learning_rate" in changes else {}
        plain = {**self.plain["training"], **grid, **changes}
        if "preset" not in plain:
            return self._here(from_plain(DataRecipe, plain))
        return self._here(DataRecipe.preset(plain.pop("preset"), **{"precision": "bf16", **plain}))

    def recovery(self, **changes: Any) -> DataRecipe:
        """The paper's training after pruning (D.2) with the study's steps; the caller gives the learning rate."""
        plain = {key: value for key, value in self.plain["recovery"].items() if key not in ("preset", "prune")}
        grid = {"grid": ()} if "learning_rate" in changes else {}
        changed = {"precision": "bf16", **plain, **grid, **changes}
        training = DataRecipe.preset(self.plain["recovery"]["preset"], **changed)
        return self._here(replace(training, patience=plain.get("patience"), evaluate_every=None))

    def _here(self, training: DataRecipe) -> DataRecipe:
        if self.short:
            step: dict[str, Any] = {"steps": 1, "epochs": None, "warmup": 0, "patience": None, "batch_size": 8}
            training = replace(training, **step, compile=False)
        return training if self.device.type == "cuda" else replace(training, precision="float32", compile=False)

    def start(self) -> he.Ensemble:
        """The pretrained model; from scratch, a model whose weights are still to be drawn."""
        classes = self.source.load(given(self.suite, "train")).class_names
        size = self.plain["input_size"]
        if self.scratch:
            return small_vit(size, classes).to(self.device)
        return pretrained(self.source.root, self.plain["backbone"], size, classes).to(self.device)


def _held_out(plain: Mapping[str, Any]) -> SetRef:
    name, without = plain["source"].rpartition("/")[2], tuple(plain.get("without", ()))
    return SetRef(name, plain["source"], plain.get("split", "test"), without=without, labels="optional")


class Drawn(Samples):
    """At most `count` samples, the same ones every time."""

    def __init__(self, samples: Samples, count: int) -> None:
        order = np.random.default_rng(0).permutation(len(samples))[:count]
        self.samples = samples
        self.rows = torch.from_numpy(np.sort(order))
        self.labels = samples.labels[self.rows]

    def batch(self, rows: Tensor, augment: Augment) -> Any:
        return self.samples.batch(self.rows[rows], augment)
