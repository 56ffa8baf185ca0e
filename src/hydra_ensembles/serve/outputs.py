"""Inputs and outputs of an ensemble as named arrays: the same in exported files, servers and tables.

`prediction.OUTPUTS` lists the parts of a prediction; here each becomes a field with a shape and a dtype.

The sample is the first axis of every input and output, also of member logits (`[B, M, C]`): the arrays are columns of
a table, and batches that a server can split and join.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batches import READ
from ..metrics.conformal import Reference
from ..model.config import PatchStemConfig
from ..model.ensemble import Ensemble
from ..prediction import OUTPUTS, REASONS, Prediction

Arrays = dict[str, np.ndarray[Any, Any]]  # by output name
REASON_WORDS = tuple(reason or "" for reason in REASONS)
"""Words for the codes of the output `reason`; empty where the sample is accepted."""


@dataclass(frozen=True)
class Field:
    """One named input or output.

    Attributes:
        name: The same in files, servers and tables.
        shape: Of one sample; -1 stands for the number of tokens, the same in all inputs.
        dtype: NumPy name.
        meaning: One sentence.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str


def input_fields(ensemble: Ensemble) -> tuple[Field, ...]:
    """Preprocessed inputs of the ensemble; the main input first."""
    stem, preprocessing = ensemble.config.stem, ensemble.metadata.preprocessing
    main, *extra = READ[ensemble.kind]
    if isinstance(stem, PatchStemConfig):
        dtype = str(ensemble.dtype).removeprefix("torch.")
        return (Field(main, (stem.channels, *stem.image_size), dtype, "Images, resized, cropped and normalised."),)
    mask, segments = extra
    is_read = {main: True, mask: getattr(preprocessing, mask, True)}
    is_read[segments] = stem.segments > 0 and getattr(preprocessing, "segments", True)
    meanings = ("Token ids.", "1 at tokens and 0 at padding.", "The segment of each token.")
    described = zip(is_read, meanings, strict=True)
    return tuple(Field(name, (-1,), "int64", meaning) for name, meaning in described if is_read[name])


def output_fields(ensemble: Ensemble) -> tuple[Field, ...]:
    """Outputs of this classifier; p-values, familiarity and verdict only if they were fitted."""
    familiarity, members = ensemble.metadata.familiarity, ensemble.num_members
    dtype = torch.float64 if ensemble.dtype == torch.float64 else torch.float32
    shape = 0 if familiarity is None else len(familiarity.settings.scores), members, 1  # [S, M, 1]
    scores = None if familiarity is None else torch.zeros(shape, dtype=dtype)
    blank = ensemble.prediction(torch.zeros(members, 1, ensemble.num_classes, dtype=dtype), scores)
    return tuple(
        Field(name, array.shape[1:], str(array.dtype), OUTPUTS[name].meaning if name in OUTPUTS else
              f"How unlike familiar data the features are, by {name}; higher = less familiar.")
        for name, array in columns(blank).items()
    )  # fmt: skip


def held_out(ensemble: Ensemble) -> dict[str, tuple[Reference | None, float | None]]:
    """Held-out scores and the threshold, by name of the output that is compared with them; each None if not fitted."""
    calibration, familiarity = ensemble.metadata.calibration, ensemble.metadata.familiarity
    by_output = {} if calibration is None else {"score": (calibration.reference, calibration.threshold)}
    if familiarity is not None:
        by_output[familiarity.settings.scores[0]] = (familiarity.settings.reference, familiarity.settings.threshold)
    return by_output


def named_tensors(prediction: Prediction) -> dict[str, Tensor]:
    """The outputs of a prediction by name, on its device, without synchronisation."""
    outputs = {name: output.read(prediction) for name, output in OUTPUTS.items()}
    unfamiliarity = prediction.unfamiliarity
    fitted = {} if unfamiliarity is None else {name: unfamiliarity.score(name) for name in unfamiliarity.score_names}
    return {name: tensor for name, tensor in (*outputs.items(), *fitted.items()) if tensor is not None}


def columns(prediction: Prediction) -> Arrays:
    """The outputs of a prediction by name, as arrays whose first axis is the sample."""
    return {name: tensor.cpu().numpy() for name, tensor in named_tensors(prediction).items()}


class Answering(nn.Module):
    """An ensemble that returns named outputs: calibration, familiarity and verdict are inside the module.

    It takes the inputs of `input_fields` as keywords. Unlike `predict` it does no preprocessing and no check for NaN
    logits, so it is one graph without breaks for compilers and exporters.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The named outputs, each `[B, …]`; give the inputs that `input_fields` lists."""
        main = input_ids if pixel_values is None else pixel_values
        logits, unfamiliarity = self.ensemble.answers(main, attention_mask, token_type_ids)
        outputs = named_tensors(self.ensemble.prediction(logits, unfamiliarity, check_finite=False))
        return outputs | {"score": outputs["score"].clone()}  # exported outputs must not share a tensor
