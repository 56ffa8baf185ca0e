"""Locked-image tuning: the text side of a dual encoder learns to meet an image tower that stays as it is."""

from .features import image_features, text_features
from .loss import contrastive_loss
from .tuning import tune_text

__all__ = ["contrastive_loss", "image_features", "text_features", "tune_text"]
