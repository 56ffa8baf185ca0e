"""`hydra-ensembles` and `python -m hydra_ensembles`: the command line, or the name of the extra that installs it."""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from ._utils import require
from .errors import MissingExtraError


def run_loaded(name: str, given: Mapping[str, Any]) -> None:
    """Run a command by its name; without its libraries, and before and after it, nothing ends in a traceback."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what fails is said once, by us
    try:
        for library in ("typer", "rich", "yaml"):
            require(library, extra="cli")
        require("hydra_ensembles.cli.main", extra="cli").run_command(name, given)
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    import hydra_ensembles_cli

    hydra_ensembles_cli.main()
