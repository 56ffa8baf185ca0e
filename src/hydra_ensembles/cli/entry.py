"""The console script: says which extra is missing instead of failing on an import."""

import sys

from .._extras import require
from ..errors import MissingExtraError


def main() -> None:
    """Run the command line, or name the extra that installs it."""
    try:
        for library in ("typer", "rich"):
            require(library, extra="cli")
    except MissingExtraError as error:
        print(f"hydra-ensembles: {error}", file=sys.stderr)
        sys.exit(2)
    require("hydra_ensembles.cli.main", extra="cli").main()
