"""From a saved ensemble to a service: named outputs, files for other runtimes, a server, archives scored."""

from .app import make_app
from .settings import ServeSettings

__all__ = ["ServeSettings", "make_app"]
