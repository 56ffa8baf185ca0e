"""Pictures for stand-in files, and whether parts of data sets meet."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hydra_ensembles.data import SetRef, TextDataset

WriteParquet = Callable[..., Path]


def picture(number: int, size: int = 8, mode: str = "RGB") -> Image.Image:
    """An image whose content depends on the number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **options)
    return stored.getvalue()


def meet(one: SetRef, other: SetRef) -> bool:
    """Whether two parts share rows of one data set, whatever classes are left out."""
    data = TextDataset(range(10_000), np.zeros(10_000))  # type: ignore[arg-type]
    rows = [set(replace(part, without=()).part_of(data).rows.tolist()) for part in (one, other)]
    return (one.source, one.config, one.split) == (other.source, other.config, other.split) and bool(rows[0] & rows[1])
