"""What Hydra Ensembles are compared with, one file a method."""

from .batch_ensemble import BatchEnsemble, batch_ensemble
from .bayes_vlm import BayesVLM, bayes_vlm, published_bayes_vlm
from .laplace import Laplace, laplace
from .lora import LoRA, lora_ensemble
from .mc_dropout import mc_dropout
from .mimo import MIMO, mimo
from .oba import OBA, oba
from .packed import Packed, packed_ensemble

__all__ = [
    "BatchEnsemble",
    "Laplace",
    "BayesVLM",
    "LoRA",
    "MIMO",
    "OBA",
    "Packed",
    "batch_ensemble",
    "laplace",
    "bayes_vlm",
    "published_bayes_vlm",
    "lora_ensemble",
    "mc_dropout",
    "mimo",
    "oba",
    "packed_ensemble",
]
