"""Use of a saved ensemble: named outputs, export to other runtimes, an HTTP server, scoring of archives."""

from .app import make_app, ray_app, serve
from .batcher import ServeSettings
from .scorer import Scorer
from .scoring import Scored, score

__all__ = ["Scored", "Scorer", "ServeSettings", "make_app", "ray_app", "score", "serve"]
