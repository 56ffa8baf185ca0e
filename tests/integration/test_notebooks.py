"""The notebooks run from top to bottom, and what they hold is what a run left: light, whole and of no machine."""

from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept(path: Path) -> None:
    text, cells = path.read_text(), nbformat.read(path, as_version=4).cells
    assert len(text) < MOST_BYTES
    assert not [part for part in ("site-packages", "ipykernel_", "/tmp", "/home", "Traceback") if part in text]
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


@pytest.mark.slow  # seconds of a kernel's start, and a whole build each; .ci/run runs it
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    from notebooks.execute import executed

    cells = executed(path).cells
    kept = nbformat.read(path, as_version=4).cells
    for new, old in zip(cells, kept, strict=True):  # as many words and pictures; numbers differ between machines
        assert [one.output_type for one in new.get("outputs", [])] == [
            one.output_type for one in old.get("outputs", [])
        ]
