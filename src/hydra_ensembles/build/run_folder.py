"""The folder of a build: every stage leaves its product there, and a stage whose product exists is not run again."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..ensemble import Ensemble
from ..errors import CheckpointError
from ..files import write_atomically
from ..heads import HeadRanking

T = TypeVar("T")

IDENTITY = "run.json"
SUMMARY = "summary.json"


class RunFolder:
    """Products of a build by name; without a path nothing is kept and every stage runs.

    Attributes:
        path: The folder, or None.
        seconds: Time each stage took in this process; a stage read back is not listed.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.seconds: dict[str, float] = {}
        if self.path is not None:
            self._claim(self.path, json.loads(json.dumps(identity)))

    def place(self, name: str) -> Path | None:
        """Where a stage may keep its own files, or None."""
        return None if self.path is None else self.path / name

    def ensemble(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """The ensemble saved under `name`, or the one `make` gives, saved."""
        folder = self.place(name)
        if folder is not None and (folder / "config.json").exists():
            return Ensemble.from_pretrained(folder)
        ensemble = self._timed(name, make)
        if folder is not None:
            ensemble.save_pretrained(folder)
        return ensemble

    def ranking(self, name: str, make: Callable[[], HeadRanking]) -> HeadRanking:
        """The ranking saved under `name`, or the one `make` gives, saved."""
        file = self.place(f"{name}.json")
        if file is not None and file.exists():
            return HeadRanking.load(file)
        ranking = self._timed(name, make)
        if file is not None:
            ranking.save(file)
        return ranking

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write `summary.json`, the last file of a build."""
        file = self.place(SUMMARY)
        if file is not None:
            write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())

    def _timed(self, name: str, make: Callable[[], T]) -> T:
        start = time.perf_counter()
        product = make()
        self.seconds[name] = round(time.perf_counter() - start, 3)
        return product

    @staticmethod
    def _claim(path: Path, identity: dict[str, Any]) -> None:
        """Write down what this run is, or refuse a folder that holds another one."""
        file = path / IDENTITY
        if not file.exists():
            write_atomically(file, (json.dumps(identity, indent=1) + "\n").encode())
            return
        try:
            found = json.loads(file.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; give another output folder") from error
        different = sorted(key for key in found.keys() | identity.keys() if found.get(key) != identity.get(key))
        if different:
            raise CheckpointError(
                f"{path} holds the build of something else: {', '.join(different)} differ; "
                "give another output folder, or delete this one to start over"
            )
