"""What models cost, measured side by side: parameters, multiply-adds, latency, memory.

Latencies of two models compare only when they were measured under the same conditions, so all models take turns
in one run, in an order that rotates, and the median of their times is reported. On a GPU the time is taken by
its own clock (CUDA events).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from ..training_flags import evaluation_mode


@dataclass(frozen=True)
class Cost:
    """What one model costs.

    Attributes:
        name: The model's name.
        parameters: Stored parameters; None for a function that is not a module.
        multiply_adds: Of one input, as the model describes itself; None where it does not.
        latency_ms: Median time of a batch.
        latency_low_ms: First quartile of the times.
        latency_high_ms: Third quartile.
        latency_ratio: Median over that of the first model measured.
        peak_memory_bytes: Weights and the most that a forward pass held beside them; None where the device
            keeps no such count (a CPU).
        batch: Inputs a batch.
        device: Where it was measured.
        repeats: How often each model ran.
    """

    name: str
    parameters: int | None
    multiply_adds: int | None
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    latency_ratio: float
    peak_memory_bytes: int | None
    batch: int
    device: str
    repeats: int


def measure_costs(
    models: Mapping[str, Callable[[Any], Any]],
    inputs: Tensor | Mapping[str, Tensor],
    *,
    repeats: int = 20,
    warmup: int = 3,
    autocast: torch.dtype | None = None,
) -> tuple[Cost, ...]:
    """Measure models on one batch of inputs, all of them on the device of the inputs.

    Args:
        models: By name; the first one is what the ratios refer to. Modules run in evaluation mode.
        inputs: One batch: a tensor, or a mapping of tensors. Its device decides where the clock is.
        repeats: Timed runs of each model.
        warmup: Runs of each model before the clock starts.
        autocast: Lower precision to run in, through `torch.autocast`; None for the models' own.

    Raises:
        ConfigError: There is no model, or nothing would be measured.
        DataError: Model and inputs are on different devices, or the batch is empty.
    """
    if not models:
        raise ConfigError("got no models to measure; give {name: model}")
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"repeats={repeats} and warmup={warmup} measure nothing; use at least 1 and 0")
    example = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    if not len(example):
        raise DataError("the batch to measure on is empty; give at least one input")
    for name, model in models.items():
        _check_device(name, model, example.device)
    modules = [model for model in models.values() if isinstance(model, nn.Module)]
    precision: AbstractContextManager[Any] = nullcontext()
    if autocast is not None:
        precision = torch.autocast(example.device.type, autocast)
    with evaluation_mode(*modules), torch.no_grad(), precision:
        for _ in range(warmup):
            for model in models.values():
                model(inputs)
        times = _interleaved_times(list(models.values()), inputs, repeats, example.device)
        memory = [_peak_memory(model, inputs, example.device) for model in models.values()]
    first = statistics.median(times[0])
    return tuple(
        _cost(name, model, taken, first, peak, example, repeats)
        for (name, model), taken, peak in zip(models.items(), times, memory, strict=True)
    )


def _cost(
    name: str, model: object, times: Sequence[float], first: float, peak: int | None, example: Tensor, repeats: int
) -> Cost:
    describe = getattr(model, "describe", None)
    description = describe() if callable(describe) else None
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, method="inclusive") if len(times) > 1 else (median,) * 3
    device = torch.cuda.get_device_name(example.device) if example.device.type == "cuda" else example.device.type
    return Cost(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else None,
        multiply_adds=getattr(description, "multiply_adds", None),
        latency_ms=median,
        latency_low_ms=low,
        latency_high_ms=high,
        latency_ratio=median / first if first else 1.0,
        peak_memory_bytes=peak,
        batch=len(example),
        device=device,
        repeats=repeats,
    )


def _interleaved_times(
    models: Sequence[Callable[[Any], Any]], inputs: Any, repeats: int, device: torch.device
) -> list[list[float]]:
    """Times in milliseconds of each model; in every round another one goes first."""
    clock = _cuda_time if device.type == "cuda" else _wall_time
    times: list[list[float]] = [[] for _ in models]
    for turn in range(repeats):
        for step in range(len(models)):
            index = (turn + step) % len(models)
            times[index].append(clock(models[index], inputs))
    return times


def _wall_time(model: Callable[[Any], Any], inputs: Any) -> float:
    start = time.perf_counter()
    model(inputs)
    return (time.perf_counter() - start) * 1e3


def _cuda_time(model: Callable[[Any], Any], inputs: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    model(inputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _peak_memory(model: Callable[[Any], Any], inputs: Any, device: torch.device) -> int | None:
    """Bytes of the weights, plus the most that one run allocated; other models on the device do not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model(inputs)
    torch.cuda.synchronize(device)
    weights = 0
    if isinstance(model, nn.Module):
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return weights + torch.cuda.max_memory_allocated(device) - before


def _check_device(name: str, model: object, device: torch.device) -> None:
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if parameter is not None and parameter.device != device:
        raise DataError(
            f"model {name!r} is on {parameter.device} and the inputs are on {device}; move one to the other"
        )
