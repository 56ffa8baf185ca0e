"""What Hydra Ensembles are compared with, one file a method."""

from .mc_dropout import mc_dropout

__all__ = ["mc_dropout"]
