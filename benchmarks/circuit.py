"""Circuit extraction: the naive and the exact method, in seconds and in model forwards.

    python benchmarks/circuit.py --tiny
    python benchmarks/circuit.py --ties order    # how time grows with samples

Weights are random. A model forward is one pass of the whole model over all samples. The naive method may be measured
on its first steps only (`--naive-steps`), and extrapolated by the number of heads evaluated; such numbers are marked.
Rows are added to `results/tables/circuits.csv`; `against.py` compares two checkouts.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

SCORES, METHODS = ("acc", "ood", "avg"), ("naive", "exact")
TINY: dict[str, Any] = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0}
KEY = ("case", "score", "method", "hardware")  # identifies a row

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model with data."""

    name: str
    model: he.Ensemble
    inside: Batches
    outside: Batches

    @property
    def heads(self) -> int:
        """The number of heads that may be removed."""
        return sum(map(len, self.model.heads[0]))


def random_case(name: str, pixels: int, samples: int, options: argparse.Namespace, **shape: Any) -> Case:
    """A ViT with random weights, labelled by its own predictions; OOD images have more contrast."""
    torch.manual_seed(options.seed)
    model = he.convert(timm.create_model("vit_base_patch16_224", img_size=pixels, num_classes=10, **shape).eval())
    model = model.to(options.device)
    draws = torch.Generator().manual_seed(options.seed)
    inside, outside = (torch.randn(samples, 3, pixels, pixels, generator=draws) for _ in range(2))
    with torch.no_grad():
        labels = torch.cat([model(part.to(options.device))[0].argmax(-1).cpu() for part in inside.split(64)])
    return Case(name, model, [(inside, labels)], [(2 * outside, torch.zeros_like(labels))])


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """The cases to measure."""
    if options.tiny:
        yield random_case("tiny", 16, options.samples or 64, options, **TINY)
    else:
        most, size = options.samples or 256, options.image_size
        for samples in (most // 8, most // 4, most // 2, most):
            yield random_case(f"ViT-B/16 at {size} px, {samples} + {samples} samples", size, samples, options)


def timed(
    case: Case, score: Any, method: Any, budget: int, options: argparse.Namespace
) -> tuple[float, he.HeadRanking]:
    """Seconds of an extraction, including reading the batches."""
    settings: dict[str, Any] = {"score": score, "method": method, "budget": budget, "seed": options.seed}
    settings |= {"ties": options.ties} if options.ties else {}
    start = time.perf_counter()
    ranking = he.extract_circuit(
        case.model,
        case.inside,
        None if score == "acc" else case.outside,
        progress=False,
        **settings,
    )
    if options.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start, ranking


def measure(case: Case, score: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one extraction, or the first steps of a naive one, extrapolated: every head costs the same."""
    steps = min(options.naive_steps or options.budget, options.budget) if method == "naive" else options.budget
    seconds, ranking = timed(case, score, method, steps, options)
    forwards = ranking.provenance["model_forwards"]
    evaluated, all_heads = (sum(case.heads - step for step in range(count)) for count in (steps, options.budget))
    if remaining := all_heads - evaluated:
        first, _ = timed(case, score, method, 1, options)  # work done once for all steps must not be scaled up
        seconds += (seconds - first) / (evaluated - case.heads) * remaining
        forwards += remaining
    return {
        "case": case.name,
        "score": score,
        "method": method,
        "heads": case.heads,
        "id_samples": len(case.inside[0][1]),
        "ood_samples": 0 if score == "acc" else len(case.outside[0][1]),
        "budget": options.budget,
        "seconds": seconds,
        "model_forwards": forwards,
        "final_score": "" if remaining else ranking.scores[-1],
        "extrapolated": str(remaining > 0).lower(),
        "removed": " ".join(map(str, ranking.heads)),
        "hardware": torch.cuda.get_device_name()
        if options.device != "cpu"
        else f"CPU, {torch.get_num_threads()} threads",
        "dtype": "float32",
        "torch": str(torch.__version__),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="a small model with random weights, for any machine")
    add("--budget", type=int, default=8)
    add("--samples", type=int, help="ID samples, and as many OOD samples; default: all there are")
    add("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--ties", choices=("order", "likelihood"), help="default: that of the library; recorded results: order")
    add("--naive-steps", type=int, help="measure so many naive steps (at least 2) and extrapolate; default: all")
    add("--image-size", type=int, default=112, help="of ViT-B/16")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, default=ROOT / "results" / "tables" / "circuits.csv")
    options = parser.parse_args(arguments)
    stored = read_csv(options.output) if options.output.exists() else []
    rows = {tuple(row[key] for key in KEY): row for row in stored}
    for case in cases_of(options):
        timed(case, options.scores[0], "exact", 1, options)  # warm-up: loads libraries and selects kernels
        for score, method in product(options.scores, options.methods):
            row = measure(case, score, method, options)
            rows[tuple(row[key] for key in KEY)] = row
            print(*(row[key] for key in ("case", "score", "method", "seconds", "model_forwards")), sep="  ", flush=True)
            keys = list(dict.fromkeys(key for one in rows.values() for key in one))
            write_csv(options.output, [keys, *([one.get(key, "") for key in keys] for one in rows.values())])


if __name__ == "__main__":
    main()
