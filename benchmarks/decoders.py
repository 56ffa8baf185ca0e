"""Decoders as classifiers, beside transformers' own, and with a prefix that is read once.

    python benchmarks/decoders.py --device cuda                                          # results/tables/decoders.csv
    python benchmarks/decoders.py --device cpu --dtype float32 --shapes smollm2 --batches 8 --tokens 32

Weights are random, texts fill their length. One process a contender prepares it (all at once) and measures when it is
told to, in turn, five times, in changing order. On a GPU everything is compiled and recorded as CUDA graphs, also
`theirs`, of transformers, which keeps no keys and values. `single` is our one member; `lora` three members whose
attention and classifiers differ in the last third of the layers; `long` the single model with `--prefix` tokens more in
every text, `prefix` the same answers by `with_prefix`. `ratio` is to `theirs`, of `prefix` to `long`, `to_single` to
`single`: medians, and the smallest and the largest ratio of a turn. `--profile` writes which kernels take the time.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against import TURNS, Measure, Numbers, Worker, hardware, in_mode, in_turn, milliseconds, work

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.baselines.building_blocks import joined  # noqa: E402
from hydra_ensembles.model.config import Sharing  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

_SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
_HALF = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "smollm2": ("Llama", {**_SMALL, "num_key_value_heads": 3, "vocab_size": 49152}),
    "half-billion": ("Qwen2", {**_HALF, "num_key_value_heads": 2, "vocab_size": 151936}),
    "tiny": ("Llama", {**_TINY, "num_key_value_heads": 2, "vocab_size": 60}),
}
CONTENDERS = ("theirs", "single", "lora", "long", "prefix")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD = ("shape", "contender", "batch", "tokens", "prefix", "ms", "ratio", "lowest", "highest", "to_single")
ABOUT = ("hardware", "dtype", "torch", "transformers", "seed")


def built(shape: str, device: str, dtype: str, seed: int) -> Any:
    """A random classifier of transformers."""
    import transformers

    family, sizes = SHAPES[shape]
    torch.manual_seed(seed)
    settings = {"max_position_embeddings": 2048, "pad_token_id": 0, "use_cache": False}
    config = getattr(transformers, f"{family}Config")(**sizes, **settings)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    return model.to(device, DTYPES[dtype]).eval()


def lora(base: he.Ensemble, seed: int) -> he.Ensemble:
    """Three members; noise stands for what their adapters learnt."""
    layers = base.num_layers
    model = joined([base] * 3, Sharing(stem=True, mlp=True, norms=True), layers - layers // 3)
    draws = torch.Generator(base.device).manual_seed(seed)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "attention" in name and int(name.split(".")[2]) >= layers - layers // 3:
                one.add_(0.01 * torch.randn(one.shape, generator=draws, device=one.device, dtype=one.dtype))
    return model


@torch.no_grad()
def prepare(
    shape: str, contender: str, batch: int, tokens: int, prefix: int, device: str, dtype: str, seed: int, profile: str
) -> Measure:
    """A contender, ready to be timed; its answers are compared with those of the plain model."""
    model = built(shape, device, dtype, seed)
    base, draws = he.convert(model, probe=False), torch.Generator().manual_seed(seed)
    ids = torch.randint(1, base.config.stem.vocabulary, (batch, prefix + tokens), generator=draws)
    whole = torch.cat([ids[:1, :prefix].expand(batch, -1), ids[:, prefix:]], dim=1).to(device)
    rows = whole[:, prefix:].contiguous()
    ensemble = base
    if contender == "theirs":
        expected = base(rows)
        run = in_mode(lambda x: model(input_ids=x).logits, rows, "graphed" if device == "cuda" else "eager")
    else:
        inputs = whole if contender == "long" else rows
        if contender == "lora":
            ensemble = lora(base, seed)
            expected = ensemble(inputs)
        elif contender == "prefix":
            ensemble, expected = base.with_prefix(whole[0, :prefix].tolist()), base(whole)
        else:
            expected = model(input_ids=inputs).logits[None]
        runner = ensemble.optimize(inputs, compile=device == "cuda")
        print(shape, contender, runner.choice_for(inputs), file=sys.stderr, flush=True)
        run = partial(runner, inputs)
    error = float((run().float() - expected.float()).norm() / expected.float().norm())
    if not error < 0.1:
        raise RuntimeError(f"the answers are off by {error:.2g}")
    if profile:
        profiled(run, device, Path(profile) / f"{shape}-{contender}-{batch}.txt")
    del base, ensemble
    model = model if contender == "theirs" else None

    def measure() -> Numbers:
        return {"ms": milliseconds(run, device, 0.4)}

    return measure


def profiled(run: Callable[[], Any], device: str, target: Path) -> None:
    """Write what the time of five calls goes to, by operation."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (device == "cuda")]
    with torch.profiler.profile(activities=kinds, acc_events=True) as found:
        for _ in range(5):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    target.parent.mkdir(parents=True, exist_ok=True)
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    target.write_text(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=120))


def lines(shape: str, batch: int, found: dict[str, list[float]], options: argparse.Namespace) -> list[list[Any]]:
    """A line for each contender, from its milliseconds by turn."""
    import transformers

    about = [hardware(options.device), options.dtype, torch.__version__, transformers.__version__, options.seed]

    def ratios(name: str, beside: str) -> list[str]:
        if beside not in found:
            return [""] * 3
        turns = [mine / other for mine, other in zip(found[name], found[beside], strict=True)]
        return [f"{one:.3f}" for one in (median(found[name]) / median(found[beside]), min(turns), max(turns))]

    made = list[list[Any]]()
    for name, times in found.items():
        front = options.prefix if name in ("long", "prefix") else 0
        compared = [*ratios(name, "long" if name == "prefix" else "theirs"), ratios(name, "single")[0]]
        made.append([shape, name, batch, options.tokens, front, f"{median(times):.4f}", *compared, *about])
    return made


def measured(options: argparse.Namespace) -> Iterator[list[Any]]:
    """The lines of all cells: a process for each contender, all prepared at once and measured in turn."""
    cells = [*product(options.shapes, options.batches)]
    workers = {(*cell, name): Worker(ROOT, __file__) for cell in cells for name in options.contenders}
    same = {key: getattr(options, key) for key in ("tokens", "prefix", "device", "dtype", "seed", "profile")}
    try:
        for (shape, batch, name), worker in workers.items():
            own = {"shape": shape, "contender": name, "batch": batch}
            worker.send(do="prepare", case="decoders", **{"with": {**own, **same}})
        ready = {place for place, worker in workers.items() if told(place, worker.receive())}

        def ask(worker: Worker) -> Numbers:
            worker.send(do="measure")
            return worker.receive()

        for cell in cells:
            able = [name for name in options.contenders if (*cell, name) in ready]
            found = in_turn({name: partial(ask, workers[(*cell, name)]) for name in able}, TURNS)
            yield from lines(*cell, {name: [one["ms"] for one in each] for name, each in found.items()}, options)
    finally:
        for worker in workers.values():
            worker.close()


def told(place: object, said: dict[str, Any]) -> bool:
    """Whether a contender can be measured; why not is printed, and the others go on."""
    if "error" in said:
        print("FAILED", place, said["error"], file=sys.stderr, flush=True)
    return "error" not in said


def kept(path: Path, new: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The lines of a table about other cells or hardware."""
    places = {(*map(str, line[:4]), line[10]) for line in new}
    found = [list(line.values()) for line in (read_csv(path) if path.exists() else ())]
    return [line for line in found if (*line[:4], line[10]) not in places]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells, and write them into the table, whose other lines stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2", "half-billion"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", default="", help="folder for what the time goes to")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "decoders.csv")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each process: there are many
    found = []
    for line in measured(options):
        found.append(line)
        print(*line, flush=True)
    write_csv(options.output, [(*HEAD, *ABOUT), *kept(options.output, found), *found])


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work({"decoders": prepare})
    else:
        main()
