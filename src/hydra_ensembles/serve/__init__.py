"""Use of a saved ensemble: named outputs, export to other runtimes, an HTTP server, scoring of archives."""

from .app import make_app, ray_app, serve
from .batcher import ServeSettings
from .scoring import Scored, score

__all__ = ["Scored", "ServeSettings", "make_app", "ray_app", "score", "serve"]
