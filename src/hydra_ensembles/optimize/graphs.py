"""CUDA graphs: record a forward pass once, replay it without launching its kernels one by one."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Tensor | None, ...]
Key = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


def shape_key(arguments: Arguments) -> Key:
    """What a recorded graph depends on: shapes and dtypes of the arguments."""
    return tuple(None if one is None else (tuple(one.shape), one.dtype) for one in arguments)


class GraphCache:
    """Recorded graphs of one function, one per shape of its arguments, the least recently used dropped first.

    A graph reads from buffers of its own; arguments are copied in and the result is copied out, so callers may
    keep what they get. Graphs of one pool share the memory of their intermediate results, which is safe as long as
    they are replayed one at a time.

    Args:
        function: What to record; tensors (or None) in, one tensor out.
        limit: How many graphs to keep.
        pool: Handle from `torch.cuda.graph_pool_handle`; None for a pool of its own.
    """

    def __init__(self, function: Callable[..., Tensor], limit: int = 16, pool: Any = None) -> None:
        self._function = function
        self._limit = limit
        self._pool = pool
        self._graphs: OrderedDict[Key, tuple[torch.cuda.CUDAGraph, Arguments, Tensor]] = OrderedDict()

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """Replay the graph for these shapes, recording it first where there is none."""
        key = shape_key(arguments)
        if key not in self._graphs:
            self._graphs[key] = self._record(arguments)
            if len(self._graphs) > self._limit:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, buffers, result = self._graphs[key]
        for buffer, argument in zip(buffers, arguments, strict=True):
            if buffer is not None and argument is not None:
                buffer.copy_(argument)
        graph.replay()
        return result.clone()

    def forget(self, key: Key) -> None:
        """Drop the graph of a shape and the memory it holds, if there is one."""
        self._graphs.pop(key, None)

    def _record(self, arguments: Arguments) -> tuple[torch.cuda.CUDAGraph, Arguments, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        buffers = tuple(None if one is None else one.clone() for one in arguments)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # let libraries pick kernels and allocate before anything is recorded
                self._function(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._function(*buffers)
        return graph, buffers, result
