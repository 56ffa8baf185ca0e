"""Circuit extraction: compare the naive, exact and screened methods in seconds and in model forwards.

    python benchmarks/circuit.py --tiny
    python benchmarks/circuit.py --model FOLDER --id id.safetensors --ood ood.safetensors --budget 24
    python benchmarks/circuit.py --scaling --ties order --output results/circuit_scaling.json
    python benchmarks/circuit.py --random vit-b16 --samples 128 --budget 8 --against FOLDER      # and another checkout

A data file holds the tensors `inputs`, preprocessed, and `labels`. A model forward is one pass of the whole model over
all samples. The naive method may be measured only on its first steps (`--naive-steps`) and on some heads
(`--naive-heads`), and extrapolated by the number of heads evaluated; such numbers are marked. `--scaling` does both.
With `--against`, processes of both checkouts extract the same circuits in turn; these must be equal.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import by_turns, synchronize
from safetensors.torch import load_file
from torch import Tensor

import hydra_ensembles as he
from studies.results import hardware, load, markdown, store, versions

SCORES = ("acc", "ood", "avg")
METHODS = ("naive", "exact")
SHAPES: dict[str, dict[str, Any]] = {
    "vit-b16": {},
    "tiny": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0},
}

HEADER = ("case", "score", "method", "seconds", "faster", "model forwards", "fewer", "final S (%)")

Batches = list[tuple[Tensor, Tensor]]


# --- models with data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with data."""

    name: str
    model: he.Ensemble
    id_batches: Batches
    ood_batches: Batches
    layers: tuple[int, ...] | None = None

    @property
    def candidates(self) -> list[tuple[int, int]]:
        """Layer and index of the heads that may be removed."""
        layers = range(self.model.num_layers) if self.layers is None else self.layers
        return [(layer, head) for layer in layers for head in self.model.heads[0][layer]]


def random_case(name: str, shape: str, pixels: int, samples: int, options: argparse.Namespace) -> Case:
    """A ViT with random weights, labelled by its own predictions; OOD images have more contrast."""
    import timm

    torch.manual_seed(options.seed)
    model = he.convert(timm.create_model("vit_base_patch16_224", img_size=pixels, num_classes=10, **SHAPES[shape]))
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 2:
                scale = 1.0 if "classifier" in key or "position" in key else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model = model.to(options.device, torch.float32).eval()
    drawn = [torch.randn(samples, 3, pixels, pixels, generator=generator).to(options.device) for _ in range(2)]
    inside = drawn[0]
    outside = 2 * drawn[1]
    with torch.no_grad():
        labels = torch.cat([model(part)[0].argmax(-1) for part in inside.split(64)])
    return Case(name, model, [(inside, labels)], [(outside, torch.zeros_like(labels))])


def scaling_cases(options: argparse.Namespace) -> list[Case]:
    """ViT-B/16 shape: more samples with all heads, and more heads with the same samples."""
    most = options.samples or 256
    shape = f"ViT-B/16 at {options.image_size} px"
    cases = []
    for samples in (most // 8, most // 4, most // 2, most):
        size = f"{samples} + {samples} samples"
        cases.append(random_case(f"{shape}, 12 layers, {size}", "vit-b16", options.image_size, samples, options))
        if samples == most // 4:
            parts = {f"{shape}, last {count} layers, {size}": tuple(range(12 - count, 12)) for count in (3, 6)}
            cases += [replace(cases[-1], name=name, layers=layers) for name, layers in parts.items()]
    return cases


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases to measure."""
    if options.scaling:
        return scaling_cases(options)
    if options.random:
        pixels = 16 if options.random == "tiny" else options.image_size
        return [random_case(options.random, options.random, pixels, options.samples or 64, options)]
    model = he.Ensemble.from_pretrained(options.model).to(options.device, torch.float32)
    files = [load_file(path, device=options.device) for path in (options.id, options.ood)]
    sides = [[(file["inputs"][: options.samples].float(), file["labels"][: options.samples].long())] for file in files]
    return [Case(options.name or options.model.name, model, sides[0], sides[1])]


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(case: Case, score: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one extraction, or a part of a naive one (its first steps, or some of its heads), extrapolated."""
    naive = method == "naive"
    heads = len(case.candidates)
    steps = min(options.naive_steps or options.budget, options.budget) if naive else options.budget
    tried = min(options.naive_heads or heads, heads) if naive else heads
    removed = case.candidates[: heads - tried]  # removed heads cost the naive method as much as others
    seconds, ranking = timed(case, score, method, steps, options, removed=removed)
    provenance = ranking.provenance
    remaining = evaluations(heads, options.budget) - evaluations(tried, steps)
    forwards = provenance["model_forwards"]
    if naive and remaining:  # every head costs the same; work done once for all steps must not be scaled up
        first_seconds, _ = timed(case, score, method, 1, options, removed=removed)
        evaluated = evaluations(tried, steps) - tried
        seconds += (seconds - first_seconds) / evaluated * remaining
        forwards += remaining
    return {
        "case": case.name,
        "score": score,
        "method": method,
        "heads": heads,
        "id_samples": provenance["id_samples"],
        "ood_samples": provenance["ood_samples"],
        "budget": options.budget,
        "seconds": seconds,
        "model_forwards": forwards,
        "final_score": None if remaining else ranking.scores[-1],
        "measured_steps": steps,
        "extrapolated": remaining > 0,
        "removed": [str(head) for head in ranking.heads],
    }


def evaluations(heads: int, steps: int) -> int:
    """The number of heads that the naive method evaluates in so many steps."""
    return sum(heads - step for step in range(steps))


def timed(
    case: Case, score: str, method: str, budget: int, options: argparse.Namespace, **more: Any
) -> tuple[float, he.HeadRanking]:
    """Seconds of an extraction, including reading the batches."""
    settings: dict[str, Any] = {"score": score, "method": method, "budget": budget, "seed": options.seed}
    settings |= {"layers": case.layers, "progress": False}
    if options.ties:
        settings["ties"] = options.ties
    synchronize(options.device)
    start = time.perf_counter()
    ranking = he.extract_circuit(case.model, case.id_batches, case.ood_batches, **settings | more)
    synchronize(options.device)
    return time.perf_counter() - start, ranking


def lines_of(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """A table line for each row, compared with the naive one of its case and score."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        same = [other for other in rows if (other["case"], other["score"]) == (row["case"], row["score"])]
        naive = next((other for other in same if other["method"] == "naive"), None)
        star = " (extrapolated)" if row["extrapolated"] else ""
        final = "" if row["final_score"] is None or row["extrapolated"] else f"{100 * row['final_score']:.2f}"
        keys = ("seconds", "model_forwards")
        faster, fewer = ("" if naive is None else f"{naive[key] / row[key]:.1f}x" for key in keys)
        numbers = (f"{row['seconds']:.1f}", faster, f"{row['model_forwards']:,.0f}", fewer, final)
        lines.append((row["case"], row["score"], row["method"] + star, *numbers))
    return lines


def circuit_table(name: str) -> str:
    """A table for the documents: naive, exact and screened for each case and score of a results file."""
    result = load(name)
    rows = result["results"]
    about = (
        f"{result['hardware']}, torch {result['versions']['torch']}, {result['dtype']}, seed {result['seed']}; up to "
        f"{max(row['id_samples'] for row in rows)} ID and {max(row['ood_samples'] for row in rows)} OOD samples, "
        f"{rows[0]['heads']} heads, budget {rows[0]['budget']}. From `results/{name}`."
    )
    return markdown(HEADER, lines_of(rows), about, "lll")


# --- comparison with another checkout --------------------------------------------------------------------------------


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Extract the same circuits with this checkout and another one, in turn; print a line for each circuit."""
    stored = by_turns(__file__, options.against, arguments, options.turns, "results")
    rows = []
    print(f"{'score':6}{'method':10}{'new s':>9}{'old s':>9}{'new/old':>9}  same heads")
    for circuits in zip(*stored[0], *stored[1], strict=True):  # all turns of one circuit
        times = [[one["seconds"] for one in turns] for turns in (circuits[: options.turns], circuits[options.turns :])]
        new, old = map(statistics.median, times)
        score, method = circuits[0]["score"], circuits[0]["method"]
        same = all(one["removed"] == circuits[0]["removed"] for one in circuits)
        row = {"score": score, "method": method, "new_s": new, "old_s": old, "ratio": new / old}
        rows.append(row | {"same_heads": same, "times": times})
        print(f"{score:6}{method:10}{new:9.3f}{old:9.3f}{new / old:9.3f}  {same}")
    if options.output:
        store(
            options.output, {"benchmark": "circuit, two checkouts", "hardware": hardware(options.device), "rows": rows}
        )


# --- command ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--random", choices=list(SHAPES), help="a model with random weights")
    add("--tiny", action="store_const", const="tiny", dest="random", help="a small one, for any machine")
    add("--scaling", action="store_true", help="how time grows with heads and samples")
    add("--model", type=Path, help="folder of a saved ensemble")
    add("--id", type=Path, help="file of ID samples")
    add("--ood", type=Path, help="file of OOD samples")
    add("--name", help="what to call the case in the results")
    add("--budget", type=int, help="default: 8, and 4 for --scaling")
    add("--samples", type=int, help="ID samples, and as many OOD samples; default: all there are")
    add("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    add("--methods", nargs="+", choices=METHODS, help="default: all, and exact and screened for --against")
    add("--ties", choices=("order", "likelihood"), help="default: that of the library; recorded results: order")
    add("--naive-steps", type=int, help="measure so many naive steps (at least 2) and extrapolate; 0: all")
    add("--naive-heads", type=int, help="and only so many heads (at least 3); 0: all")
    add("--image-size", type=int, default=112, help="of --scaling and --random")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="JSON file")
    add("--against", type=Path, help="folder of another checkout, to be timed side by side with this one")
    add("--turns", type=int, default=3, help="of each checkout")
    options = parser.parse_args(arguments)
    if options.naive_steps and options.naive_steps < 2:
        parser.error("--naive-steps must be at least 2, or 0 for all: the first step includes one-time work")
    if options.naive_heads and (options.naive_heads < 3 or options.naive_steps != 2):
        parser.error("--naive-heads must be at least 3, or 0 for all, and goes with --naive-steps 2")
    if options.scaling and options.naive_steps is None and options.naive_heads is None:
        options.naive_steps, options.naive_heads = 2, 4
    if not (options.random or options.scaling or (options.model and options.id and options.ood)):
        parser.error("give --random, --scaling, or --model with --id and --ood")
    if options.scaling and options.against:
        parser.error("--against takes one case: give --random or --model")
    options.methods = options.methods or list(METHODS[1:] if options.against else METHODS)
    options.budget = options.budget or (4 if options.scaling else 8)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = read_options(argv)
    if options.against:
        compare(options, argv)
        return
    rows: list[dict[str, Any]] = []
    for case in cases_of(options):
        timed(case, options.scores[0], "exact", 1, options)  # warm-up: loads libraries and selects kernels
        for score, method in product(options.scores, options.methods):
            rows.append(measure(case, score, method, options))
            print(*lines_of(rows)[-1], sep="  ", flush=True)
    if options.output:
        report = {
            "benchmark": "circuit",
            "seed": options.seed,
            "versions": versions(),
            "python": platform.python_version(),
            "hardware": hardware(options.device),
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "results": rows,
        }
        store(options.output, report)


if __name__ == "__main__":
    main()
