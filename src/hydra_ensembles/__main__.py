"""`hydra-ensembles` and `python -m hydra_ensembles`: the command line, or the name of the extra that installs it."""

import sys

from ._utils import require
from .errors import MissingExtraError


def main() -> None:
    """Run the command line; without its libraries, and before and after a command, nothing ends in a traceback."""
    try:
        for library in ("typer", "rich", "yaml"):
            require(library, extra="cli")
        require("hydra_ensembles.cli.main", extra="cli").main()
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
