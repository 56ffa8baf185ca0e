"""How the model and the images of the embedded demo were made.

Three steps, so that the training machine needs no data sets:

    python examples/train_demo_backbone.py pack --shared FOLDER --output carry/demo
    python examples/train_demo_backbone.py train --bundle carry/demo --output carry/demo_trained
    python examples/train_demo_backbone.py store --trained carry/demo_trained

`pack` reads EuroSAT and Fashion-MNIST (`data/images/` below FOLDER) and writes the demo's sample into the package.
`train` trains the same small vision transformer from several seeds: on 7 of EuroSAT's 10 classes, from scratch, keeping
the last epoch's weights, so that no held-out image chooses anything. `store` copies the model of seed 0 into the
package. To check on a CPU that it runs: `train --epochs 1 --limit 256 --seeds 1`.
"""

import argparse
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.data import ImageDataset
from hydra_ensembles.demo import load_sample
from hydra_ensembles.demo.run import read_images

PACKAGE = Path(he.__file__).parent / "demo"
SIZE = 64
PREPROCESSING = he.ImagePreprocessing(size=(SIZE, SIZE), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
CIRCUIT_OOD, NEAR = "PermanentCrop", ("AnnualCrop", "River")
SEED = 0
TRAIN, CIRCUIT, CALIBRATION, FAR = 700, 256, 256, 300  # images drawn; near sets without training images
KEPT = {"train": 280, "circuit_id": 192, "circuit_ood": 128, "calibration": 256, "test": 420}  # of them, in the package
KEPT |= {"AnnualCrop": 75, "River": 75, "FashionMNIST": 100}
BATCH, LEARNING_RATE, WEIGHT_DECAY, WARMUP, DROP_PATH = 256, 1e-3, 0.05, 0.08, 0.1


# --- pack ------------------------------------------------------------------------------------------------


def pack(shared: Path, output: Path) -> None:
    """Write the training images to `output`, and the demo's sample to `output` and the package."""
    output.mkdir(parents=True, exist_ok=True)
    source = shared / "data" / "images"
    train, validation, test = (
        _without_ood(data.load(source / "eurosat", split=split)) for split in ("train", "validation", "test")
    )
    classes = train.class_names
    everything = {split: data.load(source / "eurosat", split=split) for split in ("train", "validation", "test")}
    held_out = data.subset(validation, CIRCUIT + CALIBRATION, seed=SEED, stratified=True)
    circuit_id, calibration = data.split(held_out, CIRCUIT / (CIRCUIT + CALIBRATION), seed=SEED)
    circuit_ood = data.subset(data.only_classes(everything["train"], [CIRCUIT_OOD]), CIRCUIT, seed=SEED)
    fashion = data.subset(data.load(source / "fashion_mnist", split="test"), FAR, seed=SEED, stratified=True)
    packer = _Packer(source)
    sample = [
        packer.packed("train", {"eurosat/train": data.subset(train, TRAIN, seed=SEED, stratified=True)}),
        packer.packed("circuit_id", {"eurosat/validation": circuit_id}),
        packer.packed("circuit_ood", {"eurosat/train": circuit_ood}, labelled=False),
        packer.packed("calibration", {"eurosat/validation": calibration}),
        packer.packed("test", {"eurosat/test": test}),
    ]
    for name in NEAR:
        parts = {f"eurosat/{split}": data.only_classes(everything[split], [name]) for split in ("validation", "test")}
        sample.append(packer.packed(name, parts, labelled=False))
    sample.append(packer.packed("FashionMNIST", {"fashion_mnist/test": fashion}, labelled=False))
    training = [
        packer.packed("train", {"eurosat/train": train}),
        packer.packed("validation", {"eurosat/validation": validation}),
        packer.packed("test", {"eurosat/test": test}),
    ]
    sample = [thinned(one) for one in sample]
    for file, sets in (("sample", sample), ("training", training)):
        arrays = {key: array for one in sets for key, array in one.items()}
        np.savez_compressed(output / f"{file}.npz", class_names=np.array(classes), **arrays)
    shutil.copyfile(output / "sample.npz", PACKAGE / "sample.npz")


def thinned(packed: dict[str, Any]) -> dict[str, Any]:
    """As many images of a set as the package keeps, evenly spaced."""
    name = next(iter(packed)).partition("/")[0]
    contents = np.split(packed[f"{name}/files"], packed[f"{name}/ends"][:-1])
    keep = np.linspace(0, len(contents) - 1, KEPT[name]).round().astype(int)
    files = [contents[index] for index in keep]
    rest = {f"{name}/{key}": packed[f"{name}/{key}"][keep] for key in ("labels", "splits", "rows")}
    return {f"{name}/files": np.concatenate(files), f"{name}/ends": np.cumsum(list(map(len, files))), **rest}


class _Packer:
    """Reads the stored bytes of a data set's images."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.contents: dict[str, Any] = {}

    def packed(self, name: str, parts: Mapping[str, data.Dataset[Any]], labelled: bool = True) -> dict[str, Any]:
        """One set from rows of one or more splits, as `read_images` reads it; OOD images get the label -1."""
        files: list[bytes] = []
        origins: list[tuple[int, str, int]] = []
        for split, dataset in parts.items():
            if split not in self.contents:
                table = parquet.read_table(self.source / f"{split}.parquet", columns=["image"])
                self.contents[split] = table.column("image").combine_chunks().field("bytes")
            for row, label in zip(dataset.rows.tolist(), dataset.labels.tolist(), strict=True):
                files.append(self.contents[split][row].as_py())
                origins.append((label if labelled else -1, split, row))
        labels, splits, rows = zip(*origins, strict=True)
        print(f"{name}: {len(files)} images, {sum(len(content) for content in files):,} bytes")
        return {
            f"{name}/files": np.frombuffer(b"".join(files), dtype=np.uint8),
            f"{name}/ends": np.cumsum([len(content) for content in files]),
            f"{name}/labels": np.array(labels),
            f"{name}/splits": np.array(splits),
            f"{name}/rows": np.array(rows),
        }


def _without_ood(dataset: data.Dataset[Any]) -> Any:
    return data.without_classes(dataset, [CIRCUIT_OOD, *NEAR], relabel=True)


# --- train -----------------------------------------------------------------------------------------------


def train(bundle: Path, output: Path, seeds: list[int], epochs: int, limit: int | None, device: str) -> None:
    """Train a copy from each seed, and write the weights (float16) and the log."""
    output.mkdir(parents=True, exist_ok=True)
    sets = read_images(bundle / "training.npz")
    images, labels = _pixels(sets["train"], limit)
    held_out = {name: (_inputs(sets[name], limit), _labels(sets[name], limit)) for name in ("validation", "test")}
    make = partial(_copy, images=images, labels=labels, held_out=held_out, epochs=epochs, device=device)
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(seeds), mp_context=context) as pool:  # one GPU fits all
        found = list(pool.map(make, seeds))
    for seed, (state, _) in zip(seeds, found, strict=True):
        save_file(state, output / f"copy_{seed}.safetensors")
    facts = {
        "settings": {
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "warmup": WARMUP,
            "drop_path": DROP_PATH,
        },
        "parameters": sum(tensor.numel() for tensor in found[0][0].values()),
        "classes": list(sets["train"].class_names),
        "samples": {"train": len(labels), **{name: len(pair[1]) for name, pair in held_out.items()}},
        "copies": [log for _, log in found],
    }
    (output / "log.json").write_text(json.dumps(facts, indent=1) + "\n")


def _copy(
    seed: int,
    *,
    images: Tensor,
    labels: Tensor,
    held_out: dict[str, tuple[Tensor, Tensor]],
    epochs: int,
    device: str,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of one trained model in float16, and its log."""
    started = time.perf_counter()
    model, epochs_log = _train_copy(seed, images.to(device), labels.to(device), held_out, epochs)
    state = {name: tensor.half().cpu().contiguous() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})  # evaluate the rounded weights
    accuracy = {name: _accuracy(model, *pair) for name, pair in held_out.items()}
    facts = {
        "seed": seed,
        "command": f"python examples/train_demo_backbone.py train --seeds {seed} --epochs {epochs}",
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "timm": _timm_version()},
        "seconds": round(time.perf_counter() - started, 1),
        "accuracy": accuracy,
    }
    print(json.dumps(facts), flush=True)
    return state, {**facts, "epochs": epochs_log}


def _train_copy(
    seed: int, images: Tensor, labels: Tensor, held_out: dict[str, tuple[Tensor, Tensor]], epochs: int
) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    device = images.device
    torch.manual_seed(seed)
    model = _vision_transformer(int(labels.max()) + 1).to(device)
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=device.type == "cuda")
    batches = max(1, len(labels) // BATCH)
    total, warm = epochs * batches, max(1, round(WARMUP * epochs * batches))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, total - warm)))),
    )
    log = []
    for _ in range(epochs):
        model.train()
        losses = []
        for rows in torch.randperm(len(labels), device=device)[: batches * BATCH].chunk(batches):
            inputs = _augmented(images[rows])
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(inputs).float(), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        mean_loss = float(torch.stack(losses).mean())
        log.append({"loss": round(mean_loss, 4), "validation_accuracy": _accuracy(model, *held_out["validation"])})
    return model, log


def _vision_transformer(classes: int) -> torch.nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: torch.nn.Module = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=144, depth=6, num_heads=6, num_classes=classes, drop_path_rate=DROP_PATH
    )
    return model


def _augmented(images: Tensor) -> Tensor:
    """Inputs from images `[B, 3, h, w]` in 0-255: independently rotated, mirrored, shifted, scaled, recoloured."""
    count, device = len(images), images.device
    pixels = images.float() / 255
    zoomed = torch.rand(count, device=device) < 0.5
    scale = torch.where(zoomed, torch.empty(count, device=device).uniform_(0.8, 1.0), 1.0)
    turn = torch.randint(4, (count,), device=device) * (math.pi / 2)
    mirror = torch.randint(2, (count,), device=device) * 2.0 - 1.0
    shift = torch.randint(-8, 9, (count, 2), device=device) * (2 / SIZE)  # whole pixels: no blur unless zoomed
    rotation = torch.stack([turn.cos() * mirror, -turn.sin(), turn.sin() * mirror, turn.cos()], 1).view(-1, 2, 2)
    transform = torch.cat([rotation * scale[:, None, None], shift[:, :, None]], 2)  # [B, 2, 3]
    grid = F.affine_grid(transform, list(pixels.shape), align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    brightness, contrast, saturation = torch.empty(3, count, 1, 1, 1, device=device).uniform_(0.85, 1.15)
    pixels = pixels * brightness
    pixels = torch.lerp(pixels.mean((1, 2, 3), keepdim=True), pixels, contrast)
    pixels = torch.lerp(pixels.mean(1, keepdim=True), pixels, saturation)
    return (pixels.clamp(0, 1) - 0.5) / 0.5


@torch.no_grad()
def _logits(model: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Logits `[N, C]` in float32, on the CPU."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(chunk.to(device)).float().cpu() for chunk in inputs.split(512)])


def _accuracy(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return round(float((_logits(model, inputs).argmax(1) == labels).float().mean()), 4)


def _inputs(images: ImageDataset, limit: int | None) -> Tensor:
    """Inputs `[N, 3, 64, 64]`, preprocessed as for the shipped model."""
    return PREPROCESSING([images[row][0] for row in range(len(images))[:limit]])


def _labels(images: ImageDataset, limit: int | None) -> Tensor:
    return torch.tensor(images.labels[:limit])


def _pixels(images: ImageDataset, limit: int | None) -> tuple[Tensor, Tensor]:
    """Images `[N, 3, 64, 64]` in 0-255 as uint8, and labels `[N]`; `limit` draws evenly over the set."""
    rows = range(len(images))[:: 1 if limit is None else max(1, len(images) // limit)]
    pixels = torch.stack([(PREPROCESSING(images[row][0])[0] * 0.5 + 0.5).mul(255).round().byte() for row in rows])
    return pixels, torch.tensor(images.labels[list(rows)])


def _timm_version() -> str:
    import timm

    return str(timm.__version__)


# --- store -----------------------------------------------------------------------------------------------


def store(trained: Path, results: Path) -> None:
    """Store the copy of seed 0 in the package, and the logs of all."""
    classes = load_sample()["test"].class_names
    model = _vision_transformer(len(classes))
    state = load_file(trained / "copy_0.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    he.convert(model, labels=classes, processor=PREPROCESSING).half().save_pretrained(PACKAGE / "backbone")
    new = json.loads((trained / "log.json").read_text())
    known = json.loads(results.read_text())["copies"] if results.exists() else []
    logs = {log["seed"]: log for log in [*known, *new["copies"]]}
    results.write_text(json.dumps({**new, "copies": [logs[seed] for seed in sorted(logs)]}, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="draw the images")
    packing.add_argument("--shared", type=Path, required=True)
    packing.add_argument("--output", type=Path, default=Path("carry/demo"))
    training = commands.add_parser("train", help="train the copies")
    training.add_argument("--bundle", type=Path, default=Path("carry/demo"))
    training.add_argument("--output", type=Path, required=True)
    training.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    training.add_argument("--epochs", type=int, default=150)
    training.add_argument("--limit", type=int, help="use only about so many images of each set")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    storing = commands.add_parser("store", help="put what was trained into the package")
    storing.add_argument("--trained", type=Path, required=True)
    storing.add_argument("--results", type=Path, default=Path("results/demo_backbone.json"))
    given = vars(parser.parse_args())
    steps: dict[str, Callable[..., None]] = {"pack": pack, "train": train, "store": store}
    steps[given.pop("command")](**given)


if __name__ == "__main__":
    main()
