"""What Hydra Ensembles are compared with, one file a method."""

from .batch_ensemble import BatchEnsemble, batch_ensemble
from .laplace import Laplace, laplace
from .lora import LoRA, lora_ensemble
from .mc_dropout import mc_dropout
from .mimo import MIMO, mimo
from .oba import OBA, oba
from .packed import Packed, packed_ensemble

__all__ = [
    "BatchEnsemble",
    "Laplace",
    "LoRA",
    "MIMO",
    "OBA",
    "Packed",
    "batch_ensemble",
    "laplace",
    "lora_ensemble",
    "mc_dropout",
    "mimo",
    "oba",
    "packed_ensemble",
]
