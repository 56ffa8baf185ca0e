"""Uncertainty from one pretrained transformer: prune different heads, fuse the copies, predict in one pass."""

from ._version import __version__
from .build import HydraConfig, build
from .calibrate import calibrate, fit_calibration
from .convert import convert
from .dual_encoder import DualEncoder
from .ensemble import Ensemble
from .errors import HydraError
from .evaluation import Evaluation, evaluate
from .finetune import Recipe, finetune
from .fuse import fuse
from .heads import Head, HeadRanking, extract_circuit, masked, taylor
from .mc_dropout import mc_dropout
from .prediction import Prediction
from .preprocessing import ImagePreprocessing, TextPreprocessing
from .projections import Projections
from .prune import prune
from .report import compare, write_report
from .text_tuning import tune_text
from .zero_shot import retarget, zero_shot

__all__ = [
    "DualEncoder",
    "Ensemble",
    "Evaluation",
    "Head",
    "HeadRanking",
    "HydraConfig",
    "HydraError",
    "ImagePreprocessing",
    "Prediction",
    "Projections",
    "Recipe",
    "TextPreprocessing",
    "__version__",
    "build",
    "calibrate",
    "compare",
    "convert",
    "evaluate",
    "extract_circuit",
    "finetune",
    "fit_calibration",
    "fuse",
    "masked",
    "mc_dropout",
    "prune",
    "retarget",
    "taylor",
    "tune_text",
    "write_report",
    "zero_shot",
]
