"""What Hydra Ensembles are compared with, one file a method."""

from .lora import LoRA, lora_ensemble
from .mc_dropout import mc_dropout

__all__ = ["LoRA", "lora_ensemble", "mc_dropout"]
