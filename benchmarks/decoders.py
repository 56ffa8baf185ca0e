"""Decoders as classifiers, beside transformers' own, and with a prefix that is read once.

    python benchmarks/decoders.py --device cuda                                          # results/tables/decoders.csv
    python benchmarks/decoders.py --device cpu --dtype float32 --shapes smollm2 --batches 1 8 --tokens 32

Weights are random. On a GPU everything is compiled and recorded as CUDA graphs, also `theirs`, of transformers.
Texts fill their length. `single` is our one member; `lora` three members whose attention and classifiers differ in the
last third of the layers; `long` the single model with `--prefix` tokens more in every text, `prefix` the same answers
by `with_prefix`. `ratio` is to `theirs`, of `prefix` to `long`.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from against import in_mode, milliseconds
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.baselines.building_blocks import joined  # noqa: E402
from hydra_ensembles.model.config import Sharing  # noqa: E402
from studies.tables import write_csv  # noqa: E402

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
HEAD = ("shape", "contender", "batch", "tokens", "prefix", "ms", "ratio", "hardware", "dtype", "torch", "seed")


def built(shape: str, options: argparse.Namespace) -> Any:
    """A random classifier of transformers."""
    import transformers

    family, sizes = SHAPES[shape]
    torch.manual_seed(options.seed)
    config = getattr(transformers, f"{family}Config")(**sizes, max_position_embeddings=2048, pad_token_id=0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    return model.to(options.device, DTYPES[options.dtype]).eval()


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


def calls(shape: str, batch: int, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Every contender, ready to be timed."""
    model, cuda = built(shape, options), options.device == "cuda"
    base, draws = he.convert(model, probe=False), torch.Generator().manual_seed(options.seed)
    ids = torch.randint(1, base.config.stem.vocabulary, (batch, options.prefix + options.tokens), generator=draws)
    in_front = ids[:1, : options.prefix].expand(batch, -1)
    whole = torch.cat([in_front, ids[:, options.prefix :]], dim=1).to(options.device)
    rows = whole[:, options.prefix :].contiguous()

    def fast(ensemble: he.Ensemble, inputs: Tensor) -> Callable[[], Any]:
        runner = ensemble.optimize(inputs, compile=cuda)
        return lambda: runner(inputs)

    single = {"ours": base, "short": base.with_prefix(in_front[0].tolist())}
    made: dict[str, Callable[[], Callable[[], Any]]] = {
        "theirs": lambda: in_mode(lambda x: model(input_ids=x).logits, rows, "graphed" if cuda else "eager"),
        "single": lambda: fast(single["ours"], rows),
        "lora": lambda: fast(lora(base, options.seed), rows),
        "long": lambda: fast(single["ours"], whole),
        "prefix": lambda: fast(single["short"], rows),
    }
    return {name: made[name]() for name in options.contenders}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2", "half-billion"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "decoders.csv")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"{platform.processor()}, {torch.get_num_threads()} threads"
    found: list[Sequence[Any]] = [HEAD]
    for shape in options.shapes:
        for batch in options.batches:
            with torch.no_grad():
                runs = calls(shape, batch, options)
                ms = {name: milliseconds(run, options.device, options.seconds) for name, run in runs.items()}
            for name, time in ms.items():
                beside = ms.get("long" if name == "prefix" else "theirs")
                ratio = "" if beside is None else f"{time / beside:.3f}"
                front = options.prefix if name in ("long", "prefix") else 0
                cell = (shape, name, batch, options.tokens, front, time, ratio)
                found.append((*cell, where, options.dtype, torch.__version__, options.seed))
                print(*found[-1], flush=True)
    write_csv(options.output, found)


if __name__ == "__main__":
    main()
