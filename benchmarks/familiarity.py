"""What saying how familiar an input is costs: an optimized ensemble with fitted scores of features, and without.

    python benchmarks/familiarity.py --output results/familiarity.json
    python benchmarks/familiarity.py --device cpu --batches 2 --rounds 3 --layers 1      # a quick look

ViT-B/16 with 1,000 classes and random weights: one model, and three members with 8 of 12 heads above a trunk of 10
layers. Both runners take turns on the same images; the ratio is that of their median times. The statistics are random,
too: what they cost does not depend on their values.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import hardware, store, versions
from inference import times

from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Familiarity, FamiliaritySettings

SCORES = ("mahalanobis", "relative_mahalanobis", "vim", "knn")
CLASSES, WIDTH, STORED = 1000, 768, 10_000


def made(members: int, layers: int, dtype: torch.dtype, device: str) -> Ensemble:
    """An ensemble with random weights."""
    encoder = EncoderConfig(width=WIDTH, layers=layers, heads=12, head_dim=64, mlp_width=4 * WIDTH)
    trunk = layers * 10 // 12 if members > 1 else 0
    whole, kept = tuple(range(12)), [tuple((index + first) % 12 for index in range(8)) for first in (0, 2, 4)]
    heads = tuple(
        tuple(whole if members == 1 or layer < trunk else tuple(sorted(kept[member])) for layer in range(layers))
        for member in range(members)
    )
    readout, sharing = ReadoutConfig(num_classes=CLASSES), Sharing(stem=members > 1, mlp=members > 1)
    config = EnsembleConfig(PatchStemConfig((16, 16), (14, 14)), encoder, readout, heads, sharing, trunk)
    return Ensemble(config).to(device, dtype).eval()


def with_score(ensemble: Ensemble, score: Any) -> Ensemble:
    """The same ensemble with random statistics of a score."""
    settings = FamiliaritySettings((score,), WIDTH, STORED, STORED, 50, 2 * WIDTH // 3)
    shapes = settings.shapes(ensemble.num_members, CLASSES)
    return ensemble.with_metadata(
        familiarity=Familiarity(settings, {name: torch.randn(shape) / 30 for name, shape in shapes.items()})
    )


def measured(options: argparse.Namespace, members: int, batch: int, score: str) -> dict[str, Any]:
    """Milliseconds with and without a score, and their ratio."""
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    ensemble = made(members, options.layers, dtype, options.device)
    images = torch.randn(batch, 3, 224, 224, device=options.device, dtype=dtype)
    settings: dict[str, Any] = {"plans": ["batched"], "compile": options.compile}
    plain = ensemble.optimize(images, **settings)
    fitted = with_score(ensemble, score).optimize(images, **settings)
    runs: Any = (plain.answers, fitted.answers)
    times(runs, [images], 5)
    without, with_ = (statistics.median(taken) for taken in times(runs, [images], options.rounds))
    return {
        "score": score,
        "members": members,
        "batch": batch,
        "layers": options.layers,
        "compiled": options.compile,
        "dtype": str(dtype).removeprefix("torch."),
        "without_ms": without,
        "with_ms": with_,
        "ratio": with_ / without,
    }


def main() -> None:
    """Measure every score, and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 3], choices=[1, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[128])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for members in options.members:
        for batch in options.batches:
            for score in SCORES:
                rows.append(measured(options, members, batch, score))
                one = rows[-1]
                print(f"{score:<22} M={members} batch {batch:>4}: {one['without_ms']:.3f} ms, with it "
                      f"{one['with_ms']:.3f} ms, {100 * (one['ratio'] - 1):+.2f} %", flush=True)  # fmt: skip
    if options.output is not None:
        about = {"benchmark": "familiarity", "hardware": hardware(options.device), "versions": versions()}
        store(options.output, {**about, "rows": rows})


if __name__ == "__main__":
    main()
