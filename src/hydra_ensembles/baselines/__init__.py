"""The methods that Hydra Ensembles are compared with, one file per method.

All that train are called alike: `method(model, train, recipe, settings, validation, **run)`. `model` is a classifier
with one member, which is not changed; `train` and `validation` are labelled batches that can be read repeatedly, as
for `finetune`; `run` are `output`, `progress`, `device` and `checkpoint_every`, also as for `finetune`.
"""

from .batch_ensemble import BatchEnsemble, batch_ensemble
from .bayes_vlm import BayesVLM, bayes_vlm, published_bayes_vlm
from .deep_ensemble import Packed, deep_ensemble, packed_ensemble
from .lora import LoRA, lora_ensemble
from .mc_dropout import mc_dropout
from .mimo import MIMO, mimo
from .oba import OBA, oba
from .posterior import Laplace, laplace
from .vilu import ViLU, vilu

__all__ = [
    "BatchEnsemble", "BayesVLM", "Laplace", "LoRA", "MIMO", "OBA", "Packed",
    "ViLU", "batch_ensemble", "bayes_vlm", "deep_ensemble", "laplace", "lora_ensemble", "mc_dropout",
    "mimo", "oba", "packed_ensemble", "published_bayes_vlm", "vilu",
]  # fmt: skip
