"""The embedded demo: a small trained vision transformer and a sample of real images, inside the package."""

from .embedded import DemoSample, load_backbone, load_deep_logits, load_sample
from .run import DemoSettings, run_demo

__all__ = [
    "DemoSample",
    "DemoSettings",
    "load_backbone",
    "load_deep_logits",
    "load_sample",
    "run_demo",
]
