"""How much circuits depend on the images they were extracted on: ties, OOD sources and a limit on accuracy lost.

    python -m studies.circuit_draws --output results/circuit_draws.json

On the embedded model, every variant is extracted on several draws of the images set apart for ranking heads (ID images,
and images of PermanentCrop as OOD data). For each variant: the share of removed heads that two draws have in common,
and accuracy and AUROC (by the largest probability) of the pruned model on the test images, with the standard deviation
over draws. No test image is used to rank heads. Takes about a quarter of an hour on one core.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.embedded import FAR, NEAR, load_backbone, load_sample

from .results import hardware, load, markdown, store, versions

RESULT = "circuit_draws.json"
ONE, BOTH, MADE = "PermanentCrop", "PermanentCrop and synthetic", "synthetic"
LIMIT = 0.02
VARIANTS = (  # score, ties, OOD source, limit
    ("acc", "order", ONE, None),
    ("acc", "likelihood", ONE, None),
    *((score, ties, ONE, None) for score in ("avg", "ood") for ties in ("order", "likelihood")),
    *((score, "likelihood", source, None) for score in ("avg", "ood") for source in (BOTH, MADE)),
    ("ood", "likelihood", BOTH, LIMIT),
)
HEADER = ("score", "ties", "OOD data", "accuracy lost", "heads", "in common %", "test Acc %", "near AUROC", "far AUROC")
TESTS = ("accuracy", "near", "far")

Batches = list[tuple[Tensor, Tensor]]


def read(sets: Any, name: str, preprocess: Any, count: int | None = None, seed: int = 0) -> Batches:
    """Preprocessed images of a set, or `count` of them, in one batch."""
    images = sets[name] if count is None else data.subset(sets[name], count, seed=seed)
    return cast(Batches, list(data.batches(images, preprocess, batch_size=len(images))))


def tested(model: he.Ensemble, tests: dict[str, Batches]) -> dict[str, float]:
    """Accuracy, and mean AUROC of near and far OOD sets."""
    outside = {group: {name: tests[name] for name in names} for group, names in (("near", NEAR), ("far", FAR))}
    numbers = he.evaluate(model, tests["test"], outside, progress=False).numbers()
    return {"accuracy": numbers["accuracy"], "near": numbers["near.auroc"], "far": numbers["far.auroc"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant: a row for each, with the numbers of every draw."""
    model = load_backbone()
    sample = load_sample()
    preprocess: Any = model.metadata.preprocessing
    sets = sample.sets
    tests = {name: read(sets, name, preprocess, options.tests) for name in ("test", *NEAR, *FAR)}
    drawn = []
    for seed in range(options.draws):
        inside, outside = (read(sets, f"circuit_{side}", preprocess, options.images, seed) for side in ("id", "ood"))
        synthetic = data.synthetic_ood(inside, seed=seed)
        drawn.append((inside, {ONE: outside, MADE: synthetic, BOTH: {ONE: outside, MADE: synthetic}}))
    rows = []
    for score, ties, source, limit in VARIANTS:
        removed, results = [], []
        for inside, sources in drawn:
            settings: Any = {"score": score, "ties": ties, "max_accuracy_loss": limit, "budget": options.budget}
            settings |= {"layers": range(options.trunk, model.num_layers), "method": "exact", "progress": False}
            foreign: Any = None if score == "acc" else sources[source]
            ranking = he.extract_circuit(model, inside, foreign, **settings)
            removed.append(set(ranking.heads))
            results.append(tested(he.prune(model, ranking.heads), tests))
        common = [len(one & other) / max(len(one), len(other), 1) for one, other in combinations(removed, 2)]
        row: dict[str, Any] = {"score": score, "ties": ties, "ood": source, "max_accuracy_loss": limit}
        row |= {"heads": statistics.mean(map(len, removed)), "in_common": statistics.mean(common)}
        for name in TESTS:
            values = [result[name] for result in results]
            row[name] = {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "draws": values}
        rows.append(row | {"removed": [sorted(map(str, heads)) for heads in removed]})
        print(*line(rows[-1]), sep="  ", flush=True)
    return {
        "benchmark": "circuit draws",
        **{name: getattr(options, name) for name in ("draws", "images", "tests", "budget", "trunk")},
        "whole": tested(model, tests),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "rows": rows,
    }


def line(row: dict[str, Any]) -> tuple[object, ...]:
    """The cells of a variant in the table."""
    limit = row["max_accuracy_loss"]
    source = "–" if row["score"] == "acc" else row["ood"]
    numbers = (f"{100 * row[name]['mean']:.1f} ± {100 * row[name]['deviation']:.1f}" for name in TESTS)
    allowed = "any" if limit is None else f"at most {100 * limit:.0f} %"
    heads = f"{row['heads']:.1f}"
    common = f"{100 * row['in_common']:.0f}"
    return (row["score"], row["ties"], source, allowed, heads, common, *numbers)


def draws_table() -> str:
    """The table for the documents, from the stored result."""
    run = load(RESULT)
    whole = ", ".join(f"{name} {100 * run['whole'][name]:.1f}" for name in TESTS)
    about = (
        f"{run['draws']} draws of {run['images']} ID and {run['images']} OOD images, {run['budget']} of the 24 "
        f"heads above layer {run['trunk'] - 1} removed by `exact` in float32; mean ± standard deviation over draws. "
        f"{run['tests']} images of each test set. The whole model: {whole}. From `results/{RESULT}`."
    )
    return markdown(HEADER, map(line, run["rows"]), about, "llll")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--images", type=int, default=32, help="ID images of a draw, and as many OOD images")
    parser.add_argument("--tests", type=int, default=150, help="images of each test set")
    parser.add_argument("--budget", type=int, default=4)
    parser.add_argument("--trunk", type=int, default=2, help="layers that keep all heads")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.output:
        store(options.output, result)


if __name__ == "__main__":
    main()
