"""The folder a demo writes into: claimed before any work, refused where it holds something else."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._utils import write_atomically
from ..errors import CheckpointError

FORMAT = "hydra_ensembles demo 1"
CONFIG = "config.json"


class DemoFolder:
    """Places of a demo's products.

    Attributes:
        path: The folder.
        config: What was run, as it was resolved; written first, so that it also says whose folder this is.
        results: Every number.
        report: The HTML report.
        model: The fused ensemble.
        evaluations: One file a method, for `hydra-ensembles compare`.
        work: Products of unfinished builds; removed at the end.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        """Claim the folder.

        Args:
            path: The folder; it is made if it does not exist.
            settings: What the run depends on, as plain data.

        Raises:
            CheckpointError: It is a file, or holds something that is not a demo with these settings.
        """
        self.path = Path(path).expanduser()
        self.config = self.path / CONFIG
        self.results = self.path / "results.json"
        self.report = self.path / "report.html"
        self.model = self.path / "model"
        self.evaluations = self.path / "evaluations"
        self.work = self.path / "work"
        content = {"format": FORMAT, **settings}
        self._require_ours(json.loads(json.dumps(content)))
        write_json(self.config, content)

    def _require_ours(self, content: Mapping[str, Any]) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"output is {self.path}, which is a file; name a folder, it is made if need be")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        try:
            found = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path} is not empty and was not written by the demo; nothing there is touched: give another "
                "output folder"
            )
        if found != content:
            raise CheckpointError(
                f"{self.path} holds a demo with other settings ({found.get('settings')}); give another output "
                "folder, or delete this one"
            )

    def finish(self) -> None:
        """Remove what only an interrupted run needs."""
        shutil.rmtree(self.work, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data, at once or not at all."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode())
