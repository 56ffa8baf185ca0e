"""Run the notebooks from top to bottom and keep what they print and draw.

python notebooks/execute.py                                # all of them
python notebooks/execute.py notebooks/first_steps.ipynb
"""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def executed(path: Path) -> Any:
    """The notebook with its outputs; it ends where a cell fails or writes to stderr, as warnings do."""
    notebook = nbformat.read(path, as_version=4)
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # of tqdm, where there are no widgets
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(env={**os.environ, **quiet})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day
        said = [one["text"] for one in cell.get("outputs", []) if one.get("name") == "stderr"]
        if said:
            raise RuntimeError(f"{path.name} says {''.join(said)!r} to this cell:\n{cell.source}")
    return notebook


def main() -> None:
    """Execute those that are named, or all."""
    named = [Path(one) for one in sys.argv[1:]]
    for path in named or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
