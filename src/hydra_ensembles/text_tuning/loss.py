"""The contrastive loss of images and texts, with as many positives as share a class."""

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_SCALE = 4.605170185988092  # log(100): where open_clip stops the logit scale


def positives(count: int, labels: Tensor | None, device: torch.device) -> Tensor:
    """Which of `count` images and texts belong together, `[N, N]`: the same label, or without labels the same place."""
    if labels is None:
        return torch.eye(count, dtype=torch.bool, device=device)
    return labels[:, None] == labels[None, :]


def contrastive_loss(
    images: Tensor, texts: Tensor, logit_scale: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Mean of the cross-entropies of every image over all texts and of every text over all images.

    The target of a row is spread evenly over its positives. Where all labels differ, this is CLIP's loss.

    Args:
        images: Embeddings of length one, `[N, e]`.
        texts: Likewise, `[N, e]`; text i describes image i.
        logit_scale: Logarithm of the scale of the cosines, one number.
        labels: Class of every pair, `[N]`; pairs of one class are positives of each other. None: each pair alone.
        label_smoothing: Of both cross-entropies.
    """
    logits = logit_scale.exp() * (images @ texts.T)  # [N, N]: images in rows, texts in columns
    target = positives(len(images), labels, images.device).to(logits.dtype)
    target = target / target.sum(1, keepdim=True)  # symmetric, so it serves both directions
    of_images = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    of_texts = F.cross_entropy(logits.T, target.T, label_smoothing=label_smoothing)
    return (of_images + of_texts) / 2
