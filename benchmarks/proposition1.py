"""Proposition 1 of the paper, checked on the embedded model: does pruning hurt more on corrupted images?

    python benchmarks/proposition1.py --output results/proposition1.json

Loss, gradient and Hessian in the head gates (`gate_losses.py`) are computed on clean test images and on the same images
corrupted (one of the fifteen corruptions each, in turn). From them follow the conditions of the proposition and the
change of the loss gap to second order for any set of heads, which is held against the change measured by pruning: for
sets that rankings choose, for random ones, and for random ones that meet the conditions, at a tenth of the step and at
the whole step. Heads are ranked on other images than those the losses are computed on. About ten minutes on a core.
"""

import argparse
import json
import os
import platform
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gate_losses import Batch, Expansion, Quality, expand, gates_after, measure, pruning_step
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.embedded import load_backbone, load_sample
from hydra_ensembles.demo.run import DemoSettings

SEVERITIES = (1, 2, 3, 4, 5)
EXPANDED = 3  # the severity whose gradient and Hessian are computed
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


def rankings(model: he.Ensemble, sample: Any, prune: int, images: int, seed: int) -> dict[str, list[he.Head]]:
    """Sets of heads to prune by name: two rankings that look at clean data only, one that also looks at OOD data."""
    preprocess: Any = model.metadata.preprocessing
    known, unknown = (
        data.batches(data.subset(sample[name], images, seed=seed), preprocess, batch_size=64)
        for name in ("circuit_id", "circuit_ood")
    )
    return {
        "Taylor": list(he.taylor(model, known, budget=prune, scope="global").first(prune)),
        "CircAcc": list(he.extract_circuit(model, known, score="acc", budget=prune).first(prune)),
        "CircAvg": list(he.extract_circuit(model, known, unknown, score="avg", budget=prune).first(prune)),
    }


def random_steps(model: he.Ensemble, prune: int, seed: int) -> Tensor:
    """Steps `[DRAWS, L·H]` that take random heads out."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.num_layers * model.num_heads
    steps = torch.zeros(DRAWS, heads, dtype=torch.float64)
    for row in range(DRAWS):
        steps[row, torch.randperm(heads, generator=generator)[:prune]] = -1.0
    return steps


def conditions(clean: Expansion, noisy: Expansion, steps: Tensor) -> tuple[dict[str, Any], Tensor]:
    """What the proposition assumes, over all directions and over random steps; which steps `[DRAWS]` meet it."""
    aligned = steps @ noisy.gradient >= 0
    curved = _quadratic(noisy, steps) - _quadratic(clean, steps) > 0
    facts = {
        "eigenvalues_of_hessian_difference": torch.linalg.eigvalsh(noisy.hessian - clean.hessian).tolist(),
        "diagonal_of_hessian_difference": (noisy.hessian - clean.hessian).diagonal().tolist(),
        "clean_gradient_norm": clean.gradient.norm().item(),
        "noisy_gradient_norm": noisy.gradient.norm().item(),
        "random_sets": len(steps),
        "share_aligned": aligned.double().mean().item(),
        "share_curved": curved.double().mean().item(),
        "share_both": (aligned & curved).double().mean().item(),
    }
    return facts, aligned & curved


def _quadratic(expansion: Expansion, steps: Tensor) -> Tensor:
    return (steps @ expansion.hessian * steps).sum(-1) / 2


@dataclass(frozen=True)
class Expanded:
    """Images, and the loss on them around the whole model."""

    batches: list[Batch]
    expansion: Expansion


def measured(model: he.Ensemble, step: Tensor, clean: Expanded, noisy: Expanded) -> dict[str, Any]:
    """One set of heads: terms of the expansion, and what a tenth of the step and the whole of it do to both losses."""
    expansions = {"clean": clean.expansion, "noisy": noisy.expansion}
    terms: dict[str, Any] = {}
    for name, one in expansions.items():
        terms[f"{name}_first_order"] = (one.gradient @ step).item()
        terms[f"{name}_second_order"] = _quadratic(one, step).item()
    first, second = (terms[f"noisy_{order}"] - terms[f"clean_{order}"] for order in ("first_order", "second_order"))
    gap = noisy.expansion.value - clean.expansion.value
    for name, share in {"tenth": 0.1, "whole": 1.0}.items():
        found = [measure(model, gates_after(model, step, share), one.batches) for one in (clean, noisy)]
        terms[name] = {
            "clean_loss": found[0].loss,
            "noisy_loss": found[1].loss,
            "gap_change": found[1].loss - found[0].loss - gap,
            "gap_change_second_order": share * first + share**2 * second,
        }
    return {"heads": [[*divmod(index, model.num_heads)] for index in step.nonzero()[:, 0].tolist()], **terms}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole experiment."""
    model, sample = load_backbone(), load_sample().sets
    test = data.subset(sample["test"], options.images, seed=options.seed, stratified=True)
    batches = {severity: clean_and_corrupted(test, model, severity, options.seed) for severity in (0, *SEVERITIES)}
    ranked = rankings(model, sample, options.prune, options.ranking_images, options.seed)
    named = {name: pruning_step(model, heads) for name, heads in ranked.items()}
    print(f"{len(test)} test images; computing gradients and Hessians", flush=True)
    clean, noisy = (Expanded(batches[severity], expand(model, batches[severity])) for severity in (0, EXPANDED))
    steps = random_steps(model, options.prune, options.seed)
    facts, meeting = conditions(clean.expansion, noisy.expansion, steps)
    chosen = named | {f"random {row}": steps[row] for row in range(options.draws)}
    chosen |= {f"meeting {row}": steps[row] for row in meeting.nonzero()[: options.draws, 0].tolist()}
    print("pruning and measuring", flush=True)
    sets = {name: measured(model, step, clean, noisy) for name, step in chosen.items()}
    curves: dict[str, list[Quality]] = {
        name: [measure(model, gates_after(model, step), batches[severity]) for severity in (0, *SEVERITIES)]
        for name, step in {"whole": torch.zeros_like(steps[0]), **named}.items()
    }
    return {
        "model": "embedded demo backbone, EuroSAT (7 classes)",
        "heads": model.num_layers * model.num_heads,
        "classes": model.num_classes,
        "prune": options.prune,
        "test_images": len(test),
        "ranking_images": options.ranking_images,
        "severity": EXPANDED,
        "corruptions": list(data.CORRUPTIONS),
        "clean_loss": clean.expansion.value,
        "noisy_loss": noisy.expansion.value,
        "conditions": facts,
        "sets": sets,
        "by_severity": {name: [asdict(quality) for quality in curve] for name, curve in curves.items()},
        "seed": options.seed,
        "versions": {"torch": str(torch.__version__), "hydra_ensembles": he.__version__},
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/proposition1.json"))
    parser.add_argument("--prune", type=int, default=DemoSettings().prune, help="heads to prune")
    parser.add_argument("--images", type=int, default=120, help="test images, clean and corrupted")
    parser.add_argument("--ranking-images", type=int, default=48, help="ID and as many OOD images that rank heads")
    parser.add_argument(
        "--draws", type=int, default=12, help="random sets to measure, and as many that meet the conditions"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = run(options)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
