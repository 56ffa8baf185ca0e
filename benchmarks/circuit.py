"""Circuit extraction: naive, exact and screened side by side, in seconds and in model forwards.

    python benchmarks/circuit.py --tiny
    python benchmarks/circuit.py --model FOLDER --id id.safetensors --ood ood.safetensors --budget 24
    python benchmarks/circuit.py --scaling --output results/circuit_scaling.json

A data file (`.safetensors` or `.pt`) holds the tensors `inputs`, preprocessed, and `labels`. A model forward is
one pass of the whole model over all samples. The naive method may be measured on its first steps only
(`--naive-steps`) and extrapolated by the number of heads evaluated; such numbers are marked.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

import hydra_ensembles
from hydra_ensembles.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, all_heads
from hydra_ensembles.ensemble import Ensemble
from hydra_ensembles.heads.circuit import Method, Score, extract_circuit
from hydra_ensembles.heads.ranking import HeadRanking

Batches = list[tuple[Tensor, Tensor]]
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


@dataclass(frozen=True)
class Case:
    """A model with data."""

    name: str
    model: Ensemble
    id_batches: Batches
    ood_batches: Batches
    layers: tuple[int, ...] | None = None


def measure(case: Case, score: Score, method: Method, options: argparse.Namespace) -> Result:
    """Run one extraction, or the first steps of a naive one."""
    steps = min(options.naive_steps or options.budget, options.budget) if method == "naive" else options.budget
    seconds, ranking = timed(case, score, method, steps, options)
    made = ranking.provenance
    heads = sum(len(case.model.heads[0][layer]) for layer in case.layers or range(case.model.num_layers))
    left = sum(heads - step for step in range(steps, options.budget))  # heads not evaluated yet
    forwards, blocks = made["model_forwards"], made["layer_evaluations"]
    if left:  # every head costs the same; what is done once for all steps must not be scaled up
        first, start = timed(case, score, method, 1, options)
        evaluated = sum(heads - step for step in range(1, steps))
        seconds += (seconds - first) / evaluated * left
        forwards += left
        blocks += round((blocks - start.provenance["layer_evaluations"]) / evaluated * left)
    audited: float | None = None
    if method == "screened" and options.audit_steps:
        audited, again = timed(case, score, method, steps, options, options.audit_steps)
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


def timed(
    case: Case, score: Score, method: Method, budget: int, options: argparse.Namespace, audit_steps: int = 0
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
        batch_size=options.batch_size,
        progress=options.progress,
        screen_size=options.screen_size,
        audit_steps=audit_steps,
        seed=options.seed,
    )
    synchronize(options.device)
    return time.perf_counter() - start, ranking


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


# --- cases -----------------------------------------------------------------------------------------------


def load_batches(path: Path, device: str, limit: int | None) -> Batches:
    """A data file as one batch on the device."""
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    inputs, labels = tensors["inputs"][:limit].float(), tensors["labels"][:limit].long()
    return [(inputs.to(device), labels.to(device))]


def random_case(
    name: str, encoder: EncoderConfig, stem: PatchStemConfig, samples: int, options: argparse.Namespace
) -> Case:
    """A model with random weights and, as labels, its own predictions; OOD pictures have more contrast."""
    generator = torch.Generator().manual_seed(options.seed)
    config = EnsembleConfig(stem, encoder, ReadoutConfig(num_classes=10), all_heads(encoder))
    model = Ensemble(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 2:
                fan_in = parameter.shape[-1]
                scale = 1.0 if "classifier" in key or "position" in key else 1.5 / fan_in**0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model = model.to(options.device, torch.float32).eval()
    height, width = stem.image_size
    shape = (samples, stem.channels, height, width)
    inside = torch.randn(shape, generator=generator)
    outside = 2 * torch.randn(shape, generator=generator)
    inside, outside = inside.to(options.device), outside.to(options.device)
    with torch.no_grad():
        labels = torch.cat([model(part)[0].argmax(-1) for part in inside.split(64)])
    return Case(name, model, [(inside, labels)], [(outside, torch.zeros_like(labels))])


def tiny_case(options: argparse.Namespace) -> Case:
    encoder = EncoderConfig(width=64, layers=4, heads=4, head_dim=16, mlp_width=128)
    stem = PatchStemConfig(patch_size=(4, 4), grid=(4, 4))
    return random_case("tiny", encoder, stem, options.samples or 64, options)


def scaling_cases(options: argparse.Namespace) -> list[Case]:
    """ViT-B/16 shape: more samples with all heads, and more heads with the same samples."""
    encoder = EncoderConfig(width=768, layers=12, heads=12, head_dim=64, mlp_width=3072)
    stem = PatchStemConfig(patch_size=(16, 16), grid=(14, 14))
    middle = options.samples or 128
    cases = []
    for samples in (middle // 2, middle, middle * 2):
        made = random_case(f"ViT-B/16, 12 layers, {samples} + {samples} samples", encoder, stem, samples, options)
        cases.append(made)
        if samples == middle:
            for count in (3, 6):
                layers = tuple(range(12 - count, 12))
                name = f"ViT-B/16, last {count} layers, {samples} + {samples} samples"
                cases.append(Case(name, made.model, made.id_batches, made.ood_batches, layers))
    return cases


def cases_of(options: argparse.Namespace) -> list[Case]:
    if options.tiny:
        return [tiny_case(options)]
    if options.scaling:
        return scaling_cases(options)
    model = Ensemble.from_pretrained(options.model).to(options.device, torch.float32)
    id_batches = load_batches(options.id, options.device, options.samples)
    ood_batches = load_batches(options.ood, options.device, options.samples)
    return [Case(options.name or options.model.name, model, id_batches, ood_batches)]


# --- command ---------------------------------------------------------------------------------------------


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random model, for any machine")
    parser.add_argument("--scaling", action="store_true", help="how time grows with heads and samples")
    parser.add_argument("--model", type=Path, help="folder of a saved ensemble")
    parser.add_argument("--id", type=Path, help="file of ID samples")
    parser.add_argument("--ood", type=Path, help="file of OOD samples")
    parser.add_argument("--name", help="what to call the case in the results")
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--samples", type=int, help="ID samples, and as many OOD samples; default: all there are")
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--naive-steps", type=int, help="measure so many naive steps (at least 2) and extrapolate")
    parser.add_argument("--screen-size", type=int, default=12)
    parser.add_argument("--audit-steps", type=int, default=3, help="of a second run of the screened method")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.naive_steps is not None and options.naive_steps < 2:
        parser.error("--naive-steps must be at least 2: the first step includes what is done once")
    if not (options.tiny or options.scaling or (options.model and options.id and options.ood)):
        parser.error("give --tiny, --scaling, or --model with --id and --ood")
    return options


def main() -> None:
    options = read_options()
    results: list[Result] = []
    for case in cases_of(options):
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
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
