"""The two ends of `predict`: from what a user has to inputs, and from member logits to a prediction."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .batches import Inputs, move, read_batch
from .errors import ConfigError, DataError
from .metadata import Calibration, Metadata
from .prediction import Prediction


def prepared_inputs(inputs: Any, metadata: Metadata, kind: str, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs for `forward` on a device and in a dtype; raw ones go through the saved preprocessing.

    Args:
        inputs: Tensors or a mapping of them; or a PIL image, a string, a pair of strings, or a list of them.
        metadata: Of the ensemble.
        kind: `"image"` or `"text"`, what the ensemble takes.
        device: Where the inputs go.
        dtype: Of those that are floating-point numbers.
    """
    if not isinstance(inputs, Tensor | Mapping):
        if metadata.preprocessing is None:
            raise DataError(
                f"got {type(inputs).__name__}, but this ensemble has no saved preprocessing; "
                "give tensors, or convert the model with processor="
            )
        raw: Any = [inputs] if isinstance(inputs, tuple) and kind == "text" else inputs
        inputs = metadata.preprocessing(raw)
    return move(read_batch(inputs)[0], device, dtype)


def calibrated_prediction(logits: Tensor, metadata: Metadata, num_classes: int) -> Prediction:
    """What member logits `[M, B, C]` say, with the calibration and the class names of the ensemble."""
    if not num_classes:
        raise ConfigError("this ensemble has no classifier; convert the model with num_labels=, or use features()")
    calibration = metadata.calibration or Calibration()
    return Prediction.from_logits(
        logits,
        temperature=calibration.temperature if len(calibration.temperature) > 1 else calibration.temperature[0],
        threshold=calibration.threshold,
        score=calibration.score,
        class_names=metadata.labels or None,
    )
