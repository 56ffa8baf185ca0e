"""What sharing costs: fine-tuned members of a Hydra Ensemble, fused in every way.

    python benchmarks/fusion.py --bundle bundle --backbone backbone --output results/fusion.json

Takes what `cifar10_backbone.py` made. Three circuits are extracted on `id` and `ood`, each member is pruned and
fine-tuned on its own, and every way to fuse them is measured on `holdout_id` and `holdout_ood`.
"""

import argparse
import json
import platform
from itertools import product
from pathlib import Path

import torch
from cifar10_backbone import AugmentedBatches, normalised, read_images
from safetensors.torch import load_file
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import metrics
from hydra_ensembles.circuit.scores import Score

SCORES: tuple[Score, ...] = ("avg", "acc", "ood")


def members_of(
    backbone: he.Ensemble, files: Path, train: AugmentedBatches, prune: int, epochs: int, rate: float
) -> list[he.Ensemble]:
    """Three pruned and fine-tuned copies."""
    samples = {name: load_file(files / f"{name}.safetensors", device=str(backbone.device)) for name in ("id", "ood")}
    batches = {name: [(one["inputs"], one["labels"])] for name, one in samples.items()}
    recipe = he.Recipe(
        optimizer="adamw",
        learning_rate=rate,
        epochs=epochs,
        warmup=0.1,
        weight_decay=0.01,
        train_groups=("attention", "mlp", "norms", "readout"),
        precision="bf16" if backbone.device.type == "cuda" else "float32",
    )
    pruned = []
    for score in SCORES:
        ranking = he.extract_circuit(backbone, batches["id"], batches["ood"], score=score, budget=prune, progress=False)
        pruned.append(he.prune(backbone, ranking.first(prune)))
    return he.finetune(pruned, train, recipe, progress=False)


@torch.inference_mode()
def measure(ensemble: he.Ensemble, id_images: Tensor, labels: Tensor, ood_images: Tensor) -> dict[str, float]:
    """Quality on held-out images; OOD detection by the maximum softmax probability."""
    parts = [
        he.Prediction.concat([ensemble.predict(normalised(part)) for part in images.split(250)])
        for images in (id_images, ood_images)
    ]
    known, unknown = (part.to("cpu") for part in parts)
    labels = labels.cpu()
    return {
        "accuracy": metrics.accuracy(known.probs, labels),
        "nll": metrics.nll_of_log_probs(known.log_probs, labels),
        "ece": metrics.ece(known.probs, labels),
        "auroc": metrics.auroc(known.score(), unknown.score()),
        "disagreement": known.disagreement.mean().item(),
        "parameters": float(ensemble.describe().parameters),
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--prune", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 2e-4])
    parser.add_argument("--limit", type=int, help="use only so many training and held-out images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device, limit = options.device, options.limit
    backbone = he.Ensemble.from_pretrained(options.backbone / "model", device=device)
    images, labels = read_images(options.bundle / "train.safetensors")
    train = AugmentedBatches(images[:limit].to(device), labels[:limit].to(device), batch_size=128)
    held_out, held_labels = read_images(options.bundle / "holdout_id.safetensors")
    unlike, _ = read_images(options.bundle / "holdout_ood.safetensors")
    data = held_out[:limit].to(device), held_labels[:limit], unlike[:limit].to(device)

    rows: list[dict[str, object]] = [{"method": "single", **measure(backbone, *data)}]
    for rate in options.rates:
        members = members_of(backbone, options.backbone, train, options.prune, options.epochs, rate)
        for index, member in enumerate(members):
            rows.append({"method": f"member {SCORES[index]}", "rate": rate, **measure(member, *data)})
        for mlp, norms, readout in product(("mean", "separate"), repeat=3):
            fused = he.fuse(members, mlp=mlp, norms=norms, readout=readout)  # type: ignore[arg-type]
            setting = {"method": "hydra", "rate": rate, "mlp": mlp, "norms": norms, "readout": readout}
            rows.append({**setting, **measure(fused, *data)})
    for row in rows:
        print(json.dumps(row), flush=True)
    facts = json.loads((options.backbone / "backbone.json").read_text())
    result = {
        "backbone": facts,
        "prune": options.prune,
        "epochs": options.epochs,
        "holdout_id": len(data[1]),
        "holdout_ood": len(data[2]),
        "seed": 0,
        "torch": str(torch.__version__),
        "hydra_ensembles": he.__version__,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
