"""The command line, with Ctrl-C at a given moment: interrupted_cli.py NAME ARGUMENTS...

The signal comes when a file whose path ends in NAME is about to get its name, so that stage is not finished.
"""

import os
import signal
import sys
from typing import Any

from hydra_ensembles.cli.entry import main


def interrupt_at(name: str) -> None:
    original = os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        if str(target).endswith(name):
            os.kill(os.getpid(), signal.SIGINT)
        original(source, target, **options)

    os.replace = replace  # type: ignore[assignment]


if __name__ == "__main__":
    interrupt_at(sys.argv[1])
    sys.argv = ["hydra-ensembles", *sys.argv[2:]]
    main()
