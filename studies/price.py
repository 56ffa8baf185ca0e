"""What an ensemble brings for its price: the model a user has, and what is fused of fine-tunings like it.

Three stages. `train` makes the models of a task and a seed and measures every candidate on half B and on OOD sets that
no report has. `choose` takes one setting for all tasks, by a rule that the recipe states. `report` opens the test sets.
What is there stays, so that a stopped run goes on, and tasks and seeds may run side by side.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, cast

import numpy as np
import torch
import yaml
from scipy.stats import t as student
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, write_json
from hydra_ensembles.metrics import aurc
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.schema import from_plain

from .engine import device_name
from .recipe import derived_seed
from .samples import ImageSamples, Prepared, SampleBatches, Samples
from .sets import DataFolder, at_most, given, halves, suite
from .weights import fresh_classifier, pretrained, tokenizer

RECIPE = Path(__file__).parent / "recipes" / "price.yaml"
SINGLE, LONGER, DEEP, SOUP, HYDRA = "Single", "Single, trained twice as long", "Deep Ensemble", "Soup", "Hydra"
BATCH = {"image": 500, "text": 250}
FAMILIAR = 12_000  # training samples, at most, that familiarity is fitted on
NUMBERS = {  # what is reported, by the names of an evaluation
    "accuracy": "accuracy",
    "nll": "nll",
    "ece": "ece",
    "aurc": "aurc",
    "auroc_msp": "all.auroc",
    "auroc_mahalanobis": "mahalanobis:all.auroc",
}
Stage = Literal["held_out", "report"]


def recipe() -> dict[str, Any]:
    """The settings of the study."""
    return cast(dict[str, Any], yaml.safe_load(RECIPE.read_text(encoding="utf-8")))


class Task:
    """The data of a task, on a device; `share` of every set, for a trial."""

    def __init__(
        self, name: str, plain: Mapping[str, Any], source: DataFolder, device: torch.device, share: float = 1.0
    ) -> None:
        self.name, self.plain, self.source, self.device, self.share = name, plain, source, device, share
        self.suite = suite(plain["suite"])
        self.kind = "text" if plain["backbone"] == "all_minilm_l6_v2" else "image"

    def read(self, *references: SetRef) -> Samples:
        """Sets of one kind as one, the way the backbone of the task takes them."""
        return self.samples(*(self.source.load(one) for one in references))

    def samples(self, *sets: AnyDataset) -> Samples:
        """The same, of sets that are loaded."""
        parts = [one if self.share == 1 else at_most(one, max(64, round(self.share * len(one)))) for one in sets]
        images = [one for one in parts if isinstance(one, ImageDataset)]
        if not images:
            return Prepared(parts[0], tokenizer(self.source.root, self.plain["input_size"]))
        read = [ImageSamples.read(one, self.plain["input_size"], self.device) for one in images]
        pixels, labels = torch.cat([one.pixels for one in read]), torch.cat([one.labels for one in read])
        return ImageSamples(pixels, labels, read[0].size)

    @cached_property
    def train(self) -> Samples:
        """Training data."""
        reference = given(self.suite, "train")
        splits = self.plain.get("train", [reference.split])
        loaded = [self.source.load(replace(reference, split=split)) for split in splits]
        return self.samples(*(at_most(one, self.plain.get("limit")) for one in loaded))

    @cached_property
    def halves(self) -> tuple[Samples, Samples]:
        """Half A of the validation set, which calibrates, and half B, which chooses."""
        first, second = halves(self.source.load(given(self.suite, "validation")))
        return self.samples(first), self.samples(second)

    def batches(self, samples: Samples) -> SampleBatches:
        """Batches to evaluate on."""
        return SampleBatches(samples, BATCH[self.kind])

    def inside(self, stage: Stage) -> SampleBatches:
        """In-distribution samples of a stage."""
        return self.batches(self.halves[1] if stage == "held_out" else self.read(self.suite.id))

    @cache  # noqa: B019  a task lives as long as its run
    def outside(self, stage: Stage) -> dict[str, dict[str, SampleBatches]]:
        """OOD sets of a stage, by group; read once."""
        groups: dict[str, Sequence[SetRef]] = {"near": self.suite.near, "far": self.suite.far}
        if stage == "held_out":
            groups = {"far": [_held_out(one) for one in self.plain["held_out"]]}
        return {key: {one.name: self.batches(self.read(one)) for one in refs} for key, refs in groups.items()}

    def start(self) -> he.Ensemble:
        """The pretrained model."""
        classes = self.source.load(given(self.suite, "train")).class_names
        return pretrained(self.source.root, self.plain["backbone"], self.plain["input_size"], classes).to(self.device)


def _held_out(plain: Mapping[str, str]) -> SetRef:
    name = plain["source"].rpartition("/")[2]
    return SetRef(name, plain["source"], plain.get("split", "test"), labels="optional")


class SeedOfTask:
    """One seed of a task: its models, made once and kept in its folder, and what they are worth."""

    def __init__(self, task: Task, seed: int, settings: Mapping[str, Any], output: Path) -> None:
        self.task, self.seed, self.settings = task, seed, settings
        self.folder = output / task.name / f"seed-{seed}"

    def _made(self, name: str, start: Any, seed: int) -> he.Ensemble:
        """A model trained by the recipe of the task, or the one in the folder; `start` gives what it starts from."""
        place = self.folder / "models" / name
        if not place.exists():
            begun, training = time.monotonic(), from_plain(he.Recipe, {**self.task.plain["training"], "seed": seed})
            if self.task.device.type != "cuda":
                training = replace(training, precision="float32")
            batches = SampleBatches(self.task.train, training.batch_size or 128, training=True)
            he.finetune(start(), batches, training, progress=False).save_pretrained(place)
            print(f"{self.task.name} seed {self.seed}: {name} {time.monotonic() - begun:.0f} s", flush=True)
        return he.Ensemble.from_pretrained(place).to(self.task.device)

    def single(self, index: int = 0) -> he.Ensemble:
        """A fine-tuning of the pretrained model, with a classifier, an order and an augmentation of its own."""
        seed = derived_seed(self.seed, "backbone", index)
        return self._made(str(index), lambda: fresh_classifier(self.task.start(), seed), seed)

    def longer(self) -> he.Ensemble:
        """The single model, trained once more as long."""
        return self._made("longer", self.single, derived_seed(self.seed, "longer"))

    @cached_property
    def singles(self) -> list[he.Ensemble]:
        """As many as an ensemble has members."""
        return [self.single(index) for index in range(self.settings["members"])]

    def hydra(self, candidate: Mapping[str, Any]) -> he.Ensemble:
        """The fine-tunings above the mean of their first layers."""
        trunk = round(candidate["trunk"] * self.singles[0].num_layers)
        return he.fuse(self.singles, mlp=candidate["mlp"], average=trunk)

    def measured(self, model: he.Ensemble, stage: Stage) -> dict[str, Any]:
        """What a model is worth: familiarity from training data, calibrated on half A."""
        task = self.task
        model = he.fit_familiarity(model, task.batches(Drawn(task.train, FAMILIAR)), "mahalanobis")
        model = he.calibrate(model, task.batches(task.halves[0]))
        found = he.evaluate(
            model,
            task.inside(stage),
            task.outside(stage),
            scores=("mahalanobis", "energy", "entropy"),
            keep_logits=True,
            progress=False,
        )
        assert found.logits is not None
        answers = model.prediction(found.logits.id.logits)
        wrong = answers.label != found.logits.id.labels
        numbers = found.numbers() | {"aurc": aurc(answers.score("msp"), wrong)}
        counts = model.describe()
        return {
            **{key: numbers[full] for key, full in NUMBERS.items()},
            "auroc_energy": numbers["energy:all.auroc"],
            "auroc_entropy": numbers["entropy:all.auroc"],
            "each": {name: numbers[name] for name in numbers if ".auroc" in name and "ood." in name},
            "accepted": numbers["selective.accepted"],
            "multiply_adds": counts.multiply_adds,
            "parameters": counts.parameters,
            "samples": found.samples,
        }

    def train(self) -> None:
        """Make every model, and measure candidates and fixed rows on held-out data."""
        place = self.folder / "held_out.json"
        self._fixed()
        if "held_out" in self.task.plain and self.seed in self.settings["seeds"] and not place.exists():
            rows = {key: self.measured(self.hydra(one), "held_out") for key, one in candidates(self.settings).items()}
            write_json(place, rows | {name: self.measured(model, "held_out") for name, model in self._fixed().items()})

    def report(self, chosen: Mapping[str, Any]) -> None:
        """Open the test sets."""
        place = self.folder / "report.json"
        if not place.exists():
            models = {**self._fixed(), HYDRA: self.hydra(chosen)}
            write_json(place, {name: self.measured(model, "report") for name, model in models.items()})

    def precisions(self) -> dict[str, Any]:
        """Accuracy on half B of members above a common trunk that train together, in float32 and in bfloat16."""
        task, found = self.task, {}
        for precision in ("float32", "bf16"):
            plain = {**task.plain["training"], "seed": derived_seed(self.seed, "together"), "precision": precision}
            training = from_plain(he.Recipe, plain)
            config = he.HydraConfig(strategy="branches", training="together", recipe=training, calibrate=False)
            train = SampleBatches(task.train, training.batch_size or 128, training=True)
            hydra = he.build(self.single(), config, train=train, pretrained=task.start(), progress=False)
            found[precision] = he.evaluate(hydra, task.inside("held_out"), progress=False).id.accuracy
        return {"task": task.name, "seed": self.seed, "accuracy": found}

    def _fixed(self) -> dict[str, he.Ensemble]:
        deep, mixed = he.Ensemble.stack(self.singles), he.soup(self.singles)
        return {SINGLE: self.singles[0], LONGER: self.longer(), DEEP: deep, SOUP: mixed}


class Drawn(Samples):
    """At most so many samples, the same ones every time."""

    def __init__(self, samples: Samples, count: int) -> None:
        order = np.random.default_rng(0).permutation(len(samples))[:count]
        self.samples, self.rows = samples, torch.from_numpy(np.sort(order))
        self.labels = samples.labels[self.rows]

    def batch(self, rows: Tensor, augment: bool) -> Any:
        return self.samples.batch(self.rows[rows], augment)


def candidates(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fusings to choose from, by name."""
    return {f"trunk {one['trunk']:.2f}, mlp {one['mlp']}": one for one in settings["candidates"]}


def choose(settings: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """One fusing for all tasks, from what every task and seed measured on held-out data; written down."""
    tasks = [name for name, task in settings["tasks"].items() if "held_out" in task]
    places = (output / task / f"seed-{seed}" / "held_out.json" for task in tasks for seed in settings["seeds"])
    rows = [read_json(path) for path in _all_there(places)]
    ratios = {
        name: {key: mean(row[name][key] / row[SINGLE][key] for row in rows) for key in ("nll", "aurc", "multiply_adds")}
        for name in candidates(settings)
    }
    fitting = [name for name in ratios if ratios[name]["multiply_adds"] <= settings["most_work"]]
    if not fitting:
        raise DataError(f"no candidate has at most {settings['most_work']} of Single's multiply-adds")
    best = min(fitting, key=lambda name: ratios[name]["nll"])
    found = {"chosen": best, "setting": candidates(settings)[best], "ratios": ratios}
    write_json(output / "choice.json", found)
    return found


def costs(settings: Mapping[str, Any], chosen: Mapping[str, Any], source: DataFolder, device: torch.device) -> Any:
    """Latency of every row side by side, by task, as ratios to Single; weights do not matter for it."""
    fast, found = device.type == "cuda", {}
    for name, plain in settings["tasks"].items():
        task = Task(name, plain, source, device)
        single, batch = task.start(), settings["cost_batch"]
        inputs = single.prepare(next(iter(SampleBatches(task.halves[0], batch)))[0])
        copies = [fresh_classifier(single, index) for index in range(settings["members"])]
        trunk = round(chosen["trunk"] * single.num_layers)
        apart = [_moved(one, index) for index, one in enumerate(copies)]
        models = {
            SINGLE: single,
            HYDRA: he.fuse(apart, mlp=chosen["mlp"], average=trunk),
            DEEP: he.Ensemble.stack(apart),
        }
        runs = {key: one.optimize(inputs, dtype=torch.bfloat16) if fast else one for key, one in models.items()}
        taken = measure_costs(runs, inputs, repeats=50 if fast else 3)
        found[name] = {one.name: {"latency_ms": one.latency_ms, "ratio": one.latency_ratio} for one in taken}
    about = {"device": device_name(device), "torch": torch.__version__}
    return {**about, "batch": settings["cost_batch"], "tasks": found}


def _moved(model: he.Ensemble, index: int) -> he.Ensemble:
    """A copy whose layers differ from those of other indices."""
    state = {name: tensor * (1 + 1e-4 * index) for name, tensor in model.state_dict().items()}
    return he.Ensemble.from_state(model.config, state, model.metadata)


def seeds_of(settings: Mapping[str, Any], task: str) -> list[int]:
    """The seeds of a task's report."""
    return cast(list[int], settings["tasks"][task].get("seeds", settings["seeds"]))


def _all_there(places: Iterable[Path]) -> list[Path]:
    places = list(places)
    missing = [str(path) for path in places if not path.exists()]
    if missing:
        raise DataError(f"not every task and seed is done, {missing[0]} and {len(missing) - 1} more are missing")
    return places


def summary(settings: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Means over seeds, and differences to Single of the same seed with intervals of Student's t over the seeds."""
    tables = {}
    for task in settings["tasks"]:
        seeds = seeds_of(settings, task)
        rows = [read_json(output / task / f"seed-{seed}" / "report.json") for seed in seeds]
        tables[task] = {
            name: {
                key: {
                    "mean": mean(row[name][key] for row in rows),
                    "difference": mean(differences := [row[name][key] - row[SINGLE][key] for row in rows]),
                    "half_width": float(student.ppf(0.975, len(seeds) - 1)) * stdev(differences) / len(seeds) ** 0.5,
                }
                for key in NUMBERS
            }
            for name in rows[0]
        }
    return tables


def collected(settings: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Everything of a finished run, as it is stored."""
    done = [(task, seed) for task in settings["tasks"] for seed in seeds_of(settings, task)]
    folders = {f"{task}/{seed}": output / task / f"seed-{seed}" for task, seed in done}
    _all_there(folder / "report.json" for folder in folders.values())
    runs = {
        key: {stage: read_json(file) for stage in ("held_out", "report") if (file := folder / f"{stage}.json").exists()}
        for key, folder in folders.items()
    }
    return {
        "recipe": dict(settings),
        "choice": read_json(output / "choice.json"),
        "costs": read_json(output / "costs.json"),
        "precisions": read_json(output / "precisions.json"),
        "tables": summary(settings, output),
        "runs": runs,
        "version": he.__version__,
    }


def price_table(found: Mapping[str, Any]) -> str:
    """Every task and method: mean over seeds; of Hydra also the difference to Single with its interval."""
    tables, costs = found["tables"], found["costs"]
    scale = {key: 1.0 if key == "nll" else 100.0 for key in NUMBERS}
    titles = ["accuracy", "NLL", "ECE", "AURC", "AUROC, MSP", "AUROC, Mahalanobis"]
    lines = ["| task | method | cost | " + " | ".join(titles) + " |", "|---|---|---:|" + "---:|" * len(titles)]
    for task, rows in tables.items():
        for name, row in rows.items():
            ratio = costs["tasks"][task].get(name, costs["tasks"][task][SINGLE])["ratio"]
            cells = [f"{scale[key] * row[key]['mean']:.{3 if key == 'nll' else 2}f}" for key in NUMBERS]
            lines.append(f"| {task} | {name} | {ratio:.2f}x | " + " | ".join(cells) + " |")
        row = rows[HYDRA]
        cells = [
            f"{scale[key] * row[key]['difference']:+.{digits}f} ± {scale[key] * row[key]['half_width']:.{digits}f}"
            for key in NUMBERS
            for digits in [3 if key == "nll" else 2]
        ]
        lines.append(f"| {task} | *Hydra less Single* | | " + " | ".join(cells) + " |")
    settings = found["recipe"]
    count, seeds = settings["members"], ", ".join(f"{len(seeds_of(settings, task))} on {task}" for task in tables)
    about = (
        f"Means over seeds ({seeds}); differences are to Single of the same seed, ± the half width of Student's 95 % "
        f"interval over the seeds. Ensembles have {count} members. Per cent but for NLL; calibrated on held-out data. "
        "AUROC: the mean over the OOD sets of a task. Cost: a batch of "
        f"{costs['batch']} on an {costs['device']}, bfloat16, against Single compiled. From `results/price.json`."
    )
    return "\n".join([*lines, "", about])
