"""Features of a tower that does not learn, which need to be computed only once."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .._utils import evaluation_mode
from ..batches import Batches
from ..errors import DataError
from ..model.clip import DualEncoder
from ..model.config import output_width
from ..model.ensemble import Ensemble

TEXTS_AT_ONCE = 256


@torch.no_grad()
def image_features(dual: DualEncoder, batches: Batches) -> Tensor:
    """What the image projection of a dual encoder with one member takes, `[N, d]`, on the encoder's device.

    Args:
        dual: Its image tower runs in evaluation mode and is left as it was.
        batches: Batches of images, alone or first in a pair: what `encode_image` takes.
    """
    return _all_features(dual.image, (_images(batch) for batch in batches))


@torch.no_grad()
def text_features(dual: DualEncoder, texts: list[str]) -> Tensor:
    """What the text projection of a dual encoder with one member takes, `[N, d]`, on the encoder's device."""
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    return _all_features(dual.text, (texts[start : start + TEXTS_AT_ONCE] for start in starts))


def given_features(inputs: Any) -> bool:
    """Whether these are features `[B, d]` rather than what a tower takes."""
    return isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.is_floating_point()


def features_of(tower: Ensemble, inputs: Any, where: str) -> Tensor:
    """Features `[B, d]` of what a tower takes, or the features themselves where they were computed before."""
    if not given_features(inputs):
        return cast(Tensor, tower(tower.prepare(inputs)))[0]  # [1, B, d] to [B, d]
    width = output_width(tower.config)
    if inputs.shape[1] != width:
        raise DataError(
            f"the {tower.kind} features of {where} have shape {list(inputs.shape)}, the {tower.kind} tower gives "
            f"{width} numbers each; compute them with {tower.kind}_features and this dual encoder"
        )
    return cast(Tensor, inputs.to(tower.device, tower.dtype))


def _all_features(tower: Ensemble, batches: Batches) -> Tensor:
    with evaluation_mode(tower):
        parts = [features_of(tower, batch, f"batch {index}") for index, batch in enumerate(batches)]
    if not parts:
        raise DataError(f"there is nothing to compute {tower.kind} features of; check the data")
    return torch.cat(parts)


def _images(batch: Any) -> Any:
    if isinstance(batch, Tensor | Mapping):
        return batch
    return batch[0] if isinstance(batch[0], Tensor | Mapping | list | tuple) else batch
