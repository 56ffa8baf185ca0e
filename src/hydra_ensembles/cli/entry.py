"""The console script: says which extra is missing instead of failing on an import."""

import sys

from .._utils import require
from ..errors import MissingExtraError

INTERRUPTED = 130


def main() -> None:
    """Run the command line, or name the extra that installs it."""
    try:
        for library in ("typer", "rich", "yaml"):
            require(library, extra="cli")
        require("hydra_ensembles.cli.main", extra="cli").main()
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before a command had started, or after it had ended
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
