"""How well texts are found by images."""

import math

import torch
from torch import Tensor

from ..errors import DataError

ROWS_AT_ONCE = 1024


@torch.no_grad()
def retrieval(images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None) -> tuple[float, float]:
    """Share of images whose nearest text is of their class, and the mean NLL of all texts of their class.

    Args:
        images: Embeddings of length one, `[N, e]`.
        texts: Likewise.
        logit_scale: Logarithm of the scale of the cosines.
        labels: Class of every pair; None where only the text of the pair itself is right.
    """
    classes = torch.arange(len(images), device=images.device) if labels is None else labels
    right, nll = 0, 0.0
    for rows in torch.arange(len(images), device=images.device).split(ROWS_AT_ONCE):
        log_probs = (logit_scale.exp() * (images[rows] @ texts.T)).double().log_softmax(1)  # [rows, N]
        same = classes[rows, None] == classes[None, :]
        right += int(same.gather(1, log_probs.argmax(1, keepdim=True)).sum())
        nll -= float(log_probs.masked_fill(~same, -math.inf).logsumexp(1).sum())
    if not math.isfinite(nll):
        raise DataError(f"validation has a negative log-likelihood of {nll}; look for bad values in its pairs")
    return right / len(images), nll / len(images)
