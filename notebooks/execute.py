"""Run the notebooks from top to bottom: each ends where a cell fails or writes to stderr, as warnings do.

python notebooks/execute.py                                # all of them
python notebooks/execute.py notebooks/first_steps.ipynb
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(path: Path) -> None:
    """Run a notebook; the file is not changed."""
    notebook = nbformat.read(path, as_version=4)
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # of tqdm, where there are no widgets
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(env={**os.environ, **quiet})
    for cell in notebook.cells:
        said = [one["text"] for one in cell.get("outputs", []) if one.get("name") == "stderr"]
        if said:
            raise RuntimeError(f"{path.name} says {''.join(said)!r} to this cell:\n{cell.source}")


if __name__ == "__main__":
    for given in [Path(one) for one in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        execute(given)
