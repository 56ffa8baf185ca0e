"""Use of a saved ensemble: named outputs, export to other runtimes, an HTTP server, scoring of archives."""

from .app import make_app
from .ray_app import ray_app
from .scoring import Scorer, score_archive
from .service import ServeSettings

__all__ = ["Scorer", "ServeSettings", "make_app", "ray_app", "score_archive"]
