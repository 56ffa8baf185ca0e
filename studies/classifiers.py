"""Studies of classifiers: the data of a task by purpose, and one seed of it with the models that methods share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

import hydra_ensembles as he
from hydra_ensembles import HeadRanking, Prediction
from hydra_ensembles.batches import move
from hydra_ensembles.data import split
from hydra_ensembles.data.dataset import ImageDataset, TextDataset
from hydra_ensembles.heads.ranking import (
    CIRCUIT_ORDER,
    Members,
    Score,
    circuit_members,
    distinct_taylor,
    random_members,
)
from hydra_ensembles.preprocessing import TextPreprocessing
from hydra_ensembles.settings import from_plain
from hydra_ensembles.store import Store
from hydra_ensembles.training.recipe import DataRecipe

from .corruptions import CORRUPTIONS, SEVERITIES, corrupted
from .engine import Lab, Method, Set, Setting, Stage, Task
from .rows import HELD_OUT, SINGLE
from .samples import Drawn, ImageSamples, SampleBatches, Samples, TextSamples, resized
from .sets import SPLIT_SEED, DataFolder, apart_by_sentences, at_most, foreign_halves, halves, read_recipe
from .suites import SetRef, given, suite
from .weights import BACKBONES, SCRATCH, fresh_classifier, pretrained, redrawn, small_vit, tokenizer

INSIDE = ("rank", "calibrate", "B")
SPARE = 3  # extra heads that a circuit ranks, for members that would otherwise be equal
Heads = Literal["circuits", "taylor", "random"]
APART = ("methods", "seeds", "seeds_of", "held_out", "corruptions", "most", "fewest")  # settings that decide no model
LISTS = "Hydra, distilled"  # nor do lists of settings to choose from


def recipe() -> dict[str, Any]:
    """The settings of the studies of classifiers."""
    return read_recipe("classifiers")


class ClassifierTask(Task):
    """A task of the recipe, each set read on first use; `share` of every set, for a trial.

    Decoded images and tokens are kept in the folder `cache`, if given.
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
        self.name, self.plain = name, settings["tasks"][name]
        self.settings = {**settings, **{key: value for key, value in self.plain.items() if key in settings}}
        self.source, self.device, self.share, self.cache = source, device, share, cache
        self.suite = suite(self.plain["suite"])
        self.kind = "text" if self.suite.id.source.startswith("text/") else "image"
        self.scratch = self.plain["backbone"] == SCRATCH
        self._read: dict[str, Samples] = {}
        self.pack = source.root / "packed" / f"{name}.npz"

    @property
    def identity(self) -> dict[str, Any]:
        """All settings that decide its models."""
        keys = ("members", "circuits", "ties", "taylor_batches", "familiar", "oba_size")
        common = {key: self.settings[key] for key in keys}
        own = {key: value for key, value in self.plain.items() if key not in APART and not key.startswith(LISTS)}
        return {**common, "task": own, "share": self.share}

    @property
    def letter(self) -> bool:
        """Whether baselines have the paper's settings only, and members train as long as the paper's."""
        return bool(self.settings.get("letter", False))

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods of the task; a control study names its own."""
        from .methods import methods_of  # its methods take a lab of this file

        return methods_of(self)

    def seeds_of(self, method: str) -> Sequence[int]:
        """The seeds of a method in the report."""
        counts: Mapping[int, Sequence[str]] = self.plain.get("seeds_of", self.settings.get("seeds_of", {}))
        listed = [count for count, methods in counts.items() if method in methods]
        return range(max(listed)) if listed else list(self.plain.get("seeds", self.settings["seeds"]))

    def about(self) -> dict[str, Any]:
        """The OOD sets of the task, and the paper's task that it stands for."""
        groups = {group: [one.name for one in sets] for group, sets in self._foreign("report").items()}
        known = {**self.settings, **self.plain}
        fewest = {"fewest": known["fewest"]} if "fewest" in known else {}
        backbone = BACKBONES.get(self.plain["backbone"], self.plain["backbone"])
        return {"tasks": {self.suite.id.name: groups}, "paper": self.plain["paper"], "backbone": backbone, **fewest}

    @property
    def ranking_precision(self) -> str:
        return str(self.plain.get("ranking_precision", "highest"))

    def lab(self, number: int, store: Store, choices: Path) -> "ClassifierLab":
        return ClassifierLab(self, number, store, choices)

    # --- samples -----------------------------------------------------------------------------------------------------

    @property
    def alike(self) -> int:
        """Batches that are filled by length together; 0 leaves texts in the order of their data set."""
        return int(self.plain.get("alike", 0))

    def samples(self, *sets: Any) -> Samples:
        """Sets of one kind joined, as inputs of the task's backbone; a trial has some samples of every class."""
        if self.share < 1:
            limits = [max(64, 4 * len(data.class_names), round(self.share * len(data))) for data in sets]
            sets = tuple(map(at_most, sets, limits))
        return self.inputs(sets)

    def inputs(self, sets: Sequence[Any]) -> Samples:
        """All samples of the sets as inputs of the task's backbone."""
        images = [data for data in sets if isinstance(data, ImageDataset)]
        if not images:
            tokens = tokenizer(self.source.root, self.plain["input_size"], self.plain["backbone"])
            texts = TextSamples.read(cast(TextDataset, sets[0]), tokens, self.device, self.cache)
            return texts.by_length() if self.alike else texts
        parts = [ImageSamples.read(data, self.plain["input_size"], self.device, self.cache) for data in images]
        pixels, labels = torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
        return ImageSamples(pixels, labels, parts[0].size)

    @cached_property
    def _packed(self) -> Mapping[str, Mapping[str, Any]]:
        """The sets of a text task as tokens, if a file has them, so that no text is read; by name."""
        if not self.pack.is_file():
            return {}
        found: dict[str, dict[str, Any]] = {}
        with np.load(self.pack) as file:
            for key in file.files:
                name, _, part = key.partition("|")
                found.setdefault(name, {})[part] = file[key]
        return found

    def read(self, name: str, make: Callable[[], Samples]) -> Samples:
        """A set by name, read once; from the file with tokens if there is one."""
        if name not in self._read:
            tokens = self._packed.get(name)
            self._read[name] = make() if tokens is None else TextSamples.packed(tokens, self.device, self.share)
        return self._read[name]

    def write_pack(self) -> Path:
        """Write the tokens of all sets of a text task into one file of the data folder, for a machine without them."""
        stages: tuple[Stage, ...] = ("report", "held_out")
        references = [one for stage in stages for sets in self._foreign(stage).values() for one in sets]
        sets = {"train": self.train, "foreign": self.foreign, **self.inside}
        sets |= {one.name: self.reported(one) for one in (self.suite.id, *references)}
        arrays = {"classes|names": np.array(self.class_names)}
        for name, samples in sets.items():
            texts = cast(TextSamples, samples)
            widest = int(texts.widths.max())
            tokens = {part: one[:, :widest].cpu().numpy().astype(np.uint16) for part, one in texts.inputs.items()}
            arrays |= {f"{name}|{part}": one for part, one in tokens.items()} | {f"{name}|labels": texts.labels.numpy()}
        self.pack.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.pack, allow_pickle=False, **arrays)
        return self.pack

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the task's classes."""
        if "classes" in self._packed:
            return tuple(map(str, self._packed["classes"]["names"]))
        return self.source.load(given(self.suite, "train")).class_names

    @property
    def train(self) -> Samples:
        """Training data."""
        return self.read("train", self._train)

    def _train(self) -> Samples:
        return self.samples(*(at_most(one, self.plain.get("rows")) for one in self.trains_on()))

    def trains_on(self) -> Sequence[Any]:
        """The data sets that it trains on, before any limit on their rows."""
        if "sentences" in self.plain:
            return [self._by_sentences[1]]
        reference = given(self.suite, "train")
        splits = self.plain.get("train", [reference.split])
        return [self.source.load(replace(reference, split=name)) for name in splits]

    @property
    def validation(self) -> Any:
        """Held-out ID data."""
        if "sentences" in self.plain:
            return self._by_sentences[0]
        reference = given(self.suite, "validation")
        return self.source.load(replace(reference, rows=self.plain.get("validation_rows", reference.rows)))

    @cached_property
    def with_others(self) -> Samples:
        """Training images, and unlabelled ones of another source at their size."""
        train, other = cast(ImageSamples, self.train), self.source.load(_held_out(self.plain["others"]))
        pixels = cast(ImageSamples, self.samples(other)).pixels.float() / 255
        small = (255 * resized(pixels, train.pixels.shape[-1]).clamp(0, 1)).round().byte()
        labels = torch.cat([train.labels, torch.zeros(len(small), dtype=torch.long)])
        return ImageSamples(torch.cat([train.pixels, small]), labels, train.size)

    @cached_property
    def _by_sentences(self) -> tuple[TextDataset, TextDataset]:
        """Held-out sentences, and training texts that do not occur in them."""
        whole = self.source.load(replace(given(self.suite, "train"), rows=None))
        return apart_by_sentences(cast(TextDataset, whole), self.plain["sentences"])

    @cached_property
    def inside(self) -> dict[str, Samples]:
        """Held-out ID samples: `rank` and `calibrate` (half A) rank heads and calibrate, `B` chooses settings."""
        return {name: self.read(name, partial(self._half, name)) for name in INSIDE}

    def _half(self, name: str) -> Samples:
        return self.samples(self._halves[name])

    @cached_property
    def _halves(self) -> dict[str, Any]:
        half_a, half_b = halves(self.validation)
        count = min(self.settings["circuits"], len(half_a) // 2)
        ranks, calibrates = split(half_a, count / len(half_a), SPLIT_SEED, stratified=True)
        return dict(zip(INSIDE, (ranks, calibrates, half_b), strict=True))

    @property
    def foreign(self) -> Samples:
        """OOD samples that rank heads; they are not reported."""
        return self.read("foreign", self._ranking_foreign)

    def _ranking_foreign(self) -> Samples:
        half, _ = foreign_halves(self.source.load(self.suite.circuit_ood))
        return self.samples(at_most(half, self.settings["circuits"]))

    def calibration(self) -> Set:
        return Set(self.suite.id.name, "calibration", "id", self.inside["calibrate"])

    def sets(self, stage: Stage) -> Iterator[Set]:
        """Half B and held-out OOD sets; or the test sets, and what calibrates; or corrupted test images."""
        task = self.suite.id.name
        if stage == "shift":
            yield from self._corrupted() if "corruptions" in self.plain else ()
            return
        yield Set(task, task, "id", self.inside["B"] if stage == "held_out" else self.reported(self.suite.id))
        if stage == "report":
            yield Set(task, HELD_OUT, "held-out", self.inside["calibrate"])
        for group, references in self._foreign(stage).items():
            for reference in references:
                yield Set(task, reference.name, group, self.reported(reference))

    def _foreign(self, stage: Stage) -> dict[str, Sequence[SetRef]]:
        if stage == "held_out":
            return {"far": [_held_out(plain) for plain in self.plain["held_out"]]}
        return {"near": self.suite.near, "far": self.suite.far}

    def reported(self, reference: SetRef) -> Samples:
        """A test set, read once."""
        most = None if reference == self.suite.id else self.settings["most"]
        return self.read(reference.name, lambda: self.samples(at_most(self.source.load(reference), most)))

    def _corrupted(self) -> Iterator[Set]:
        """Some test images under every corruption and severity."""
        images = self.pictures(self.settings["shift"]["images"])
        for name in CORRUPTIONS:
            for level in SEVERITIES:
                changed = corrupted(images, name, level, parameters=self.plain["corruptions"])
                yield Set(self.suite.id.name, f"{name} {level}", "shift", self.changed([changed]))

    def pictures(self, count: int | None) -> ImageDataset:
        """Some test images, of the size that the parameters of the corruptions are for."""
        return at_most(self.source.images(self.suite.id), count)

    def changed(self, sets: Sequence[ImageDataset]) -> Samples:
        """Pictures, corrupted or not, as inputs of the task's backbone."""
        return self.inputs(sets)

    def batches(self, samples: Samples) -> SampleBatches:
        return SampleBatches(samples, {"image": 500, "text": 250}[self.kind])

    # --- training ----------------------------------------------------------------------------------------------------

    def lessons(self, training: DataRecipe) -> Any:
        """Training batches for a recipe, with its augmentation."""
        return SampleBatches(self.train, training.batch_size or 128, training.rand_augment or True, self.alike)

    def training(self, **changes: Any) -> DataRecipe:
        """Single's recipe, possibly a preset, with changes; in float32 and not compiled without a GPU."""
        grid: dict[str, Any] = {"grid": ()} if "learning_rate" in changes else {}
        plain = {**self.plain["training"], **grid, **changes}
        if "preset" not in plain:
            return self._here(from_plain(DataRecipe, plain))
        return self._here(DataRecipe.preset(plain.pop("preset"), **{"precision": "bf16", **plain}))

    def recovery(self, preset: str | None = None, **changes: Any) -> DataRecipe:
        """The paper's training after pruning (D.2) with the study's steps; the caller gives the learning rate."""
        plain = {key: value for key, value in self.plain["recovery"].items() if key not in ("preset", "prune")}
        grid = {"grid": ()} if "learning_rate" in changes else {}
        training = DataRecipe.preset(
            preset or self.plain["recovery"]["preset"], **{"precision": "bf16", **plain, **grid, **changes}
        )
        return self._here(replace(training, patience=plain.get("patience"), evaluate_every=None))

    def _here(self, training: DataRecipe) -> DataRecipe:
        return training if self.device.type == "cuda" else replace(training, precision="float32", compile=False)

    def start(self) -> he.Ensemble:
        """The pretrained model; from scratch, a model whose weights are still to be drawn."""
        classes, size = self.class_names, self.plain["input_size"]
        if self.scratch:
            return small_vit(size, classes).to(self.device)
        return pretrained(self.source.root, self.plain["backbone"], size, classes).to(self.device)


def _held_out(plain: Mapping[str, Any]) -> SetRef:
    name, without = plain["source"].rpartition("/")[2], tuple(plain.get("without", ()))
    return SetRef(name, plain["source"], plain.get("split", "test"), without=without, labels="optional")


# --- a seed ----------------------------------------------------------------------------------------------------------


def read_by(model: Any, samples: Samples) -> Samples:
    """Samples as a model reads them: texts within its template, if it has one."""
    prepare = model.metadata.preprocessing
    templated = isinstance(samples, TextSamples) and isinstance(prepare, TextPreprocessing) and prepare.template
    return cast(TextSamples, samples).templated(prepare) if templated else samples


class ClassifierLab(Lab):
    """Models of one seed of a task."""

    task: ClassifierTask

    def model(self, method: str, setting: Setting | None = None) -> Any:
        """A method's model, by default with the chosen setting."""
        return self.task.methods[method].make(self, self.setting(method) if setting is None else setting)

    def whole(self, method: str) -> Any:
        return self.model(method)

    def answering(self, method: str, setting: Setting) -> Callable[[Set], Prediction]:
        model = self.model(method, setting)
        if isinstance(model, he.Ensemble):
            model = he.fit_familiarity(model, self.familiar(model), score="mahalanobis")
        return lambda one: self.answered(model, read_by(model, one.samples))

    @torch.no_grad()
    def answered(self, model: Any, samples: Samples) -> Prediction:
        """Predict on samples, as the model is."""
        batches = (move(inputs, self.task.device, torch.float32) for inputs, _ in self.task.batches(samples))
        return Prediction.concat([model.predict(inputs) for inputs in batches])

    def familiar(self, model: he.Ensemble) -> SampleBatches:
        """Training samples for fitting familiarity."""
        return self.task.batches(Drawn(read_by(model, self.task.train), self.task.settings["familiar"]))

    @property
    def members(self) -> int:
        """Number of members of an ensemble."""
        return int(self.task.settings["members"])

    def trained(self, name: str, start: Callable[[], he.Ensemble], training: DataRecipe) -> he.Ensemble:
        """Train the model of `start()` with a recipe; kept by name."""
        task = self.task

        def make() -> he.Ensemble:
            held_out = task.batches(task.inside["B"]) if training.patience is not None else None
            return he.finetune(start(), task.lessons(training), training, held_out, progress=False)

        return self.kept(name, make)

    def training(self, **changes: Any) -> DataRecipe:
        """Single's recipe; if it has several learning rates, with the one that half B chose."""
        if len(self.task.training().rates) > 1 and "learning_rate" not in changes:
            changes["learning_rate"] = float(self.setting(SINGLE)["rate"])
        return self.task.training(**changes)

    def single(self, index: int = 0, rate: float | None = None) -> he.Ensemble:
        """A fine-tuning with its own classifier, data order and augmentation; `rate` overrides the learning rate."""
        seed = self.derived("backbone", index)
        training = self.training(seed=seed, **({} if rate is None else {"learning_rate": rate}))
        suffix = f"-rate-{training.learning_rate:g}" if len(self.task.training().rates) > 1 else ""
        return self.trained(f"single-{index}{suffix}", lambda: self.fresh(seed), training)

    def fresh(self, seed: int) -> he.Ensemble:
        """The start of a training: the pretrained model with a classifier drawn by the seed, or all weights drawn."""
        start = self.task.start()
        return redrawn(start, seed) if self.task.scratch else fresh_classifier(start, seed)

    @cached_property
    def base(self) -> he.Ensemble:
        """The model a user has."""
        return self.single()

    @property
    def singles(self) -> list[he.Ensemble]:
        """As many fine-tunings as an ensemble has members; the first is Single."""
        return [self.base, *(self.single(index) for index in range(1, self.members))]

    def fine_tunings(self, count: int) -> list[he.Ensemble]:
        """As many; beyond this seed's own those of the other seeds, which must be finished: first the first of each."""
        seeds, folder = self.task.seeds_of(SINGLE), self.store.path("")
        others = [(number, index) for index in range(self.members) for number in seeds if number != self.number]
        turned = sorted(others, key=lambda one: (one[1], (one[0] - self.number) % len(seeds)))
        assert folder is not None
        paths = [folder.parent / f"seed-{number}" / "models" / f"single-{index}" for number, index in turned]
        more = [he.load(path).to(self.task.device).eval() for path in paths[: max(0, count - self.members)]]
        return [*self.singles[:count], *more]

    # --- heads -------------------------------------------------------------------------------------------------------

    def circuit(self, score: Score, budget: int | None = None, layers: Sequence[int] | None = None) -> HeadRanking:
        """A circuit of Single on the ranking samples; ranks `budget` heads, by default enough for the paper's share."""
        count = budget or self.prune + SPARE
        lowest = 0 if layers is None else min(layers)
        how = {"score": score, "budget": count, "layers": layers, "ties": self.task.settings["ties"]}
        return self.extracted(f"{score}-{count}-{lowest}", self.sides, **how)

    def sides(self) -> tuple[he.Ensemble, SampleBatches, SampleBatches]:
        """Inputs of circuit extraction: Single, and the ID and OOD samples that rank heads."""
        return self.base, self.task.batches(self.task.inside["rank"]), self.task.batches(self.task.foreign)

    def taylor(self, draw: int = 0, budget: int | None = None) -> HeadRanking:
        """A Taylor ranking of Single on randomly drawn batches; `draw` is part of the random seed."""
        count = budget or self.prune
        batches = SampleBatches(self.task.train, 128, training=True)

        def rank() -> HeadRanking:
            drawn, used = self.derived("taylor", draw), self.task.settings["taylor_batches"]
            return he.taylor(self.base, batches, budget=count, seed=drawn, calibration_batches=used)

        return self.ranked(f"taylor-{count}-{draw}", rank)

    @property
    def prune(self) -> int:
        """Heads that each of the paper's members loses."""
        return int(self.task.plain["recovery"]["prune"])

    def heads(self, kind: Heads) -> Members:
        """The heads that each of the paper's members loses."""
        if kind == "random":
            return random_members(self.base, self.prune, self.members, self.number)
        if kind == "taylor":
            return tuple(one.first(self.prune) for _, one in distinct_taylor(self.taylor, self.prune, self.members))
        return circuit_members({score: self.circuit(score) for score in CIRCUIT_ORDER}, self.prune, self.members)

    def lost(self, kind: Heads, index: int) -> Sequence[he.Head]:
        """The heads that one of the paper's members loses; the first by Taylor exists even if no second one differs."""
        return self.taylor().first(self.prune) if (kind, index) == ("taylor", 0) else self.heads(kind)[index]

    def recovered(self, kind: Heads, index: int, rate: float, preset: str | None = None) -> he.Ensemble:
        """One of the paper's members: Single without its heads, trained by D.2, or by another preset."""
        training = self.task.recovery(preset, seed=self.derived("recovery", index), learning_rate=rate)
        name = f"{kind}-{index}-rate-{rate:g}{'' if preset is None else f'-{preset}'}"
        return self.trained(name, lambda: he.prune(self.base, self.lost(kind, index)), training)

    def whole_recovered(self, rate: float) -> he.Ensemble:
        """Single, trained by D.2 with nothing pruned."""
        training = self.task.recovery(seed=self.derived("recovery", 0), learning_rate=rate)
        return self.trained(f"whole-rate-{rate:g}", lambda: self.base, training)
