"""Circuit extraction: naive, exact and screened side by side, in seconds and in model forwards.

    python benchmarks/circuit.py --tiny
    python benchmarks/circuit.py --model FOLDER --id id.safetensors --ood ood.safetensors --budget 24
    python benchmarks/circuit.py --scaling --output results/circuit_scaling.json

A data file (`.safetensors` or `.pt`) holds the tensors `inputs`, preprocessed, and `labels`. A model forward is
one pass of the whole model over all samples. The naive method may be measured on its first steps only
(`--naive-steps`), and on some heads only (`--naive-heads`), and extrapolated by the number of heads evaluated;
such numbers are marked. `--scaling` does both.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from circuit_cases import Case, cases_of

import hydra_ensembles
from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.circuit.scores import Method, Score
from hydra_ensembles.heads.ranking import HeadRanking

SCORES: tuple[Score, ...] = get_args(Score)
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Result:
    """One run. `extrapolated` numbers are measured on `measured_steps` of the budget and scaled up.

    The audit of the screened method comes from a second run, which takes the same choices: what is audited is
    work of the exact method.
    """

    case: str
    score: Score
    method: Method
    heads: int
    id_samples: int
    ood_samples: int
    budget: int
    seconds: float
    model_forwards: float
    layer_evaluations: int
    final_score: float | None
    measured_steps: int
    extrapolated: bool
    audit: dict[str, Any]
    seconds_with_audit: float | None
    removed: list[str]


def measure(case: Case, score: Score, method: Method, options: argparse.Namespace) -> Result:
    """Run one extraction, or a part of a naive one: its first steps, or some of its heads."""
    naive = method == "naive"
    steps = min(options.naive_steps or options.budget, options.budget) if naive else options.budget
    heads = len(case.candidates)
    asked = min(options.naive_heads or heads, heads) if naive else heads
    removed = case.candidates[: heads - asked]  # heads that are off cost the naive method as much as others
    seconds, ranking = timed(case, score, method, steps, options, removed=removed)
    made = ranking.provenance
    left = evaluations(heads, options.budget) - evaluations(asked, steps)
    forwards, blocks = made["model_forwards"], made["layer_evaluations"]
    if naive and left:  # every head costs the same; what is done once for all steps must not be scaled up
        first, start = timed(case, score, method, 1, options, removed=removed)
        evaluated = evaluations(asked, steps) - asked
        seconds += (seconds - first) / evaluated * left
        forwards += left
        blocks += round((blocks - start.provenance["layer_evaluations"]) / evaluated * left)
    audited: float | None = None
    if method == "screened" and options.audit_steps:
        audited, again = timed(case, score, method, steps, options, audit_steps=options.audit_steps)
        made = {**made, "audit": again.provenance["audit"]}
    return Result(
        case=case.name,
        score=score,
        method=method,
        heads=heads,
        id_samples=made["id_samples"],
        ood_samples=made["ood_samples"],
        budget=options.budget,
        seconds=seconds,
        model_forwards=forwards,
        layer_evaluations=blocks,
        final_score=None if left else ranking.scores[-1],
        measured_steps=steps,
        extrapolated=left > 0,
        audit=dict(made["audit"]),
        seconds_with_audit=audited,
        removed=[str(head) for head in ranking.heads],
    )


def evaluations(heads: int, steps: int) -> int:
    """Heads that the naive method evaluates in so many steps."""
    return sum(heads - step for step in range(steps))


def timed(
    case: Case,
    score: Score,
    method: Method,
    budget: int,
    options: argparse.Namespace,
    audit_steps: int = 0,
    removed: Sequence[tuple[int, int]] = (),
) -> tuple[float, HeadRanking]:
    """Seconds of an extraction, from the call to its result, reading of the batches included."""
    synchronize(options.device)
    start = time.perf_counter()
    ranking = extract_circuit(
        case.model,
        case.id_batches,
        case.ood_batches,
        score=score,
        budget=budget,
        method=method,
        layers=case.layers,
        removed=removed,
        batch_size=options.batch_size,
        progress=options.progress,
        screen_size=options.screen_size,
        audit_steps=audit_steps,
        seed=options.seed,
    )
    synchronize(options.device)
    return time.perf_counter() - start, ranking


def estimate(cases: Sequence[Case], options: argparse.Namespace) -> float:
    """Seconds that all runs will take, roughly: one forward, timed, and how many forwards a method may need."""
    total = 0.0
    for case in cases:
        heads, batches = len(case.candidates), [*case.id_batches, *case.ood_batches]
        needed = evaluations(heads, options.budget)
        steps = min(options.naive_steps or options.budget, options.budget)
        asked = min(options.naive_heads or heads, heads)
        part = evaluations(asked, steps) + (0 if (asked, steps) == (heads, options.budget) else asked)
        with torch.no_grad():
            for _ in range(2):  # the second time counts
                synchronize(options.device)
                start = time.perf_counter()
                for inputs, _ in batches:
                    for piece in inputs.split(64):
                        case.model(piece)
                synchronize(options.device)
                forward = time.perf_counter() - start
        for score in options.scores:
            forwards = {"naive": part, "exact": needed / (12 if score == "acc" else 4), "screened": needed / 20}
            share = 0.5 if score == "acc" else 1.0
            total += share * forward * sum(forwards[method] for method in options.methods)
    return total


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def table(results: list[Result]) -> str:
    """Results of a case side by side, a line for each method."""
    lines: list[str] = []
    for case in dict.fromkeys(result.case for result in results):
        rows = [result for result in results if result.case == case]
        first = rows[0]
        lines.append(
            f"{case}: {first.heads} heads, {first.id_samples} ID samples, budget {first.budget} (* extrapolated)"
        )
        lines.append("score  method      seconds  speedup  forwards  fewer  final S  audit")
        for row in rows:
            naive = next((one for one in rows if one.score == row.score and one.method == "naive"), None)
            speed, fewer = (
                ("", "")
                if naive is None
                else (
                    f"{naive.seconds / row.seconds:.1f}x",
                    f"{naive.model_forwards / row.model_forwards:.1f}x",
                )
            )
            final = "" if row.final_score is None else f"{100 * row.final_score:.2f}"
            steps, misses = len(row.audit["steps"]), row.audit["divergences"]
            audit = f"{steps - misses} of {steps}" if steps else ""
            mark = "*" if row.extrapolated else " "
            lines.append(
                f"{row.score:5}  {row.method:9} {row.seconds:8.2f}{mark} {speed:>7}  {row.model_forwards:8.1f}  "
                f"{fewer:>5}  {final:>7}  {audit}"
            )
        lines.append("")
    return "\n".join(lines)


def merged(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A report with the rows of an earlier one of the same machine and versions for cases and scores it has not."""
    if any(earlier.get(key) != value for key, value in report.items() if key != "results"):
        return report
    new = {(row["case"], row["score"]) for row in report["results"]}
    kept = [row for row in earlier["results"] if (row["case"], row["score"]) not in new]
    rows = kept + report["results"]
    return report | {"results": sorted(rows, key=lambda row: (row["case"], SCORES.index(row["score"])))}


# --- command ---------------------------------------------------------------------------------------------


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random model, for any machine")
    parser.add_argument("--scaling", action="store_true", help="how time grows with heads and samples")
    parser.add_argument("--model", type=Path, help="folder of a saved ensemble")
    parser.add_argument("--id", type=Path, help="file of ID samples")
    parser.add_argument("--ood", type=Path, help="file of OOD samples")
    parser.add_argument("--name", help="what to call the case in the results")
    parser.add_argument("--budget", type=int, help="default: 8, and 4 for --scaling")
    parser.add_argument("--samples", type=int, help="ID samples, and as many OOD samples; default: all there are")
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--naive-steps", type=int, help="measure so many naive steps (at least 2) and extrapolate; 0: all"
    )
    parser.add_argument("--naive-heads", type=int, help="and only so many heads (at least 3); 0: all")
    parser.add_argument("--image-size", type=int, default=112, help="of --scaling")
    parser.add_argument("--screen-size", type=int, help="default: a third of the heads")
    parser.add_argument(
        "--audit-steps", type=int, help="of a second run of the screened method; default: 3, and 0 for --scaling"
    )
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument(
        "--output", type=Path, help="JSON file; rows of other cases and scores of the same machine and versions stay"
    )
    options = parser.parse_args()
    if options.naive_steps and options.naive_steps < 2:
        parser.error("--naive-steps must be at least 2, or 0 for all: the first step includes what is done once")
    if options.naive_heads and (options.naive_heads < 3 or options.naive_steps != 2):
        parser.error("--naive-heads must be at least 3, or 0 for all, and goes with --naive-steps 2")
    if options.scaling and options.naive_steps is None and options.naive_heads is None:
        options.naive_steps, options.naive_heads = 2, 4
    if not (options.tiny or options.scaling or (options.model and options.id and options.ood)):
        parser.error("give --tiny, --scaling, or --model with --id and --ood")
    options.budget = options.budget or (4 if options.scaling else 8)
    if options.audit_steps is None:
        options.audit_steps = 0 if options.scaling else 3
    return options


def main() -> None:
    options = read_options()
    results: list[Result] = []
    cases = cases_of(options)
    print(f"about {estimate(cases, options):.0f} s", flush=True)
    for case in cases:
        timed(case, options.scores[0], "screened", 1, options)  # libraries load and kernels are chosen here
        for score in options.scores:
            for method in options.methods:
                results.append(measure(case, score, method, options))
                print(table(results[-1:]).splitlines()[2], flush=True)
    print("\n" + table(results))
    if options.output:
        cuda = torch.device(options.device).type == "cuda"
        report = {
            "benchmark": "circuit",
            "seed": options.seed,
            "versions": {"hydra_ensembles": hydra_ensembles.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "results": [asdict(result) for result in results],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        if options.output.exists():
            report = merged(json.loads(options.output.read_text()), report)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
