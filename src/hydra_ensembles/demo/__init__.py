"""The embedded demo: a small trained vision transformer and a sample of real images, inside the package."""

from .embedded import DemoSample, load_answers, load_backbone, load_sample
from .gains import Answers, Gains, gains
from .run import DemoSettings, run_demo

__all__ = [
    "Answers", "DemoSample", "DemoSettings", "Gains", "gains", "load_answers", "load_backbone", "load_sample",
    "run_demo",
]  # fmt: skip
