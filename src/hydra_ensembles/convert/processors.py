"""Preprocessing read off the objects that libraries use for it."""

from typing import Any

from ..config import PatchStemConfig, TextStemConfig
from ..errors import ConversionError
from ..preprocessing import ImagePreprocessing, TextPreprocessing


def read_processor(processor: Any, stem: PatchStemConfig | TextStemConfig) -> ImagePreprocessing | TextPreprocessing:
    """Our description of a tokenizer or an image processor."""
    if isinstance(processor, ImagePreprocessing | TextPreprocessing):
        return processor
    raise ConversionError(f"a processor of type {type(processor).__name__} is not supported for {stem.kind} input")
