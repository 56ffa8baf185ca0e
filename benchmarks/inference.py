"""The cost of inference: single models, Deep Ensembles, other baselines and Hydra Ensembles, all measured alike.

    python benchmarks/inference.py                                    # results/tables/inference.csv
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128
    python benchmarks/inference.py --methods --modes graphed-eager --batches 4 128 --output …/inference_methods.csv
    python benchmarks/inference.py --methods --counts --device cpu --output …/inference_counts.csv
    python benchmarks/inference.py --conversion --device cpu --threads 1 --output …/conversion.csv

All weights are random: time does not depend on them. Every contender is timed in turn with the user's own model, in the
same mode: `eager`; `compiled` (`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA
graph: the best the user's model can get); `graphed-eager` (recorded, not compiled). Rows that are already in the output
file are skipped, unless `--again`. `--conversion` times `convert` instead, with and without its comparison of answers.
`--counts` times nothing: parameters and arithmetic follow from shapes.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles import baselines  # noqa: E402
from hydra_ensembles.baselines.building_blocks import fresh, joined  # noqa: E402
from hydra_ensembles.model.config import Sharing  # noqa: E402
from hydra_ensembles.model.cost import multiply_adds  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

NAMES = (  # `hydra-kN`: pruned members above a trunk of N layers; `-last`: the last quarter of the layers
    *("single", "ours", "pruned", "mc-dropout", "lora", "lora-last", "batch-ensemble", "batch-ensemble-last"),
    *("batch-ensemble-inputs", "mimo", "packed", "oba", "laplace", "classifiers", "swag", "deep-last"),
    *("deep-in-turn", "deep-vmap", "deep-stacked"),
    *(f"hydra-k{trunk}" for trunk in (0, 4, 6, 8, 10)),
    "hydra-uneven",
)
USUAL = (
    *("single", "ours", "pruned", "mc-dropout", "deep-in-turn", "deep-vmap", "deep-stacked"),
    *(name for name in NAMES if name.startswith("hydra")),
)
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

Inputs = dict[str, Tensor]
Call = Callable[..., Tensor]
Row = dict[str, Any]


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One architecture in one size."""

    build: Callable[[], nn.Module]  # with random weights, dropout off
    tokens: int  # of an input
    pixels: int = 0  # side of the images; 0 for texts
    words: int = 0  # vocabulary size of a text model

    def inputs(self, batch: int, generator: torch.Generator) -> Inputs:
        """A batch; texts have mixed lengths with padding, one of them has full length."""
        if self.pixels:
            return {"pixel_values": torch.randn(batch, 3, self.pixels, self.pixels, generator=generator)}
        ids = torch.randint(1000 % self.words, self.words, (batch, self.tokens), generator=generator)
        lengths = torch.randint(self.tokens // 8, self.tokens + 1, (batch, 1), generator=generator)
        lengths[0] = self.tokens
        mask = (torch.arange(self.tokens)[None] < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    def logits(self, model: Any, *inputs: Tensor) -> Tensor:
        """Call the model."""
        if self.pixels:
            return cast(Tensor, model(*inputs))
        return cast(Tensor, model(input_ids=inputs[0], attention_mask=inputs[1]).logits)


def _bert(**settings: Any) -> nn.Module:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
    return cast(nn.Module, transformers.BertForSequenceClassification(config))


_TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 12, "num_heads": 6, "num_classes": 5}
_TINY_BERT = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 32, "vocab_size": 50}
SHAPES = {
    "vit-b16": Shape(partial(timm.create_model, "vit_base_patch16_224"), 197, 224),
    "vit-s16": Shape(partial(timm.create_model, "vit_small_patch16_224"), 197, 224),
    "dinov2-s": Shape(partial(timm.create_model, "vit_small_patch14_dinov2", img_size=112, num_classes=10), 65, 112),
    "bert-base": Shape(_bert, 128, words=30522),
    "tiny": Shape(partial(timm.create_model, "vit_base_patch16_224", **_TINY), 5, 16),
    "tiny-bert": Shape(partial(_bert, **_TINY_BERT), 8, words=50),
}


# --- contenders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A model ready to be measured."""

    run: Call  # takes the tensors of a batch one by one
    modules: Sequence[nn.Module]  # hold its weights
    parameters: int  # stored
    multiply_adds: Callable[[], int]  # actually computed for one input
    plan: str = ""  # how members run, for an ensemble of ours
    expected: Tensor | None = None  # outputs of an ensemble of ours before it was optimized
    random: bool = False  # whether its outputs differ each time

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones counted once."""
        tensors = [t for module in self.modules for t in [*module.parameters(), *module.buffers()]]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Workshop:
    """Makes the contenders of one shape, in one dtype, on one device; caches what can be reused."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.seed = seed
        self._ensembles: dict[tuple[str, int], he.Ensemble] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The user's model, in float32."""
        torch.manual_seed(self.seed)
        return self._noisy(self.shape.build(), "model").eval().to(self.device)

    @cached_property
    def base(self) -> he.Ensemble:
        """The user's model as an ensemble of ours, in float32."""
        return cast(he.Ensemble, he.convert(self.model))

    def single_multiply_adds(self) -> int:
        """Multiply-adds per input of the user's model, which computes every token of every layer."""
        return arithmetic(self.base, self.shape.tokens, shortcut=False)

    def make(self, name: str, members: int, inputs: Inputs) -> Contender:
        """A contender, with the fastest plan for these inputs."""
        if name == "single":
            return self._foreign([self.model])
        if name in ("deep-in-turn", "deep-vmap"):
            copies = [self._noisy(copy.deepcopy(self.model), "model", member) for member in range(members)]
            return self._foreign(copies, stacked=name == "deep-vmap")
        if name == "mc-dropout":
            return self._mc_dropout(members)
        ensemble = self.ensemble(name, members)
        runner = ensemble.optimize()
        plan = runner.choice_for(inputs).plan
        module = runner.module(plan)
        with torch.no_grad():
            expected = ensemble(*inputs.values())
        count = sum(p.numel() for p in ensemble.parameters())
        return Contender(module, [module], count, lambda: arithmetic(ensemble, self.shape.tokens), plan, expected)

    def counts(self, name: str, members: int) -> tuple[int, int]:
        """Parameters that a contender stores, and multiply-adds actually computed per input."""
        if name in ("single", "deep-in-turn", "deep-vmap"):
            return members * sum(p.numel() for p in self.model.parameters()), members * self.single_multiply_adds()
        if name == "mc-dropout":
            return sum(p.numel() for p in self.base.parameters()), members * arithmetic(self.base, self.shape.tokens)
        ensemble = self._fused(name, members)
        return sum(p.numel() for p in ensemble.parameters()), arithmetic(ensemble, self.shape.tokens)

    def ensemble(self, name: str, members: int) -> he.Ensemble:
        """An ensemble of ours, made once."""
        if (name, members) not in self._ensembles:
            self._ensembles[name, members] = self._fused(name, members).to(self.dtype)
        return self._ensembles[name, members]

    # --- models of other libraries -------------------------------------------------------------------------------

    def _foreign(self, models: list[nn.Module], stacked: bool = False) -> Contender:
        """Models of other libraries: alone, one after another, or stacked as in PyTorch's tutorial on ensembles."""
        models = [copy.deepcopy(model).to(self.dtype).eval() for model in models]
        count = sum(p.numel() for model in models for p in model.parameters())
        members = len(models)
        modules = models
        logits = self.shape.logits

        def in_turn(*inputs: Tensor) -> Tensor:
            answers = [logits(model, *inputs) for model in models]
            return torch.stack(answers) if members > 1 else answers[0]

        run: Call = in_turn
        if stacked:
            parameters, buffers = stack_module_state(models)
            skeleton = copy.deepcopy(models[0]).to("meta")
            weights = nn.Module()
            for index, tensor in enumerate([*parameters.values(), *buffers.values()]):
                weights.register_buffer(f"stacked{index}", tensor)

            def forward(parameters: Any, buffers: Any, inputs: Any) -> Tensor:
                def call(*args: Any, **kwargs: Any) -> Any:
                    return functional_call(skeleton, (parameters, buffers), args, kwargs)

                return logits(call, *inputs)

            def run(*inputs: Any) -> Any:
                return torch.vmap(forward, (0, 0, None))(parameters, buffers, inputs)

            modules = [weights]
        return Contender(run, modules, count, lambda: members * self.single_multiply_adds())

    # --- ensembles of ours ---------------------------------------------------------------------------------------

    def _fused(self, name: str, members: int) -> he.Ensemble:
        if name in ("ours", "oba"):  # zeros are stored and multiplied like other numbers
            return self.base.member(0)
        if name == "pruned":
            return he.prune(self.base, self._heads("even", 0, 0))
        if name in ("deep-stacked", "swag"):
            return he.Ensemble.stack([self._tuned(self.base.member(0), 0, member) for member in range(members)])
        if not name.startswith("hydra-"):
            return self._baseline(name, members)
        trunk = int(name.removeprefix("hydra-k")) if name != "hydra-uneven" else 0
        kind = "uneven" if name == "hydra-uneven" else "even"
        pruned = [he.prune(self.base, self._heads(kind, trunk, member)) for member in range(members)]
        return he.fuse([self._tuned(model, trunk, member) for member, model in enumerate(pruned)])

    def _baseline(self, name: str, members: int) -> he.Ensemble:
        """The result of training a baseline: members share what it does not train separately."""
        if name == "packed":
            model = fresh(baselines.Packed(members).narrow(self.base.config), self.seed, self.base.metadata)
            return model.to(self.device)
        layers = self.base.num_layers
        apart = APART.get(name.removesuffix(LAST), ())
        trunk = layers - layers // 4 if name.endswith(LAST) else 0
        sharing = Sharing(**{group: group not in apart for group in ("stem", "attention", "mlp", "norms")})
        return cast(he.Ensemble, self._noisy(joined([self.base] * members, sharing, trunk), "baseline"))

    def _mc_dropout(self, passes: int) -> Contender:
        model = he.mc_dropout(self.base.member(0).to(self.dtype), DROPOUT, passes).model  # dropout stays on

        def run(*inputs: Tensor) -> Tensor:
            repeated = [tensor.repeat(passes, *(1,) * (tensor.dim() - 1)) for tensor in inputs]
            return model(*repeated)[0].unflatten(0, (passes, -1))

        count = sum(p.numel() for p in model.parameters())
        return Contender(run, [model], count, lambda: passes * arithmetic(self.base, self.shape.tokens), random=True)

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

    def _heads(self, kind: str, trunk: int, member: int) -> list[tuple[int, int]]:
        """A third of the heads: of every layer above the trunk, or (uneven) anywhere, like a circuit's."""
        generator = self._generator(kind, member)
        layers = self.base.num_layers
        heads = self.base.num_heads
        if kind == "uneven":
            drawn = torch.randperm(layers * heads, generator=generator)[: layers * heads // 3].tolist()
            return [divmod(index, heads) for index in drawn]
        draws = [torch.randperm(heads, generator=generator)[: heads // 3].tolist() for _ in range(layers)]
        return [(layer, head) for layer, drawn in enumerate(draws) if layer >= trunk for head in drawn]

    def _generator(self, kind: str, index: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed}/{kind}/{index}".encode()))


def arithmetic(ensemble: he.Ensemble, tokens: int, shortcut: bool = True) -> int:
    """Multiply-adds per input; with `shortcut`, the last block computes only the tokens that the readout reads."""
    config, encoder = ensemble.config, ensemble.config.encoder
    total = multiply_adds(config, tokens)
    positions = ensemble.readout.tokens_read()
    if positions is None or not shortcut:
        return total
    left_out = tokens - len(range(*positions.indices(tokens)))
    inside = [config.copies(group, layer) for group in ("attention", "mlp", "norms") for layer in range(encoder.layers)]
    branches = max(config.copies("stem"), *inside)
    heads = sum(len(config.heads[member][encoder.layers - 1]) for member in range(branches))
    total -= heads * left_out * encoder.head_dim * (2 * encoder.width + 2 * tokens)
    return total - branches * left_out * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)


# --- running and timing ----------------------------------------------------------------------------------------------


class Modes:
    """One contender on one batch, in every mode; work that modes share is done once."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self.contender = contender
        self.inputs = list(inputs.values())
        self._calls: dict[str, Call] = {"eager": contender.run}

    def run(self, mode: str) -> Call:
        """The function to call in a mode."""
        if mode not in self._calls:
            if mode == "compiled":
                call: Call = torch.compile(self.contender.run, dynamic=False)
            else:
                call = recorded(self.run("compiled" if mode == "graphed" else "eager"), self.inputs)
            with torch.no_grad():
                call(*self.inputs)
            self._calls[mode] = call
        return self._calls[mode]

    def error(self, mode: str) -> float | None:
        """Relative error of a mode's output; raises if it is too large. None for random contenders."""
        if self.contender.random:
            return None
        with torch.no_grad():
            expected = self.contender.expected
            expected = (self.contender.run(*self.inputs) if expected is None else expected).float()
            difference = float((self.run(mode)(*self.inputs).float() - expected).norm() / expected.norm())
        if not difference < TOLERANCE:
            raise RuntimeError(f"the answers in mode {mode} are off by {difference:.2g}")
        return difference

    def peak_memory(self, mode: str) -> int:
        """Bytes of the weights, plus the peak allocation of a forward pass; a graph needs as much as its function."""
        run = self.run({"graphed": "compiled", "graphed-eager": "eager"}.get(mode, mode))
        with torch.no_grad():
            if self.inputs[0].device.type != "cuda":
                return self.contender.weight_bytes + allocated_on_cpu(run, self.inputs)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(*self.inputs)
            torch.cuda.synchronize()
            return self.contender.weight_bytes + torch.cuda.max_memory_allocated() - before


def recorded(function: Call, inputs: Sequence[Tensor]) -> Call:
    """A function as a CUDA graph: inputs are copied into its buffers, the result is copied out."""
    buffers = [tensor.clone() for tensor in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # let libraries pick kernels and allocate before recording
            function(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = function(*buffers)

    def replay(*inputs: Tensor) -> Tensor:
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


def allocated_on_cpu(run: Call, arguments: list[Tensor]) -> int:
    """The peak bytes of tensors that a call holds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run(*arguments)
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def times(runs: Sequence[Call], inputs: Sequence[Tensor], rounds: int) -> list[list[float]]:
    """Milliseconds of each function in every round; the functions take turns in going first."""
    clock = cuda_time if inputs[0].device.type == "cuda" else wall_time
    spent: list[list[float]] = [[] for _ in runs]
    with torch.no_grad():
        for turn in range(rounds):
            for step in range(len(runs)):
                index = (turn + step) % len(runs)
                spent[index].append(clock(runs[index], inputs))
    return spent


def wall_time(run: Call, inputs: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    run(*inputs)
    return (time.perf_counter() - start) * 1e3


def cuda_time(run: Call, inputs: Sequence[Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run(*inputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def rounds_for(runs: Sequence[Call], inputs: Sequence[Tensor], seconds: float) -> int:
    """Warm up, and return the number of rounds, 7 to 100, that fit into so many seconds."""
    times(runs, inputs, 2)
    start = time.perf_counter()
    times(runs, inputs, 1)
    return max(7, min(100, int(seconds / (time.perf_counter() - start))))


# --- the benchmark ---------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> None:
    """Measure the requested rows that are not in the file yet; it is written after every row."""
    rows: dict[tuple[str, ...], Row] = {}
    if options.output.exists():
        rows = {key_of(row): row for row in read_csv(options.output)}
    workshop = Workshop(SHAPES[options.shape], DTYPES[options.dtype], options.device, options.seed)
    single: dict[int, Modes] = {}  # by batch
    print(f"{'contender':<20}{'M':>2} {'mode':<13}{'batch':>5} {'plan':<8}{'ms':>9}{'x single':>9}{'limit':>7}")
    for batch in options.batches:
        for name in options.contenders:
            for members in (MEMBERS[name],) if name in MEMBERS else options.members:
                pair: tuple[Modes, Modes] | None = None
                for mode in options.modes:
                    cell = (hardware(options.device), options.shape, options.dtype, mode, batch, name, members)
                    if tuple(map(str, cell)) in rows and not options.again:
                        continue
                    heading = f"{name:<20}{members:>2} {mode:<13}{batch:>5}"
                    try:
                        pair = pair or pair_of(workshop, single, batch, name, members, options)
                        row = dict(zip(KEY, cell, strict=True)) | row_of(workshop, mode, *pair, options)
                    except EXPECTED_ERRORS as error:
                        print(f"{heading} failed: {type(error).__name__}: {error}".splitlines()[0][:300], flush=True)
                        continue
                    rows[tuple(map(str, cell))] = row
                    numbers = f"{row['latency_ms']:>9.3f}{row['ratio_to_single']:>9.2f}{row['limit']:>7.2f}"
                    print(f"{heading} {row['plan']:<8}{numbers}", flush=True)
                    write(options.output, rows.values())
                del pair
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


def key_of(row: Row) -> tuple[str, ...]:
    """What identifies a row."""
    return tuple(str(row[name]) for name in KEY)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, sorted."""
    ordered = sorted(rows, key=key_of)
    keys = list(dict.fromkeys(key for row in ordered for key in row))
    write_csv(path, [keys, *([row.get(key, "") for key in keys] for row in ordered)])


def pair_of(
    workshop: Workshop, single: dict[int, Modes], batch: int, name: str, members: int, options: argparse.Namespace
) -> tuple[Modes, Modes]:
    """The user's own model, cached for the next contender, and a contender, both ready for a batch."""
    drawn = workshop.shape.inputs(batch, torch.Generator().manual_seed(options.seed))
    moved = {key: tensor.to(options.device) for key, tensor in drawn.items()}
    inputs = {key: one.to(workshop.dtype) if one.is_floating_point() else one for key, one in moved.items()}
    if batch not in single:
        single[batch] = Modes(workshop.make("single", 1, inputs), inputs)
    return single[batch], single[batch] if name == "single" else Modes(workshop.make(name, members, inputs), inputs)


def row_of(workshop: Workshop, mode: str, reference: Modes, mine: Modes, options: argparse.Namespace) -> Row:
    """The numbers of a row: times beside the user's own model's, arithmetic, sizes."""
    runs = [reference.run(mode)] + ([mine.run(mode)] if mine is not reference else [])
    error = mine.error(mode)
    repeats = options.repeats or rounds_for(runs, mine.inputs, options.seconds)
    spent = times(runs, mine.inputs, repeats)  # of the user's model, and of the contender
    low, median, high = statistics.quantiles(spent[-1], method="inclusive") if repeats > 1 else spent[-1] * 3
    contender, theirs = mine.contender, statistics.median(spent[0])
    madds = contender.multiply_adds()
    return {
        "plan": contender.plan,
        "latency_ms": median,
        "latency_low_ms": low,  # the quartiles
        "latency_high_ms": high,
        "single_ms": theirs,
        "ratio_to_single": median / theirs,
        "limit": madds / workshop.single_multiply_adds(),  # the ratio that arithmetic alone would give
        "multiply_adds": madds,  # per input, those actually computed
        "parameters": contender.parameters,
        "weight_bytes": contender.weight_bytes,
        "peak_memory_bytes": mine.peak_memory(mode),
        "repeats": repeats,
        "error": error,  # relative to the model before it was optimized, compiled or recorded
        "torch": str(torch.__version__),
    }


def hardware(device: str) -> str:
    """The name of what times are measured on."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def conversion(options: argparse.Namespace) -> None:
    """Time `convert` in float32 with and without its comparison of answers, in turn; in CPU seconds."""
    model = SHAPES[options.shape].build().to(options.device).eval()
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(1 + (options.repeats or 5)):  # the first warms up
        for probe, seconds in spent.items():
            start = time.process_time()
            he.convert(model, probe=probe)
            seconds += [time.process_time() - start] if turn else []
    whole, plain = (statistics.median(seconds) for seconds in spent.values())
    numbers = {"convert_seconds": whole, "comparison_seconds": whole - plain}
    facts = {"hardware": hardware(options.device), "shape": options.shape, **numbers}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    write_csv(options.output, [["key", "value"], *map(list, facts.items())])


def counts(options: argparse.Namespace) -> None:
    """Count what contenders store and compute, from their shapes."""
    workshop = Workshop(SHAPES[options.shape], DTYPES[options.dtype], options.device, options.seed)
    lines: list[list[Any]] = [["shape", "contender", "members", "parameters", "limit"]]
    for name in options.contenders:
        members = MEMBERS.get(name, options.members[0])
        parameters, madds = workshop.counts(name, members)
        lines.append([options.shape, name, members, parameters, madds / workshop.single_multiply_adds()])
        print(f"{name:<22}{members:>3}{parameters / 1e6:>9.1f} M{lines[-1][-1]:>7.2f}", flush=True)
    write_csv(options.output, lines)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    add("--repeats", type=int, help="timed rounds; default: as many as fit in --seconds")
    add("--seconds", type=float, default=1.0, help="time for the rounds of a row")
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="measure rows that the output has already")
    add("--output", type=Path, default=ROOT / "results" / "tables" / "inference.csv", help="rows are merged into it")
    add("--conversion", action="store_true", help="time `convert` instead")
    add("--counts", action="store_true", help="count parameters and multiply-adds instead")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.modes = options.modes or (["graphed"] if on_gpu else ["eager"])
    if not on_gpu and any(mode.startswith("graphed") for mode in options.modes):
        parser.error(f"CUDA graphs need a GPU, the device is {options.device}")
    names = NAMES if options.methods else GROWING if len(options.members) > 1 else USUAL
    images = bool(SHAPES[options.shape].pixels)
    options.contenders = options.contenders or [name for name in names if images or name != "mimo"]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # many models, each with its shapes
    with torch._dynamo.config.patch(limits):
        (conversion if options.conversion else counts if options.counts else measured)(options)


if __name__ == "__main__":
    main()
