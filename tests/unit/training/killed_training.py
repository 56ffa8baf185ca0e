"""A training that ends at once, as if killed, before it reads a given batch: killed_training.py FOLDER COUNT."""

import os
import sys
from pathlib import Path

from test_training_loop import hard_run
from training_cases import Stopping, shuffled


class Deadly(Stopping):
    """Ends the process without a chance to tidy up."""

    def __iter__(self):
        try:
            yield from super().__iter__()
        except KeyboardInterrupt:
            os._exit(9)


if __name__ == "__main__":
    hard_run(Path(sys.argv[1]), Deadly(shuffled(count=40), int(sys.argv[2])))
