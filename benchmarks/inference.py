"""The cost of inference: single models, Deep Ensembles, other baselines and Hydra Ensembles, all measured alike.

    python benchmarks/inference.py                                    # results/tables/inference.csv
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128
    python benchmarks/inference.py --methods --modes graphed-eager --batches 4 128 --output …/inference_methods.csv
    python benchmarks/inference.py --methods --counts --device cpu --output …/inference_counts.csv
    python benchmarks/inference.py --batches 4 128 --whole 15000                     # the paper's Table 7
    python benchmarks/inference.py --shape bert-base-6 --dtype float16 --batches 4   # the paper's 5.2

All weights are random: time does not depend on them. Every contender is timed in turn with the user's own model, in the
same mode: `eager`; `compiled` (`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA
graph: the best the user's model can get); `graphed-eager` (recorded, not compiled). Rows that are already in the output
file are skipped, unless `--again`. `--counts` times nothing: parameters and arithmetic follow from shapes.
"""

import argparse
import copy
import gc
import platform
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import timm
import torch
from against import in_mode, milliseconds
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles import baselines  # noqa: E402
from hydra_ensembles.baselines.building_blocks import fresh, joined  # noqa: E402
from hydra_ensembles.model.config import Sharing  # noqa: E402
from hydra_ensembles.model.cost import multiply_adds  # noqa: E402
from hydra_ensembles.model.layers import Context  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

NAMES = (  # `hydra-kN`: pruned members above a trunk of N layers; `-last`: the last quarter of the layers; `top-kN`:
    # fine-tunings above a trunk, with their own MLPs or (`-mean`) shared ones, with all heads or less in a layer
    *("single", "ours", "pruned", "mc-dropout", "lora", "lora-last", "batch-ensemble", "batch-ensemble-last"),
    *("batch-ensemble-inputs", "mimo", "packed", "oba", "laplace", "classifiers", "deep-last"),
    *("deep-in-turn", "deep-stacked", "hydra-k0", "hydra-k4", "hydra-k6", "hydra-k8", "hydra-k10"),
    *("top-k9", "top-k10", "top-k11", "top-k10-mean", "top-k10-lost4", "top-k10-mean-lost4", "top-k10-lost2"),
)
USUAL = ("single", "ours", "pruned", "mc-dropout", *NAMES[15:22])
GROWING = ("single", "hydra-k0", "hydra-k8", "deep-in-turn", "deep-stacked")
MEMBERS = {"single": 1, "ours": 1, "pruned": 1, "oba": 1, "laplace": 20}  # of contenders with a fixed number of members
APART = {  # parameter groups that a baseline's members do not share; each has its own classifier
    "lora": ("attention",),
    "batch-ensemble": ("attention", "mlp"),
    "batch-ensemble-inputs": ("norms",),
    "deep": ("attention", "mlp", "norms"),
}
LAST = "-last"
NOISE = 0.02  # imitates fine-tuning, coarse enough to survive bfloat16
DROPOUT = 0.1
MODES = ("graphed", "compiled", "graphed-eager", "eager")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOLERANCE = 0.1  # relative; outputs in bfloat16 differ by about a hundredth, wrong ones by about one
KEY = ("hardware", "shape", "dtype", "mode", "batch", "contender", "members")  # identifies a row
EXPECTED_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError)
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 12, "num_heads": 6, "num_classes": 5}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {  # timm's name, and settings
    "vit-b16": ("vit_base_patch16_224", {}),
    "vit-s16": ("vit_small_patch16_224", {}),
    "dinov2-s": ("vit_small_patch14_dinov2", {"img_size": 112, "num_classes": 10}),
    "tiny": ("vit_base_patch16_224", TINY),
    "bert-base-6": ("bert", {"tokens": 128, "kept": 6}),  # the paper keeps 6 of 12 heads of BERT-base
    "bert-tiny-6": (
        "bert",
        {"tokens": 8, "kept": 6, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2},
    ),
}
Row = dict[str, Any]


class BertLogits(nn.Module):
    """BERT of transformers with random weights, which answers with logits."""

    def __init__(self, settings: dict[str, int]) -> None:
        super().__init__()
        import transformers

        shape = {key: value for key, value in settings.items() if key not in ("tokens", "kept")}
        self.bert = transformers.BertForSequenceClassification(transformers.BertConfig(**shape))

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.bert(tokens).logits)


# --- contenders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A model ready to be measured."""

    run: nn.Module | Callable[[Tensor], Tensor]
    modules: Sequence[nn.Module]  # hold its weights
    multiply_adds: int  # actually computed for one input
    plan: str = ""  # how members run, for an ensemble of ours
    expected: Tensor | None = None  # outputs of an ensemble of ours before it was optimized

    @property
    def parameters(self) -> int:
        """Parameters that are stored."""
        return sum(parameter.numel() for module in self.modules for parameter in module.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        tensors = [t for module in self.modules for t in [*module.parameters(), *module.buffers()]]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Workshop:
    """Makes the contenders of one shape, in one dtype, on one device."""

    def __init__(self, shape: str, dtype: torch.dtype, device: str, seed: int) -> None:
        self.name, self.settings = SHAPES[shape]
        self.dtype, self.device, self.seed = dtype, torch.device(device), seed

    @cached_property
    def model(self) -> nn.Module:
        """The user's model, in float32."""
        torch.manual_seed(self.seed)
        made = BertLogits(self.settings) if self.text else timm.create_model(self.name, **self.settings)
        return self._noisy(made, "model").eval().to(self.device)

    @cached_property
    def base(self) -> he.Ensemble:
        """The user's model as an ensemble of ours, in float32."""
        return cast(he.Ensemble, he.convert(self.model.bert if isinstance(self.model, BertLogits) else self.model))

    @property
    def text(self) -> bool:
        """Whether inputs are tokens."""
        return self.name == "bert"

    def inputs(self, batch: int) -> Tensor:
        """Random images, or sentences of the full length."""
        draws = torch.Generator().manual_seed(self.seed)
        if self.text:
            return torch.randint(1000, 2000, (batch, self.settings["tokens"]), generator=draws).to(self.device)
        side = self.settings.get("img_size", 224)
        return torch.randn(batch, 3, side, side, generator=draws).to(self.device, self.dtype)

    def madds(self, ensemble: he.Ensemble) -> int:
        """Multiply-adds per input; in the last block only of the tokens that the readout reads."""
        config, encoder = ensemble.config, ensemble.config.encoder
        tokens = self.tokens
        total = multiply_adds(config, tokens)
        positions = ensemble.readout.tokens_read(Context())
        if not isinstance(positions, slice):
            return total
        left_out = tokens - len(range(*positions.indices(tokens)))
        last = [
            config.copies(group, layer) for group in ("attention", "mlp", "norms") for layer in range(encoder.layers)
        ]
        branches = max(config.copies("stem"), *last)
        heads = sum(len(config.heads[member][encoder.layers - 1]) for member in range(branches))
        total -= heads * left_out * encoder.head_dim * (2 * encoder.width + 2 * tokens)
        return total - branches * left_out * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of an input."""
        inputs = self.inputs(1)
        inputs = inputs if self.text else inputs.float()
        return int(self.base.embed(*self.base.unpack(inputs))[0].shape[2])  # [1, B, T, d]

    @cached_property
    def single_madds(self) -> int:
        """Multiply-adds per input of the user's model, which computes every token of every layer."""
        return multiply_adds(self.base.config, self.tokens)

    def make(self, name: str, members: int, inputs: Tensor) -> Contender:
        """A contender, with the fastest plan for these inputs."""
        if name in ("single", "deep-in-turn"):
            models = [copy.deepcopy(self.model) for _ in range(members)]
            models = (
                [self._noisy(model, "model", index) for index, model in enumerate(models)] if members > 1 else models
            )
            models = [model.to(self.dtype).eval() for model in models]
            if members == 1:
                return Contender(models[0], models, self.single_madds)
            return Contender(lambda x: torch.stack([one(x) for one in models]), models, members * self.single_madds)
        if name == "mc-dropout":
            model = he.mc_dropout(self.base.member(0).to(self.dtype), DROPOUT, members).model  # dropout stays on
            repeated: Any = lambda x: model(torch.cat([x] * members))[0].unflatten(0, (members, -1))  # noqa: E731
            return Contender(repeated, [model], members * self.madds(self.base))
        ensemble = self.ensemble(name, members).to(self.dtype)
        runner = ensemble.optimize()
        plan = runner.choice_for(inputs).plan
        with torch.no_grad():
            expected = ensemble(inputs)
        return Contender(runner.module(plan), [runner.module(plan)], self.madds(ensemble), plan, expected)

    def counts(self, name: str, members: int) -> tuple[int, int]:
        """Parameters that a contender stores, and multiply-adds actually computed per input."""
        if name in ("single", "deep-in-turn"):
            return members * sum(p.numel() for p in self.model.parameters()), members * self.single_madds
        ensemble = self.base if name == "mc-dropout" else self.ensemble(name, members)
        passes = members if name == "mc-dropout" else 1
        return sum(p.numel() for p in ensemble.parameters()), passes * self.madds(ensemble)

    def ensemble(self, name: str, members: int) -> he.Ensemble:
        """An ensemble of ours, in float32."""
        if name in ("ours", "oba"):  # zeros are stored and multiplied like other numbers
            return self.base.member(0)
        if name == "pruned":
            return he.prune(self.base, self._heads(0, 0))
        if name == "deep-stacked":
            return he.Ensemble.stack([self._tuned(self.base.member(0), 0, member) for member in range(members)])
        if name == "packed":
            model = fresh(baselines.Packed(members).narrow(self.base.config), self.seed, self.base.metadata)
            return model.to(self.device)
        if name.startswith("top-"):
            layer, *how = name.removeprefix("top-k").split("-")
            above = int(layer)
            lost = next((int(part.removeprefix("lost")) for part in how if part.startswith("lost")), 0)
            whole = [he.prune(self.base, self._heads(above, member, lost)) for member in range(members)]
            tops = [self._tuned(model, above, member) for member, model in enumerate(whole)]
            return cast(he.Ensemble, he.fuse(tops, mlp="mean" if "mean" in how else "separate"))
        if not name.startswith("hydra-"):  # members share what a baseline does not train separately
            layers, apart = self.base.num_layers, APART.get(name.removesuffix(LAST), ())
            trunk = layers - layers // 4 if name.endswith(LAST) else 0
            sharing = Sharing(**{group: group not in apart for group in ("stem", "attention", "mlp", "norms")})
            return cast(he.Ensemble, self._noisy(joined([self.base] * members, sharing, trunk), "baseline"))
        trunk = int(name.removeprefix("hydra-k"))
        pruned = [he.prune(self.base, self._heads(trunk, member)) for member in range(members)]
        return he.fuse([self._tuned(model, trunk, member) for member, model in enumerate(pruned)])

    def _tuned(self, ensemble: he.Ensemble, trunk: int, member: int) -> he.Ensemble:
        """Imitates fine-tuning with the stem and the first layers frozen: everything else is a member's own."""

        def frozen(name: str) -> bool:
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            return name.startswith("stem.") or (layer is not None and int(layer[1]) < trunk)

        return cast(he.Ensemble, self._noisy(ensemble, "member", member, frozen))

    def _noisy(self, model: Any, kind: str, index: int = 0, frozen: Callable[[str], bool] = lambda name: False) -> Any:
        device = next(model.parameters()).device
        generator = self._generator(kind, index, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not frozen(name):
                    parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, device=device))
        return model

    def _heads(self, trunk: int, member: int, lost: int | None = None) -> list[tuple[int, int]]:
        """A third of the heads of every layer above the trunk, or as many, or all but those that the shape keeps."""
        generator, heads = self._generator("even", member), self.base.num_heads
        lost = heads - self.settings.get("kept", heads - heads // 3) if lost is None else lost
        draws = [torch.randperm(heads, generator=generator)[:lost].tolist() for _ in range(self.base.num_layers)]
        return [(layer, head) for layer, drawn in enumerate(draws) if layer >= trunk for head in drawn]

    def _generator(self, kind: str, index: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed}/{kind}/{index}".encode()))


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> None:
    """Measure the requested rows that are not in the file yet; it is written after every row."""
    stored = read_csv(options.output) if options.output.exists() else []
    rows: dict[tuple[str, ...], Row] = {tuple(row[key] for key in KEY): row for row in stored}
    workshop = Workshop(options.shape, DTYPES[options.dtype], options.device, options.seed)
    for batch in options.batches:
        inputs = workshop.inputs(batch)
        single = workshop.make("single", 1, inputs)
        for name in options.contenders:
            for members in (MEMBERS[name],) if name in MEMBERS else options.members:
                for mode in options.modes:
                    cell = (hardware(options.device), options.shape, options.dtype, mode, batch, name, members)
                    if (about := tuple(map(str, cell))) in rows and not options.again:
                        continue
                    try:
                        mine = single if name == "single" else workshop.make(name, members, inputs)
                        row = dict(zip(KEY, cell, strict=True)) | row_of(workshop, mode, single, mine, inputs, options)
                    except EXPECTED_ERRORS as error:
                        print(
                            f"{name} {mode} failed: {type(error).__name__}: {error}".splitlines()[0][:300], flush=True
                        )
                        continue
                    rows[about] = row
                    print(
                        *(row[key] for key in (*KEY[3:], "plan", "latency_ms", "ratio_to_single", "limit")), flush=True
                    )
                    write(options.output, rows.values())
                    gc.collect()


def row_of(
    workshop: Workshop, mode: str, single: Contender, mine: Contender, inputs: Tensor, options: argparse.Namespace
) -> Row:
    """The numbers of a row: times in turn with the user's own model, arithmetic, sizes."""
    torch.compiler.reset()  # a process compiles many models
    runs = [in_mode(one.run, inputs, mode) for one in ((single, mine) if mine is not single else (single,))]
    error = None
    with torch.no_grad():
        if mine.expected is not None:
            expected = mine.expected.float()
            error = float((runs[-1]().float() - expected).norm() / expected.norm())
            if not error < TOLERANCE:
                raise RuntimeError(f"the answers in mode {mode} are off by {error:.2g}")
        device = torch.device(options.device).type
        turns = [[milliseconds(run, device, options.seconds / 5) for run in runs] for _ in range(5)]
        memory = peak_memory(mine, inputs)
        whole = whole_test(runs[-1], -(-options.whole // len(inputs)), device) if options.whole else None
    spent, theirs = [turn[-1] for turn in turns], statistics.median(turn[0] for turn in turns)
    return {
        "plan": mine.plan,
        "latency_ms": statistics.median(spent),
        "latency_low_ms": min(spent),
        "latency_high_ms": max(spent),
        "single_ms": theirs,
        "ratio_to_single": statistics.median(spent) / theirs,
        "whole_test_s": whole,
        "limit": mine.multiply_adds / workshop.single_madds,  # the ratio that arithmetic alone would give
        "multiply_adds": mine.multiply_adds,
        "parameters": mine.parameters,
        "weight_bytes": mine.weight_bytes,
        "peak_memory_bytes": memory,
        "error": error,  # relative to the model before it was optimized, compiled or recorded
        "torch": str(torch.__version__),
    }


def whole_test(run: Callable[[], Any], calls: int, device: str) -> float:
    """Seconds for as many calls, one after another: a whole test set, run and not extrapolated."""
    began = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_memory(contender: Contender, inputs: Tensor) -> int | None:
    """Bytes of the weights, plus the peak allocation of a forward pass on a GPU."""
    if inputs.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender.run(inputs)
    torch.cuda.synchronize()
    return contender.weight_bytes + torch.cuda.max_memory_allocated() - before


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, sorted."""
    ordered = sorted(rows, key=lambda row: tuple(str(row[key]) for key in KEY))
    keys = list(dict.fromkeys(key for row in ordered for key in row))
    write_csv(path, [keys, *([row.get(key, "") for key in keys] for row in ordered)])


def hardware(device: str) -> str:
    """The name of what times are measured on."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def counted(options: argparse.Namespace) -> None:
    """Count what contenders store and compute, from their shapes."""
    workshop = Workshop(options.shape, torch.float32, options.device, options.seed)
    lines: list[list[Any]] = [["shape", "contender", "members", "parameters", "limit"]]
    for name in options.contenders:
        members = MEMBERS.get(name, options.members[0])
        parameters, madds = workshop.counts(name, members)
        lines.append([options.shape, name, members, parameters, madds / workshop.single_madds])
        print(*lines[-1], flush=True)
    write_csv(options.output, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--shape", choices=list(SHAPES), default="vit-b16")
    add("--dtype", choices=list(DTYPES), default="bfloat16")
    add("--batches", type=int, nargs="+", default=[1, 4, 128])
    add("--modes", choices=MODES, nargs="+", help="default: graphed on a GPU, eager elsewhere")
    add("--contenders", choices=NAMES, nargs="+", help="default: the usual ones")
    add("--methods", action="store_true", help="contenders: every baseline, too")
    add("--members", type=int, nargs="+", default=[3], help="several: cost against their number")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="on a CPU")
    add("--seconds", type=float, default=1.0, help="time for the rounds of a row")
    add("--seed", type=int, default=0)
    add("--whole", type=int, help="also run this many inputs, one batch after another: 15,000 in the paper's Table 7")
    add("--again", action="store_true", help="measure rows that the output has already")
    add("--output", type=Path, default=ROOT / "results" / "tables" / "inference.csv", help="rows are merged into it")
    add("--counts", action="store_true", help="count parameters and multiply-adds instead")
    options = parser.parse_args(arguments)
    options.modes = options.modes or (["eager"] if options.device == "cpu" else ["graphed"])
    if options.device == "cpu" and any(mode.startswith("graphed") for mode in options.modes):
        parser.error("CUDA graphs need a GPU")
    options.contenders = options.contenders or (
        NAMES if options.methods else GROWING if len(options.members) > 1 else USUAL
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    (counted if options.counts else measured)(options)


if __name__ == "__main__":
    main()
