"""Cost of a model: parameters, multiply-adds, time."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._utils import few_digits
from .config import EncoderConfig, EnsembleConfig, KeptHeads, LowRank, PatchStemConfig
from .inputs import Given, model_call
from .layers import evaluating

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True)
class Description:
    """Counts of an ensemble; print it for a summary and a table of the heads kept.

    Shared parameters count once. `multiply_adds` are those of one input with `tokens` tokens: matrix products and the
    patch convolution, no biases, norms, softmax and activations. `heads` are the original indices of those kept,
    `[member][layer]`; `pooling_heads` the number of heads of an attention that pools, which is last in it.
    """

    parameters: int
    multiply_adds: int
    tokens: int
    heads: KeptHeads
    heads_per_layer: int
    pooling_heads: int = 0

    def __str__(self) -> str:
        lines = [
            f"parameters     {few_digits(self.parameters / 1e6)} M",
            f"multiply-adds  {few_digits(self.multiply_adds / 1e9)} G  ({self.tokens} tokens)",
            f"heads kept     of {self.heads_per_layer} per layer",
            "layer" + "".join(f"{f'member {member}':>10}" for member in range(len(self.heads))),
        ]
        if not self.heads:  # of a cascade, whose stages differ
            return "\n".join(lines[:2])
        for layer, kept in enumerate(zip(*self.heads, strict=True)):
            lines.append(f"{layer:>5}" + "".join(f"{len(heads):>10}" for heads in kept))
        if self.pooling_heads:
            lines[-1] += f"  (of {self.pooling_heads}: the attention that pools)"
        return "\n".join(lines)


def multiply_adds(config: EnsembleConfig, tokens: int) -> int:
    """Multiply-adds of one input; the shortcut of the last block is ignored, for comparison with other libraries."""
    encoder, stem = config.encoder, config.stem
    total = 0
    branches = config.copies("stem")
    if isinstance(stem, PatchStemConfig):
        patches = tokens - stem.prefix_tokens
        total += branches * patches * encoder.width * stem.channels * stem.patch_size[0] * stem.patch_size[1]
    elif stem.project:
        total += branches * tokens * stem.embedding_width * encoder.width
    for layer in range(encoder.layers):
        if (
            encoder.norm_first and not encoder.norm_after and (layer or encoder.first_norm)
        ):  # a norm before the attention
            branches = max(branches, config.copies("norms", layer))
        ranks = config.ranks(layer)
        several = {name: config.members if rank else 1 for name, rank in vars(ranks).items()}
        copies = max(branches, config.copies("attention", layer), several["inputs"])
        kept = [config.heads[member][layer] for member in range(copies)]
        total += sum(attention_cost(encoder, one, tokens) for one in kept)
        if several["inputs"] > branches:  # updates branch off from projections that are still the same for all
            total -= (copies - branches) * tokens * encoder.width * _inputs_width(encoder, kept[0])
        branches = max(copies, several["out"], config.copies("norms", layer), config.copies("mlp", layer))
        down = tokens * encoder.width * encoder.mlp_width
        total += branches * (mlp_cost(encoder, tokens) - down) + max(branches, several["up"]) * down
        branches = max(branches, several["up"], several["down"])
        total += config.members * tokens * _of_updates(encoder, ranks, kept[0])
    if (pooling := config.pooling) is not None:
        branches = max(branches, config.copies("readout"), config.attention_copies(encoder.layers))
        total += sum(attention_cost(pooling, config.heads[member][-1], tokens, 1) for member in range(branches))
        total += branches * mlp_cost(pooling, 1)
    return total + max(branches, config.copies("readout")) * _readout(config)


def attention_cost(encoder: EncoderConfig, kept: tuple[int, ...], tokens: int, queries: int | None = None) -> int:
    """Multiply-adds of attention with these heads over all tokens, for all queries or some."""
    queries, projected = tokens if queries is None else queries, encoder.projected(kept)
    ends = (len(projected) + len(kept)) * encoder.width * queries  # first and last projection
    inside = 2 * len(kept) * queries * tokens + 2 * len(encoder.shares(projected)) * encoder.width * tokens
    return encoder.head_dim * (ends + inside)


def mlp_cost(encoder: EncoderConfig, tokens: int) -> int:
    """Multiply-adds of the MLP on `tokens` tokens."""
    return tokens * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)


def _inputs_width(encoder: EncoderConfig, kept: tuple[int, ...]) -> int:
    """Numbers that queries, keys and values of these heads have for a token."""
    projected = encoder.projected(kept)
    return encoder.head_dim * (len(projected) + 2 * len(encoder.shares(projected)))


def _of_updates(encoder: EncoderConfig, ranks: LowRank, kept: tuple[int, ...]) -> int:
    """Multiply-adds of one member's updates of a layer, for a token."""
    inputs = (1 if encoder.kv_heads is None else 2) * encoder.width + _inputs_width(encoder, kept)
    up = encoder.width + encoder.mlp_width * (2 if encoder.gated else 1)
    ends = encoder.width + len(kept) * encoder.head_dim, encoder.width + encoder.mlp_width
    return ranks.inputs * inputs + ranks.out * ends[0] + ranks.up * up + ranks.down * ends[1]


def _readout(config: EnsembleConfig) -> int:
    """Multiply-adds of hidden layer and classifier for one member."""
    readout, width = config.readout, config.encoder.width
    features = 2 * width if readout.pool == "cls_mean" else width
    total = features * features if readout.hidden else 0
    if readout.cosine is not None and readout.cosine.width is not None:
        total += features * readout.cosine.width
        features = readout.cosine.width
    return total + features * readout.num_classes * (2 if readout.pool == "distilled" else 1)


@dataclass(frozen=True)
class Cost:
    """Measured cost of one model, for a batch of `batch` inputs; the latency is a median.

    `latency_ratio` is the latency divided by that of the first model. Parameters and multiply-adds (of one input) are
    None where unknown.
    """

    name: str
    parameters: int | None
    multiply_adds: int | None
    latency_ms: float
    latency_ratio: float
    batch: int
    device: str
    repeats: int


def measure_costs(
    models: Mapping[str, Callable[[Any], Any]], inputs: Given, *, repeats: int = 20, warmup: int = 3
) -> tuple[Cost, ...]:
    """Measure models by name on one batch of inputs, in evaluation mode, alternately, on the device of the inputs."""
    example = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    runs = {name: model_call(model, inputs) for name, model in models.items()}
    with evaluating(*models.values()), torch.no_grad():
        interleaved_times(runs, warmup, example.device)
        times = interleaved_times(runs, repeats, example.device)
    reference = median(times[next(iter(models))])
    where = torch.cuda.get_device_name(example.device) if example.is_cuda else example.device.type
    costs = []
    for name, model in models.items():
        known: Any = model.describe() if hasattr(model, "describe") else None
        parameters, work = (None, None) if known is None else (known.parameters, known.multiply_adds)
        if known is None and isinstance(model, nn.Module):
            parameters = sum(p.numel() for p in model.parameters())
        seconds = median(times[name])
        costs.append(Cost(name, parameters, work, 1e3 * seconds, seconds / reference, len(example), where, repeats))
    return tuple(costs)


def interleaved_times(
    runs: Mapping[Name, Callable[[], object]], repeats: int, device: torch.device
) -> dict[Name, list[float]]:
    """Time each run `repeats` times, in seconds, alternately: a machine that is busy for a while slows all of them."""
    names = list(runs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            _wait(device)
            start = time.perf_counter()
            runs[name]()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
