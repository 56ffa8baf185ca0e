"""The embedded demo: a small trained vision transformer and a sample of real images, inside the package."""

from .run import load_backbone, load_sample, run_demo

__all__ = ["load_backbone", "load_sample", "run_demo"]
