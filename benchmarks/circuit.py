"""Circuit extraction: naive, exact and screened side by side, in seconds and in model forwards.

    python benchmarks/circuit.py --tiny
    python benchmarks/circuit.py --model FOLDER --id id.safetensors --ood ood.safetensors --budget 24
    python benchmarks/circuit.py --scaling --output results/circuit_scaling.json
    python benchmarks/circuit.py --random vit-b16 --samples 128 --budget 8 --against FOLDER      # and another checkout

A data file holds the tensors `inputs`, preprocessed, and `labels`. A model forward is one pass of the whole model over
all samples. The naive method may be measured on its first steps only (`--naive-steps`), and on some heads only
(`--naive-heads`), and extrapolated by the number of heads evaluated; such numbers are marked. `--scaling` does both.
With `--against`, a process for each checkout extracts the same circuits, in turn; they must be equal.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Worker, hardware, load, serve, store, synchronize, table, versions
from safetensors.torch import load_file
from torch import Tensor

import hydra_ensembles as he

SCORES, METHODS = ("acc", "ood", "avg"), ("naive", "exact", "screened")
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


def random_case(name: str, shape: str, pixels: int, samples: int, device: str, seed: int) -> Case:
    """A ViT with random weights and, as labels, its own predictions; OOD pictures have more contrast."""
    import timm

    torch.manual_seed(seed)
    model = he.convert(timm.create_model("vit_base_patch16_224", img_size=pixels, num_classes=10, **SHAPES[shape]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 2:
                scale = 1.0 if "classifier" in key or "position" in key else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model = model.to(device, torch.float32).eval()
    inside, outside = (k * torch.randn(samples, 3, pixels, pixels, generator=generator).to(device) for k in (1, 2))
    with torch.no_grad():
        labels = torch.cat([model(part)[0].argmax(-1) for part in inside.split(64)])
    return Case(name, model, [(inside, labels)], [(outside, torch.zeros_like(labels))])


def scaling_cases(options: argparse.Namespace) -> list[Case]:
    """ViT-B/16 shape: more samples with all heads, and more heads with the same samples."""
    most, pixels, cases = options.samples or 256, options.image_size, []
    shape = f"ViT-B/16 at {pixels} px"
    for samples in (most // 8, most // 4, most // 2, most):
        name = f"{shape}, 12 layers, {samples} + {samples} samples"
        made = random_case(name, "vit-b16", pixels, samples, options.device, options.seed)
        cases.append(made)
        if samples == most // 4:
            for count in (3, 6):
                layers = tuple(range(12 - count, 12))
                name = f"{shape}, last {count} layers, {samples} + {samples} samples"
                cases.append(Case(name, made.model, made.id_batches, made.ood_batches, layers))
    return cases


def cases_of(options: argparse.Namespace) -> list[Case]:
    """What is to be measured."""
    if options.scaling:
        return scaling_cases(options)
    if options.random:
        pixels = 16 if options.random == "tiny" else options.image_size
        return [
            random_case(options.random, options.random, pixels, options.samples or 64, options.device, options.seed)
        ]
    model = he.Ensemble.from_pretrained(options.model).to(options.device, torch.float32)
    files = [load_file(path, device=options.device) for path in (options.id, options.ood)]
    batches = [[(one["inputs"][: options.samples].float(), one["labels"][: options.samples].long())] for one in files]
    return [Case(options.name or options.model.name, model, batches[0], batches[1])]


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(case: Case, score: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: one extraction, or a part of a naive one (its first steps, or some of its heads), scaled up.

    The audit of the screened method comes from a second run, which takes the same choices: what is audited is work of
    the exact method.
    """
    naive, heads = method == "naive", len(case.candidates)
    steps = min(options.naive_steps or options.budget, options.budget) if naive else options.budget
    asked = min(options.naive_heads or heads, heads) if naive else heads
    removed = case.candidates[: heads - asked]  # heads that are off cost the naive method as much as others
    seconds, ranking = timed(case, score, method, steps, options, removed=removed)
    made = ranking.provenance
    left = evaluations(heads, options.budget) - evaluations(asked, steps)
    forwards, blocks, audit, audited = made["model_forwards"], made["layer_evaluations"], made["audit"], None
    if naive and left:  # every head costs the same; what is done once for all steps must not be scaled up
        first, start = timed(case, score, method, 1, options, removed=removed)
        evaluated = evaluations(asked, steps) - asked
        seconds += (seconds - first) / evaluated * left
        forwards += left
        blocks += round((blocks - start.provenance["layer_evaluations"]) / evaluated * left)
    if method == "screened" and options.audit_steps:
        audited, again = timed(case, score, method, steps, options, audit_steps=options.audit_steps)
        audit = again.provenance["audit"]
    return {
        "case": case.name,
        "score": score,
        "method": method,
        "heads": heads,
        "id_samples": made["id_samples"],
        "ood_samples": made["ood_samples"],
        "budget": options.budget,
        "seconds": seconds,
        "model_forwards": forwards,
        "layer_evaluations": blocks,
        "final_score": None if left else ranking.scores[-1],
        "measured_steps": steps,
        "extrapolated": left > 0,
        "audit": dict(audit),
        "seconds_with_audit": audited,
        "removed": [str(head) for head in ranking.heads],
    }


def evaluations(heads: int, steps: int) -> int:
    """Heads that the naive method evaluates in so many steps."""
    return sum(heads - step for step in range(steps))


def timed(
    case: Case, score: str, method: str, budget: int, options: argparse.Namespace, **more: Any
) -> tuple[float, he.HeadRanking]:
    """Seconds of an extraction, from the call to its result, reading of the batches included."""
    settings: dict[str, Any] = {"score": score, "method": method, "budget": budget, "seed": options.seed, **more}
    if method == "screened":
        settings = {"screen_size": options.screen_size, "audit_steps": 0, **settings}
    synchronize(options.device)
    start = time.perf_counter()
    ranking = he.extract_circuit(
        case.model,
        case.id_batches,
        case.ood_batches,
        layers=case.layers,
        batch_size=options.batch_size,
        progress=False,
        **settings,
    )
    synchronize(options.device)
    return time.perf_counter() - start, ranking


def merged(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A report with the rows of an earlier one of the same machine and versions for cases and scores it has not."""
    if any(earlier.get(key) != value for key, value in report.items() if key != "results"):
        return report
    new = {(row["case"], row["score"]) for row in report["results"]}
    kept = [row for row in earlier["results"] if (row["case"], row["score"]) not in new]
    rows = kept + report["results"]
    return report | {"results": sorted(rows, key=lambda row: (row["case"], SCORES.index(row["score"])))}


def lines_of(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """A line of a table for each row, beside the naive one of its case and score."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        same = [one for one in rows if (one["case"], one["score"]) == (row["case"], row["score"])]
        naive = next((one for one in same if one["method"] == "naive"), None)
        star = " (extrapolated)" if row["extrapolated"] else ""
        final = "" if row["final_score"] is None or row["extrapolated"] else f"{100 * row['final_score']:.2f}"
        keys = ("seconds", "model_forwards")
        faster, fewer = ("" if naive is None else f"{naive[key] / row[key]:.1f}x" for key in keys)
        numbers = (f"{row['seconds']:.1f}", faster, f"{row['model_forwards']:,.0f}", fewer, final)
        lines.append((row["case"], row["score"], row["method"] + star, *numbers))
    return lines


def circuit_table(name: str) -> str:
    """A table of the documents: naive, exact and screened for each case and score of a results file."""
    data = load(name)
    rows = data["results"]
    about = (
        f"{data['hardware']}, torch {data['versions']['torch']}, {data['dtype']}, seed {data['seed']}; up to "
        f"{max(row['id_samples'] for row in rows)} ID and {max(row['ood_samples'] for row in rows)} OOD samples, "
        f"{rows[0]['heads']} heads, budget {rows[0]['budget']}. From `results/{name}`."
    )
    return "\n".join([*table(HEADER, lines_of(rows), "lll"), "", about])


# --- another checkout ------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be one of two checkouts: extract a circuit when asked to."""
    (case,) = cases_of(options)

    def extract(score: str, method: str) -> dict[str, Any]:
        seconds, ranking = timed(case, score, method, options.budget, options)
        return {"seconds": seconds, "heads": [str(head) for head in ranking.heads]}

    serve({"extract": extract})


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Extract the same circuits with this checkout and with another, which take turns; a line for each circuit."""
    workers = [Worker(__file__, folder, arguments) for folder in (ROOT, options.against)]
    rows = []
    print(f"{'score':6}{'method':10}{'new s':>9}{'old s':>9}{'new/old':>9}  same heads", flush=True)
    for score in options.scores:
        for method in options.methods:
            taken: list[list[float]] = [[], []]
            heads: list[list[str]] = [[], []]
            for turn in range(options.turns + 1):
                for index in (0, 1) if turn % 2 == 0 else (1, 0):
                    found = workers[index].ask("extract", score=score, method=method)
                    heads[index] = found["heads"]
                    if turn:  # in the first, libraries load and kernels are chosen
                        taken[index].append(found["seconds"])
            new, old = (statistics.median(one) for one in taken)
            row = {"score": score, "method": method, "new_s": new, "old_s": old, "ratio": new / old}
            rows.append(row | {"same_heads": heads[0] == heads[1], "times": taken})
            print(f"{score:6}{method:10}{new:9.3f}{old:9.3f}{new / old:9.3f}  {heads[0] == heads[1]}", flush=True)
    for worker in workers:
        worker.close()
    return rows


# --- command ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
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
    add("--naive-steps", type=int, help="measure so many naive steps (at least 2) and extrapolate; 0: all")
    add("--naive-heads", type=int, help="and only so many heads (at least 3); 0: all")
    add("--image-size", type=int, default=112, help="of --scaling and --random")
    add("--screen-size", type=int, help="default: a third of the heads")
    add("--audit-steps", type=int, help="of a second run of the screened method; default: 3, and 0 for --scaling")
    add("--batch-size", type=int)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="JSON file; rows of other cases and scores of the same machine and versions stay")
    add("--against", type=Path, help="folder of another checkout, to be timed side by side with this one")
    add("--turns", type=int, default=3, help="of each checkout")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.naive_steps and options.naive_steps < 2:
        parser.error("--naive-steps must be at least 2, or 0 for all: the first step includes what is done once")
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
    if options.audit_steps is None:
        options.audit_steps = 0 if options.scaling else 3
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = read_options(given)
    if options.worker:
        work(options)
        return
    if options.against:
        both = compare(options, given)
        if options.output:
            about = {"benchmark": "circuit, two checkouts", "hardware": hardware(options.device)}
            store(options.output, {**about, "rows": both})
        return
    rows: list[dict[str, Any]] = []
    for case in cases_of(options):
        timed(case, options.scores[0], "exact", 1, options)  # libraries load and kernels are chosen here
        for score in options.scores:
            for method in options.methods:
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
        earlier = json.loads(options.output.read_text()) if options.output.exists() else {"results": []}
        store(options.output, merged(earlier, report))


if __name__ == "__main__":
    main()
