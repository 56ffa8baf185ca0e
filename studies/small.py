"""Rows of models that a CPU makes within an hour: a classifier on frozen features, corrupted, and the demo's members.

`frozen`: a linear classifier on DINOv2's features answers test images of CIFAR-100 as they are, and others under each
corruption and severity. `demo`: for each seed, three fine-tunings of the demo's model on its 280 images answer all
images of EuroSAT on which nothing was trained or fitted.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import Prediction
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.demo import load_backbone, load_sample
from hydra_ensembles.demo.run import EPOCHS, FAR, NEAR, demo_config, training_batches
from hydra_ensembles.familiarity import Answered, fit_on
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.store import TENSORS, Store

from .corruptions import CORRUPTIONS, SEVERITIES, corrupted
from .engine import MODELS, of_set, slug, temperature_of
from .rows import SINGLE, STORED, Array, write_rows
from .samples import ImageSamples, SampleBatches
from .sets import as_images, at_most
from .tables import write_csv
from .weights import pretrained

SIZE = 112  # of images for DINOv2, as in the study of CIFAR-100
FITTED, CLEAN, OF_EACH = 2000, 2700, 40  # images: training, test as they are, test of each corruption
DECAY = 1e-3  # of the linear classifier
SEEDS, MEMBERS, FOREIGN, TURNS = 3, 3, 200, 20  # of the demo


# --- frozen features -------------------------------------------------------------------------------------------------


def frozen(root: Path, output: Path, results: Path) -> Path:
    """Rows of a linear classifier on frozen features; features are kept in a folder, so a stopped run resumes."""
    folder = root / "data" / "images" / "cifar100_full"
    train = at_most(as_images(he.data.load(folder, split="train-0")), FITTED)
    test = as_images(he.data.load(folder, split="test"))
    order = np.random.default_rng(0).permutation(len(test))
    sets: dict[str, ImageDataset] = {"train": train, "cifar100": test.select(order[:CLEAN])}
    for number, name in enumerate(CORRUPTIONS):  # each has images of its own, the same ones for every severity
        start = CLEAN + number * OF_EACH
        mine = test.select(order[start : start + OF_EACH])
        sets |= {f"{name} {level}": corrupted(mine, name, level, parameters="cifar") for level in SEVERITIES}
    model = pretrained(root, "dinov2_vits14", SIZE, train.class_names)
    with Store(output / "frozen", {"fitted": FITTED, "clean": CLEAN, "of each": OF_EACH, "size": SIZE}) as store:
        found = {name: store.step(name, partial(features_of, model, one), TENSORS) for name, one in sets.items()}
    fitted = found.pop("train")
    classifier = linear_classifier(fitted["features"], fitted["labels"], len(train.class_names))
    logits = {name: classifier(one["features"])[None] for name, one in found.items()}  # [1, N, C]
    rows = Answered(fitted["features"][None], classifier(fitted["features"])[None], fitted["labels"], fitted["labels"])
    familiarity = fit_on(model, rows, ["mahalanobis"], np.random.default_rng(0))
    columns: dict[str, Array] = {}
    for name, one in found.items():
        about = familiarity.about(familiarity.scores(one["features"][None], logits[name]))
        answers = Calibration().prediction(logits[name], unfamiliarity=about)
        said = of_set(answers, answers, one["labels"])
        columns |= {f"cifar100|{name}|{key}": said[key] for key in ("correct", "doubt", "mahalanobis")}
    target = results / "rows" / "cifar100-frozen.parquet"
    write_rows(
        target, {"name": "cifar100-frozen", "tasks": {"cifar100": {"shift": [*found][1:]}}}, {(SINGLE, 0): columns}
    )
    return target


@torch.inference_mode()
def features_of(model: he.Ensemble, dataset: ImageDataset) -> dict[str, Tensor]:
    """Features `[N, d]` and labels `[N]`."""
    samples = ImageSamples.read(dataset, SIZE, torch.device("cpu"))
    parts = [(model.features(inputs)[0], labels) for inputs, labels in SampleBatches(samples, 20)]
    features, labels = (torch.cat(one) for one in zip(*parts, strict=True))
    return {"features": features, "labels": labels}


def linear_classifier(features: Tensor, labels: Tensor, classes: int) -> torch.nn.Linear:
    """Logistic regression on standardised features, by L-BFGS."""
    mean, deviation = features.mean(0), features.std(0)
    inputs = (features - mean) / deviation
    layer = torch.nn.Linear(features.shape[1], classes)
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = F.cross_entropy(layer(inputs), labels) + DECAY * layer.weight.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():  # the same function of plain features
        layer.weight.div_(deviation)
        layer.bias.sub_(layer.weight @ mean)
    return layer.requires_grad_(False)


# --- the demo --------------------------------------------------------------------------------------------------------


def demo(root: Path, output: Path, results: Path, processes: int = 1) -> Path:
    """Rows and prices of the demo: its model, and soup, Hydra and Deep Ensemble of its fine-tunings."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.map(partial(demo_seed, root, output), range(SEEDS))
    times = demo_times(output)
    lines: list[list[Any]] = [["method", "time"], *([name, one / times[SINGLE]] for name, one in times.items())]
    write_csv(results / "tables" / "demo_costs.csv", lines)
    by_run = {(method, seed): columns for seed, part in enumerate(parts) for method, columns in part.items()}
    about = {"name": "demo", "tasks": {"eurosat": {"near": [*NEAR], "far": [*FAR]}}}
    write_rows(results / "rows" / "demo.parquet", about, by_run)
    return results / "rows" / "demo.parquet"


@torch.inference_mode()
def demo_times(output: Path) -> dict[str, float]:
    """Processor time of 32 images by each of the demo's models at its fastest, in turn, on one thread."""
    torch.set_num_threads(1)
    members, inputs = (
        [he.load(output / "demo-0" / f"member-{one}") for one in range(MEMBERS)],
        torch.randn(32, 3, 64, 64),
    )
    models = demo_models(load_backbone(), members)
    runners = {name: model.optimize(inputs, compile=False) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, runner in runners.items():
            began = time.process_time()
            runner(inputs)
            times[name].append(time.process_time() - began)
    return {name: median(one[1:]) for name, one in times.items()}


def demo_models(backbone: he.Ensemble, members: Sequence[he.Ensemble]) -> dict[str, he.Ensemble]:
    """What the demo's rows compare."""
    fused = he.fuse(members, mlp="separate", average=0.8)
    return {SINGLE: backbone, "Soup": he.soup(members), "Hydra": fused, "Deep Ensembles": he.Ensemble.stack(members)}


def demo_seed(root: Path, output: Path, seed: int) -> dict[str, dict[str, Array]]:
    """The columns of every method for one seed; its models and columns are kept."""
    backbone, sample, folder = load_backbone(), load_sample(), root / "data" / "images"
    prepare: Any = backbone.metadata.preprocessing
    known: list[Any] = list(he.data.batches(sample["circuit_id"], prepare, 96))  # fits familiarity and temperature
    fitted = torch.cat([batch[0] for batch in known])
    parts = [as_images(he.data.load(folder / "eurosat", split=split)) for split in ("validation", "test")]
    inside = [he.data.only_classes(one, sample["test"].class_names, relabel=True) for one in parts]
    foreign = {name: [he.data.only_classes(one, [name]) for one in parts] for name in NEAR}
    foreign |= {FAR[0]: [at_most(as_images(he.data.load(folder / "fashion_mnist", split="test")), FOREIGN)]}
    sets = {name: read(ones, prepare, fitted) for name, ones in {"eurosat": inside, **foreign}.items()}
    with Store(output / f"demo-{seed}", {"members": MEMBERS}) as store:
        members = [
            store.step(f"member-{one}", partial(tuned, backbone, sample, MEMBERS * seed + one), MODELS)
            for one in range(MEMBERS)
        ]
        said: dict[str, dict[str, Array]] = {}
        for name, model in demo_models(backbone, members).items():
            known_to = he.fit_familiarity(model, known, held_out=0.0)
            tensors = store.step(f"said-{slug(name)}", partial(said_of, known_to, known, sets), TENSORS)
            said[name] = {key: column.numpy() for key, column in tensors.items()}
    return said


def read(parts: Sequence[ImageDataset], prepare: Any, without: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs `[N, 3, h, w]` and labels `[N]` of sets, without the images `without`."""
    inputs, labels = zip(*(batch for one in parts for batch in he.data.batches(one, prepare, 100)), strict=True)
    left_out = {image.numpy().tobytes() for image in without}
    joined = torch.cat(inputs)
    kept = torch.tensor([image.numpy().tobytes() not in left_out for image in joined])
    return joined[kept], torch.cat(labels)[kept]


def tuned(backbone: he.Ensemble, sample: dict[str, ImageDataset], seed: int) -> he.Ensemble:
    """A fine-tuning of the whole model by the demo's recipe for its members."""
    recipe: Any = demo_config(seed, EPOCHS).recipe
    recipe = replace(recipe, last_blocks=None, reinit_classifier=None)
    return he.finetune(backbone, training_batches(sample, backbone, seed), recipe, progress=False)


def said_of(model: he.Ensemble, known: Sequence[Any], sets: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What a model says of each image of the sets, calibrated on the known ones."""
    answers = Prediction.concat([model.predict(inputs) for inputs, _ in known])
    rule = temperature_of(answers.member_logits, torch.cat([labels for _, labels in known]))
    columns: dict[str, Tensor] = {}
    for name, (inputs, labels) in sets.items():
        plain = Prediction.concat([model.predict(some) for some in inputs.split(100)])
        said = of_set(plain, rule.prediction(plain.member_logits), labels if name == "eurosat" else None)
        columns |= {f"eurosat|{name}|{key}": torch.from_numpy(one) for key, one in said.items() if key in STORED}
    return columns
