"""Optional libraries, imported at the moment they are needed and not before."""

import importlib
from types import ModuleType

from .errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say which extra installs it.

    Args:
        module: Dotted name of the module to import.
        extra: Name of the extra of `hydra-ensembles` that brings it.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"this call needs the library {package!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hydra-ensembles[{extra}]'"
        ) from error
