"""Proposition 1 of the paper, checked on the embedded model: does pruning hurt more on corrupted images?

    python benchmarks/proposition1.py --output results/proposition1.json

Loss, gradient and Hessian in the head gates (`gate_losses.py`) are computed on clean test images and on the same images
corrupted (one of the fifteen corruptions each, in turn). From them follow the conditions of the proposition and the
change of the loss gap to second order for any set of heads, which is held against the change measured by pruning.
Heads are ranked on other images than those the losses are computed on. About twenty minutes on two cores.
"""

import argparse
import json
import os
import platform
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gate_losses import Batch, Expansion, expand, gates_after, mean_loss, pruning_step
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo import DemoSettings, load_backbone, load_sample
from hydra_ensembles.heads.members import random_members

SEVERITIES = (1, 2, 3, 4, 5)
EXPANDED = 3  # the severity whose gradient and Hessian are computed
SHARES = tuple(share / 10 for share in range(11))
DRAWS = 10_000


def clean_and_corrupted(dataset: Any, model: he.Ensemble, severity: int, seed: int) -> list[Batch]:
    """All images in batches, the n-th with the n-th of the fifteen corruptions; severity 0 leaves them alone."""
    pictures = [dataset[index][0] for index in range(len(dataset))]
    if severity:
        pictures = [
            data.corrupt(picture, name, severity, seed=seed + index, parameters="tinyimagenet")
            for index, (picture, name) in enumerate(zip(pictures, cycle(data.CORRUPTIONS), strict=False))
        ]
    inputs = model.prepare(pictures)
    assert isinstance(inputs, Tensor)
    labels = torch.tensor([int(label) for label in dataset.labels])
    return list(zip(inputs.split(40), labels.split(40), strict=True))


def choices(
    model: he.Ensemble, sample: Any, prune: int, images: int, draws: int, seed: int
) -> dict[str, list[he.Head]]:
    """Sets of heads to prune by name: two rankings that look at clean data only, one that also looks at OOD data."""
    preprocess: Any = model.metadata.preprocessing
    known, unknown = (
        data.batches(data.subset(sample[name], images, seed=seed), preprocess, batch_size=64)
        for name in ("circuit_id", "circuit_ood")
    )
    chosen = {
        "Taylor": list(he.taylor(model, known, budget=prune, scope="global").first(prune)),
        "CircAcc": list(he.extract_circuit(model, known, score="acc", budget=prune).first(prune)),
        "CircAvg": list(he.extract_circuit(model, known, unknown, score="avg", budget=prune).first(prune)),
    }
    drawn = random_members(model, prune, draws, seed=seed)
    return chosen | {f"random {index}": list(heads) for index, heads in enumerate(drawn)}


def conditions(clean: Expansion, noisy: Expansion, prune: int, seed: int) -> dict[str, Any]:
    """What the proposition assumes, over all directions and over random sets of heads."""
    eigenvalues = torch.linalg.eigvalsh(noisy.hessian - clean.hessian)
    generator = torch.Generator().manual_seed(seed)
    heads = len(clean.gradient)
    steps = torch.zeros(DRAWS, heads, dtype=torch.float64)
    for row in range(DRAWS):
        steps[row, torch.randperm(heads, generator=generator)[:prune]] = -1.0
    aligned = steps @ noisy.gradient >= 0
    curved = _quadratic(noisy, steps) - _quadratic(clean, steps) > 0
    return {
        "eigenvalues_of_hessian_difference": eigenvalues.tolist(),
        "clean_gradient_norm": clean.gradient.norm().item(),
        "noisy_gradient_norm": noisy.gradient.norm().item(),
        "random_sets": DRAWS,
        "share_aligned": aligned.double().mean().item(),
        "share_curved": curved.double().mean().item(),
        "share_both": (aligned & curved).double().mean().item(),
    }


def _quadratic(expansion: Expansion, steps: Tensor) -> Tensor:
    return (steps @ expansion.hessian * steps).sum(-1) / 2


def measured(
    model: he.Ensemble, heads: list[he.Head], clean: tuple[Expansion, list[Batch]], noisy: tuple[Expansion, list[Batch]]
) -> dict[str, Any]:
    """One set of heads: terms of the expansion, and what pruning really does to both losses."""
    step = pruning_step(model, heads)
    terms = {
        "clean_first_order": (clean[0].gradient @ step).item(),
        "noisy_first_order": (noisy[0].gradient @ step).item(),
        "clean_second_order": _quadratic(clean[0], step).item(),
        "noisy_second_order": _quadratic(noisy[0], step).item(),
    }
    gates = gates_after(model, step)
    clean_loss, noisy_loss = (mean_loss(model, gates, batches) for _, batches in (clean, noisy))
    widened = (noisy_loss - clean_loss) - (noisy[0].value - clean[0].value)
    predicted = sum(terms[f"noisy_{order}"] - terms[f"clean_{order}"] for order in ("first_order", "second_order"))
    return {
        "heads": [str(head) for head in heads],
        **terms,
        "clean_loss": clean_loss,
        "noisy_loss": noisy_loss,
        "gap_change": widened,
        "gap_change_second_order": predicted,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole experiment."""
    model, sample = load_backbone(), load_sample().sets
    test = data.subset(sample["test"], options.images, seed=options.seed, stratified=True)
    batches = {severity: clean_and_corrupted(test, model, severity, options.seed) for severity in (0, *SEVERITIES)}
    chosen = choices(model, sample, options.prune, options.ranking_images, options.draws, options.seed)
    print(f"{len(test)} test images; computing gradients and Hessians", flush=True)
    clean, noisy = ((expand(model, batches[severity]), batches[severity]) for severity in (0, EXPANDED))
    sets = {name: measured(model, heads, clean, noisy) for name, heads in chosen.items()}
    whole = gates_after(model, pruning_step(model, []))
    named = {name: gates_after(model, pruning_step(model, heads)) for name, heads in chosen.items()}
    curves = {name: named[name] for name in ("Taylor", "CircAcc", "CircAvg")}
    path = [
        [mean_loss(model, gates_after(model, pruning_step(model, chosen["Taylor"]), share), one) for share in SHARES]
        for one in (clean[1], noisy[1])
    ]
    return {
        "model": "embedded demo backbone, EuroSAT (7 classes)",
        "heads": model.num_layers * model.num_heads,
        "prune": options.prune,
        "test_images": len(test),
        "ranking_images": options.ranking_images,
        "severity": EXPANDED,
        "corruptions": list(data.CORRUPTIONS),
        "clean_loss": clean[0].value,
        "noisy_loss": noisy[0].value,
        "conditions": conditions(clean[0], noisy[0], options.prune, options.seed),
        "sets": sets,
        "loss_by_severity": {
            name: [mean_loss(model, gates, batches[severity]) for severity in (0, *SEVERITIES)]
            for name, gates in {"whole": whole, **curves}.items()
        },
        "taylor_path": {"shares": SHARES, "clean_loss": path[0], "noisy_loss": path[1]},
        "seed": options.seed,
        "versions": {"torch": str(torch.__version__), "hydra_ensembles": he.__version__},
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/proposition1.json"))
    parser.add_argument("--prune", type=int, default=DemoSettings().prune, help="heads to prune")
    parser.add_argument("--images", type=int, default=150, help="test images, clean and corrupted")
    parser.add_argument("--ranking-images", type=int, default=64, help="ID and as many OOD images that rank heads")
    parser.add_argument("--draws", type=int, default=20, help="random sets of heads to measure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = run(options)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
