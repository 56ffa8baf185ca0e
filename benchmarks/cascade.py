"""The price of a cascade beside the user's own model, alternately in one run; writes results/tables/cascade_speed.csv.

    python benchmarks/cascade.py --device cuda                                   # ViT-B/16, bfloat16, CUDA graphs
    python benchmarks/cascade.py --shape vit_small_patch16_224 --batches 8       # a CPU, float32

Weights are random, and so are the rows that go on: a tenth of them, or (*half foreign*) a tenth of one half of the
batch and four fifths of the other. On a GPU everything is compiled and recorded as CUDA graphs, like the user's model;
on a CPU everything is eager, by one thread, and what counts is processor time: other processes do not disturb it.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from against import in_mode, milliseconds
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.cascade import Cascade, CascadeSettings, common_layers

TABLE = Path(__file__).resolve().parents[1] / "results" / "tables" / "cascade_speed.csv"
HEAD = (
    *("contender", "shape", "batch", "traffic", "ms", "user_ms", "ratio", "lowest", "highest", "turns"),
    *("hardware", "dtype", "torch", "seed"),
)
TURNS, WARM, AT_LEAST = 5, 25, 3
ASKED, FOREIGN = 0.1, 0.8  # share of rows that go on: of known and of foreign ones


def tuned(base: he.Ensemble, seed: int) -> he.Ensemble:
    """A member: noise stands for its fine-tuning."""
    draws = torch.Generator(base.device).manual_seed(seed)
    state = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=draws, device=tensor.device)
        for name, tensor in base.state_dict().items()
    }
    return he.Ensemble.from_state(base.config, state, base.metadata)


def at_random(batch: int, foreign: bool, device: str, seed: int) -> Callable[[Tensor], Tensor]:
    """Doubts that send the wanted shares of a batch on, whatever the answers are."""
    draws = torch.Generator(device).manual_seed(seed)
    shares = torch.full((batch,), ASKED, device=device)
    if foreign:
        shares[batch // 2 :] = FOREIGN

    def doubts(log_probs: Tensor) -> Tensor:
        drawn = torch.rand(batch, generator=draws, device=device) < shares  # threshold: one half
        return torch.where(drawn, 1.0, 0.0)[: len(log_probs)]

    return doubts


def processor_milliseconds(function: Callable[[], Any]) -> float:
    """The median processor time of a call on a CPU."""
    times = []
    for _ in range(AT_LEAST):
        began = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def measure(options: argparse.Namespace) -> Iterator[list[Any]]:
    """Every contender beside the user's model, in turns: a row of the table each."""
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(options.seed)
    if not cuda:
        torch.set_num_threads(1)
    user = timm.create_model(options.shape, pretrained=False).eval().to(options.device)
    base = he.convert(user)
    models = [tuned(base, seed) for seed in range(3)]
    layers = base.num_layers - 2
    soup, hydra, deep = he.soup(models), he.fuse(models, mlp="separate", average=layers), he.Ensemble.stack(models)
    del models
    contenders: dict[str, Any] = {"soup": soup, "hydra": hydra, "deep": deep}
    for name, (first, second) in {"soup, hydra": (soup, hydra), "soup, deep": (soup, deep)}.items():
        settings = CascadeSettings((0.5,), (ASKED,), layers=common_layers(first, second))
        contenders[f"cascade of {name}"] = Cascade([first, second], settings)
        if "limit" in options.traffic:
            contenders[f"cascade of {name}, at most 20 %"] = contenders[f"cascade of {name}"].limited(0.2)
    hardware = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    plain = user.to(dtype)
    contenders = {name: model.to(dtype) for name, model in contenders.items()}
    if options.contenders:
        contenders = {name: model for name, model in contenders.items() if name in options.contenders}
    for batch in options.batches:
        images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to(options.device, dtype)
        for name, model in contenders.items():
            torch.compiler.reset()
            own = in_mode(plain, images, "graphed" if cuda else "eager")
            runner = model.optimize(None, compile=cuda)
            for foreign in (False, True) if isinstance(model, Cascade) and "foreign" in options.traffic else (False,):
                if "20 %" in name and not foreign:
                    continue
                vars(sys.modules[Cascade.__module__])["doubt_of"] = at_random(
                    batch, foreign, options.device, options.seed
                )
                with torch.inference_mode():
                    for _ in range(WARM if cuda else 1):  # every number of rows that goes on often is compiled
                        runner(images)
                    turns = [
                        [
                            milliseconds(one, "cuda", 0.5, AT_LEAST) if cuda else processor_milliseconds(one)
                            for one in (partial(runner, images), own)
                        ]
                        for _ in range(TURNS)
                    ]
                ours, theirs = (statistics.median(times) for times in zip(*turns, strict=True))
                ratios = sorted(mine / other for mine, other in turns)
                traffic = "half foreign" if foreign else "known"
                numbers = [f"{one:.5g}" for one in (ours, theirs, ours / theirs, ratios[0], ratios[-1])]
                about = [TURNS, hardware, str(dtype).removeprefix("torch."), torch.__version__, options.seed]
                print(name, batch, traffic, *numbers, sep="  ", flush=True)
                yield [name, options.shape, batch, traffic, *numbers, *about]
            del runner
            if cuda:
                torch.cuda.empty_cache()


def key_of(row: list[Any]) -> list[str]:
    """What identifies a row: hardware, shape, batch, traffic, contender."""
    return [str(row[HEAD.index(name)]) for name in ("hardware", "shape", "batch", "traffic", "contender")]


def main() -> None:
    """Measure, and put each row into the table, in place of an earlier one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="vit_base_patch16_224")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 8])
    parser.add_argument("--traffic", nargs="*", default=["foreign", "limit"], help="limit: with 20 %% going on")
    parser.add_argument("--contenders", nargs="*", help="Names of contenders; default: all.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    for row in measure(options):
        kept = []
        if options.output.exists():
            with options.output.open(newline="") as file:
                kept = [one for one in list(csv.reader(file))[1:] if key_of(one) != key_of(row)]
        with options.output.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEAD, *sorted([*kept, row], key=key_of)])
    print(f"wrote {os.path.relpath(options.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
