"""Weights in 8 bits, by ONNX Runtime, of exported models: likelihood, order of answers, promise and time on a CPU.

A calibrated model is exported; ONNX Runtime quantises the products (weights in 8 bits, activations at each call) and
keeps the rule by which answers are accepted. The rows that certified it then certify the quantised model anew.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

import hydra_ensembles as he
from hydra_ensembles.batches import size_of
from hydra_ensembles.demo import load_backbone, load_sample
from hydra_ensembles.metrics.ood import aurc
from hydra_ensembles.store import Store
from hydra_ensembles.training.recipe import DataRecipe

from .classifiers import ClassifierTask
from .engine import MODELS
from .rows import Array
from .samples import Drawn, SampleBatches
from .sets import as_images
from .small import read
from .tables import write_csv
from .weights import fresh_classifier

TABLE, TURNS = "int8.csv", 30
RISKS = {"eurosat": 0.02, "sst2": 0.1}
TEXTS = 4000  # that train
Batches = Sequence[tuple[Any, torch.Tensor]]
HEAD = ("data", "weights", "threshold", "rows", "accuracy", "nll", "aurc", "accepted", "wrong", "risk", "same_labels")
TIMED = ("megabytes", "ms_a_row", "batch", "hardware", "onnxruntime", "torch")


def quantised(exported: Path) -> Path:
    """A file beside an exported model with all weights of products in 8 bits."""
    target, folded = (exported.with_name(f"{name}-{exported.name}") for name in ("int8", "folded"))
    quant_pre_process(exported, folded, skip_symbolic_shape=True)  # products of constants first
    plain = onnx.load(folded)
    del plain.graph.value_info[:]  # shapes from before the folding
    quantize_dynamic(plain, target, weight_type=QuantType.QInt8)
    return target


def session(path: Path) -> Callable[[Any], dict[str, Array]]:
    """Run a file on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    running = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names, wanted = [one.name for one in running.get_outputs()], [one.name for one in running.get_inputs()]

    def run(inputs: Any) -> dict[str, Array]:
        named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {wanted[0]: inputs}
        return dict(zip(names, running.run(None, {key: named[key].numpy() for key in wanted}), strict=True))

    return run


def answered(run: Callable[[Any], dict[str, Array]], batches: Batches) -> dict[str, Array]:
    """What a file says of all rows, and which answers are right."""
    parts = [run(inputs) for inputs, _ in batches]
    found = {key: np.concatenate([part[key] for part in parts]) for key in ("probs", "label", "confidence", "accept")}
    labels = np.concatenate([labels.numpy() for _, labels in batches])
    likelihood = found["probs"][np.arange(len(labels)), labels]
    return {**found, "right": found["label"] == labels, "nll": -np.log(np.maximum(likelihood, 1e-12))}


def compared(
    name: str, model: he.Ensemble, fits: Batches, certify: Batches, test: Batches, folder: Path
) -> Iterator[dict[str, Any]]:
    """The lines of a model, calibrated, in float32 and in 8 bits; in 8 bits also with a threshold of its own."""
    safe = he.calibrate(model, certify, risk=RISKS[name], train=fits)
    folder.mkdir(parents=True, exist_ok=True)
    exported = he.export(safe, folder / f"{name}.onnx")
    files = {"float32": exported, "int8": quantised(exported)}
    runs = {kind: session(path) for kind, path in files.items()}
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(TURNS):
        for kind, run in runs.items():
            began = time.process_time()
            run(test[0][0])
            times[kind].append((time.process_time() - began) / size_of(test[0][0]))
    said = {kind: answered(run, test) for kind, run in runs.items()}
    own = answered(runs["int8"], certify)
    promise = he.certify(own["confidence"], own["right"], risk=RISKS[name])
    sure = said["int8"]["confidence"] >= promise.threshold
    versions = (platform.machine(), onnxruntime.__version__, str(torch.__version__))
    for kind, threshold, accepted in (
        ("float32", "float32", said["float32"]["accept"]),
        ("int8", "float32", said["int8"]["accept"]),
        ("int8", "int8, by confidence", sure),
    ):
        rows = said[kind]
        wrong = float((~rows["right"][accepted]).mean()) if accepted.any() else 0.0
        area = aurc(torch.from_numpy(-rows["confidence"]), torch.from_numpy(~rows["right"]))
        shares = (rows["right"].mean(), rows["nll"].mean(), area, accepted.mean(), wrong, RISKS[name])
        same = (rows["label"] == said["float32"]["label"]).mean()
        size = files[kind].stat().st_size / 1e6
        timed = (size, 1000 * median(times[kind]), size_of(test[0][0]), *versions)
        line = (name, kind, threshold, len(accepted), *map(float, (*shares, same)), *timed)
        yield dict(zip((*HEAD, *TIMED), line, strict=True))


def of_demo(root: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The embedded model, on images of EuroSAT that it has not seen: half of them certify."""
    backbone, sample = load_backbone(), load_sample()
    prepare: Any = backbone.metadata.preprocessing
    known: Any = list(he.data.batches(sample["circuit_id"], prepare, 96))
    folder_of = root / "data" / "images" / "eurosat"
    parts = [as_images(he.data.load(folder_of, split=one)) for one in ("validation", "test")]
    inside = [he.data.only_classes(one, sample["test"].class_names, relabel=True) for one in parts]
    images, labels = read(inside, prepare, torch.cat([inputs for inputs, _ in known]))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    certify, test = (list(zip(images[one].split(32), labels[one].split(32), strict=True)) for one in order.chunk(2))
    yield from compared("eurosat", backbone, known, certify, test, folder)


def of_text(task: ClassifierTask, folder: Path) -> Iterator[dict[str, Any]]:
    """MiniLM, trained briefly on SST-2; held-out sentences certify."""

    def trained() -> he.Ensemble:
        training = DataRecipe(learning_rate=5e-5, classifier_rate=20.0, epochs=1, warmup=0.1, clip_norm=1.0, seed=0)
        lessons = SampleBatches(Drawn(task.train, TEXTS), 32, True)
        return he.finetune(fresh_classifier(task.start(), 0), lessons, training, progress=False)

    with Store(folder / "text", {"texts": TEXTS}) as store:
        model = store.step("single", trained, MODELS)
    parts = (task.inside["calibrate"], task.inside["B"], task.reported(task.suite.id))
    fits, certify, test = (list(SampleBatches(one, 32)) for one in parts)
    yield from compared("sst2", model, fits, certify, test, folder)


def write_table(root: Path, text: ClassifierTask, folder: Path, results: Path) -> Path:
    """Write `tables/int8.csv`."""
    lines = [*of_demo(root, folder), *of_text(text, folder)]
    return write_csv(results / "tables" / TABLE, [(*HEAD, *TIMED), *([*line.values()] for line in lines)])
