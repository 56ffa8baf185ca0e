"""Saved models: `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card.

Nothing here knows a model class. A model that wants to be saved hands over plain data (`Contents`) and gets
plain data back (`Stored`), so every kind of model goes through the same files and the same checks.
"""

from .contents import Contents
from .ensemble_record import (
    ENSEMBLE,
    ensemble_contents,
    metadata_to_plain,
    read_ensemble,
    read_metadata,
    with_text_side,
)
from .hub import push_checkpoint
from .reading import Stored, open_checkpoint
from .writing import save_checkpoint

__all__ = [
    "ENSEMBLE",
    "Contents",
    "Stored",
    "ensemble_contents",
    "metadata_to_plain",
    "open_checkpoint",
    "push_checkpoint",
    "read_ensemble",
    "read_metadata",
    "save_checkpoint",
    "with_text_side",
]
