"""Faster matrix products where they need not be precise."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 (ten bits of mantissa) within a `with` block.

    For estimates that are compared with each other. Other devices and other dtypes are not affected.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
