"""Transformer classifiers that know when not to answer: one alone, or several members fused and run in one pass.

Names are imported when they are first used (PEP 562), so `import hydra_ensembles` loads no PyTorch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .model import LATER

if TYPE_CHECKING:
    from ._utils import __version__ as __version__
    from .baselines.mc_dropout import mc_dropout as mc_dropout
    from .calibrate import calibrate as calibrate
    from .cascade import cascade as cascade
    from .circuit.extract import extract_circuit as extract_circuit
    from .convert.convert import convert as convert
    from .convert.declared import Declaration as Declaration
    from .errors import HydraError as HydraError
    from .errors import HydraWarning as HydraWarning
    from .evaluation.evaluate import evaluate as evaluate
    from .evaluation.evaluation import Evaluation as Evaluation
    from .familiarity import fit_familiarity as fit_familiarity
    from .fuse import fuse as fuse
    from .fuse import soup as soup
    from .heads.masking import Head as Head
    from .heads.masking import masked as masked
    from .heads.masking import prune as prune
    from .heads.ranking import HeadRanking as HeadRanking
    from .heads.taylor import taylor as taylor
    from .model.config import RotaryConfig as RotaryConfig
    from .model.dual_encoder import DualEncoder as DualEncoder
    from .model.dual_encoder import load as load
    from .model.dual_encoder import zero_shot as zero_shot
    from .model.ensemble import Ensemble as Ensemble
    from .model.stem_readout import Projections as Projections
    from .monitor import Monitor as Monitor
    from .pipeline.build import build as build
    from .pipeline.search import SearchResult as SearchResult
    from .pipeline.search import search as search
    from .pipeline.settings import HydraConfig as HydraConfig
    from .prediction import Prediction as Prediction
    from .preprocessing import ImagePreprocessing as ImagePreprocessing
    from .preprocessing import TextPreprocessing as TextPreprocessing
    from .promise import Promise as Promise
    from .promise import certify as certify
    from .report.compare import compare as compare
    from .report.html import write_report as write_report
    from .serve.export import export as export
    from .training.distill import distill as distill
    from .training.finetune import finetune as finetune
    from .training.recipe import Recipe as Recipe
    from .training.text import tune_text as tune_text

_NAMES = {
    "_utils": "__version__",
    "baselines.mc_dropout": "mc_dropout",
    "calibrate": "calibrate",
    "cascade": "cascade",
    "circuit.extract": "extract_circuit",
    "convert.convert": "convert",
    "convert.declared": "Declaration",
    "errors": "HydraError HydraWarning",
    "evaluation.evaluate": "evaluate",
    "evaluation.evaluation": "Evaluation",
    "familiarity": "fit_familiarity",
    "fuse": "fuse soup",
    "heads.masking": "Head masked prune",
    "heads.ranking": "HeadRanking",
    "heads.taylor": "taylor",
    "model.config": "RotaryConfig",
    "model.dual_encoder": "DualEncoder load zero_shot",
    "model.ensemble": "Ensemble",
    "model.stem_readout": "Projections",
    "monitor": "Monitor",
    "pipeline.build": "build",
    "pipeline.search": "SearchResult search",
    "pipeline.settings": "HydraConfig",
    "prediction": "Prediction",
    "preprocessing": "ImagePreprocessing TextPreprocessing",
    "promise": "Promise certify",
    "report.compare": "compare",
    "report.html": "write_report",
    "serve.export": "export",
    "training.distill": "distill",
    "training.finetune": "finetune",
    "training.recipe": "Recipe",
    "training.text": "tune_text",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = ("baselines", "circuit", "data", "demo", "errors", "evaluation", "heads", "metrics", "report", "serve")

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):  # importing `.fuse` must not hide `fuse`
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

# methods of Ensemble that are written in higher layers
LATER["stack"] = lambda: import_module(".fuse", __name__).stack
LATER["optimize"] = lambda: import_module(".optimize.runner", __name__).OptimizedEnsemble
LATER["cascade"] = lambda: import_module(".cascade", __name__).Cascade
