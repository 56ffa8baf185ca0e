"""Transformer classifiers that know when not to answer: one alone, or several members fused and run in one pass."""

import sys
from importlib import import_module

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__:  # python -m hydra_ensembles
    import hydra_ensembles_cli

    hydra_ensembles_cli.answer()  # answers --help at once; anything to run continues in __main__

from ._utils import __version__
from .baselines.mc_dropout import mc_dropout
from .calibrate import calibrate, fit_calibration
from .circuit.extract import extract_circuit
from .convert.convert import convert
from .convert.declared import Declaration
from .errors import HydraError, HydraWarning
from .evaluation.atlas import Atlas, atlas
from .evaluation.evaluate import evaluate
from .evaluation.evaluation import Evaluation
from .familiarity import fit_familiarity
from .fuse import fuse, soup
from .heads.masking import masked
from .heads.ranking import Head, HeadRanking
from .heads.taylor import taylor
from .model import LATER
from .model.config import RotaryConfig
from .model.dual_encoder import DualEncoder
from .model.ensemble import Ensemble
from .model.kinds import load
from .model.stem_readout import Projections
from .model.zero_shot import retarget, zero_shot
from .pipeline.build import build
from .pipeline.search import search
from .pipeline.search_result import SearchResult
from .pipeline.settings import HydraConfig
from .prediction import Prediction
from .preprocessing import ImagePreprocessing, TextPreprocessing
from .prune import prune
from .report.compare import compare
from .report.html import write_atlas, write_report
from .serve.export import export
from .training.finetune import finetune
from .training.recipe import Recipe
from .training.text import tune_text

__all__ = [
    "Atlas", "Declaration", "DualEncoder", "Ensemble", "Evaluation", "Head", "HeadRanking", "HydraConfig",
    "HydraError", "HydraWarning", "ImagePreprocessing", "Prediction", "Projections", "Recipe", "RotaryConfig",
    "SearchResult", "TextPreprocessing", "__version__", "atlas", "build", "calibrate", "compare", "convert",
    "evaluate", "export", "extract_circuit", "finetune", "fit_calibration", "fit_familiarity", "fuse", "load",
    "masked", "mc_dropout", "prune", "retarget", "search", "soup", "taylor", "tune_text", "write_atlas",
    "write_report", "zero_shot",
]  # fmt: skip

# methods of Ensemble that are written in higher layers
LATER["stack"] = lambda: import_module(".fuse", __name__).stack
LATER["optimize"] = lambda: import_module(".optimize.runner", __name__).OptimizedEnsemble
